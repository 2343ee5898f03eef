"""Where texts are shared, what one request wrote drafts for the next, unless they are kept apart; what is written is the
same."""

from pathlib import Path

import pytest

from tests.e2e.client import Client
from tests.e2e.conftest import COMMON, FORKED, TETRIS
from tetris_sglang.tools.server_process import ServerProcess

NEW_TOKENS, DEPTH = 64, 6


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    arguments = [
        *(*COMMON, *TETRIS, "--speculative-num-steps", str(DEPTH)),
        *("--speculative-tetris-capacity-per-request", str(DEPTH), "--speculative-tetris-shared-texts", "on"),
    ]
    with ServerProcess(arguments, Path(tmp_path_factory.mktemp("recent")) / "server.log", entry_point=FORKED) as server:
        yield Client(server.url, server.log_path)


def test_texts_are_shared_as_prefixes_are(client, prompts):
    text = prompts[0]["text"]

    def write(**keys) -> tuple[str, int]:
        """What is written, and in how many steps."""
        body = {
            "text": text,
            "sampling_params": {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True},
        }
        answer = client.post("/generate", body | keys).json()
        return answer["text"], answer["meta_info"]["spec_verify_ct"]

    first, num_alone = write()
    again, num_shared = write()
    # All drafts are right but for a match's first tokens: the other text has to share more than the own one.
    assert again == first and num_shared <= 1.5 * NEW_TOKENS / (DEPTH + 1) < num_alone
    for keys in ({"extra_key": "mine"}, {"cache_salt": "mine"}, {"extra_key": "mine", "cache_salt": "mine"}):
        assert write(**keys) == (first, num_alone)
        assert write(**keys) == (first, num_shared)
    client.flush_cache()
    assert write() == (first, num_alone)
