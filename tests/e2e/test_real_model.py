"""The real model and the shipped head, served as `make demo` serves them but for the capacity: an automatic one depends on what
passes take. Same text, and drafts that are worth something."""

from __future__ import annotations

import pytest

from tetris_sglang.tools.demo import NONE, TETRIS, server_arguments
from tetris_sglang.tools.load import count_drafts, generate
from tetris_sglang.tools.prompts import read_questions, render_chats
from tetris_sglang.tools.real_model import HEAD, ensure_target
from tetris_sglang.tools.server_process import ServerProcess, start_all

NEW_TOKENS = 48


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("logs")
    arguments = server_arguments(str(ensure_target()), str(HEAD))
    arguments[TETRIS] = [*arguments[TETRIS], "--speculative-tetris-capacity-per-request", "2"]
    started = {
        name: ServerProcess(arguments[name], folder / f"{index}.log", start_timeout_s=600)
        for index, name in enumerate((NONE, TETRIS))
    }
    try:
        failures = start_all(list(started.values()), lambda server: None)
        assert failures == [None, None], failures
        yield started
    finally:
        for server in started.values():
            server.stop()


def test_answers_are_those_without_speculation_and_drafts_are_accepted(servers):
    prompts = render_chats(ensure_target(), [question.text for question in read_questions()[:8]])
    options = {"concurrency": 4, "max_new_tokens": NEW_TOKENS, "ignore_eos": False}
    expected, _ = generate(servers[NONE].url, prompts, **options)
    found, _ = generate(servers[TETRIS].url, prompts, **options)
    assert [answer.text for answer in found] == [answer.text for answer in expected]
    assert len({answer.text for answer in found}) == len(prompts)
    counts = count_drafts(answer.meta_info for answer in found)
    # Measured: 0.36. A head that reads the wrong layers or positions has next to nothing accepted.
    assert counts.selected == 2 * counts.verify_steps and counts.success_rate > 0.2
