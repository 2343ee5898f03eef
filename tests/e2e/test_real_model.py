"""The real model and the shipped head, served as `make demo` serves them but for the capacity: an automatic one depends on what
passes take. Same text, and drafts that are worth something."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.conftest import FORKED
from tetris_sglang.tools.demo import NONE, TETRIS, server_arguments
from tetris_sglang.tools.load import Completion, count_drafts, generate
from tetris_sglang.tools.prompts import read_questions, render_chats
from tetris_sglang.tools.real_model import HEAD, ensure_target
from tetris_sglang.tools.server_process import ServerProcess

NEW_TOKENS = 32


def serve(arguments: list[str], log_path: Path, prompts: list[str]) -> list[Completion]:
    """What a server answers that runs for these prompts alone, with a pool no larger than they need: two of this model
    beside the tests' others fill 24 GB."""
    server = ServerProcess([*arguments, "--max-total-tokens", "4096"], log_path, entry_point=FORKED, start_timeout_s=600)
    try:
        server.start()
        return generate(server.url, prompts, concurrency=4, max_new_tokens=NEW_TOKENS, ignore_eos=False)[0]
    finally:
        server.stop()


def test_answers_are_those_without_speculation_and_drafts_are_accepted(tmp_path):
    arguments = server_arguments(str(ensure_target()), str(HEAD))
    prompts = render_chats(ensure_target(), [question.text for question in read_questions()[:6]])
    expected = serve(arguments[NONE], tmp_path / "none.log", prompts)
    tetris = [*arguments[TETRIS], "--speculative-tetris-capacity-per-request", "2"]
    found = serve(tetris, tmp_path / "tetris.log", prompts)
    assert [answer.text for answer in found] == [answer.text for answer in expected]
    assert len({answer.text for answer in found}) == len(prompts)
    counts = count_drafts(answer.meta_info for answer in found)
    # Measured: 0.36. A head that reads the wrong layers or positions has next to nothing accepted.
    assert counts.selected == 2 * counts.verify_steps and counts.success_rate > 0.2
