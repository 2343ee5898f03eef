"""What a server drafts with a DFlash or DFlare draft is what the draft computes in plain torch."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from tests.e2e.client import Client
from tests.e2e.conftest import COMMON, FORKED, NUM_STEPS, PAIR, REPOSITORY, TETRIS
from tetris_sglang.tools.server_process import ServerProcess

sys.path.insert(0, str(REPOSITORY / "scripts"))

import train_pair
from train_heads import count_accepted, write_greedily

from tetris_sglang.tools.distill.heads import BLOCKS, load_head

NEW_TOKENS, PROMPTS = 96, 12


@pytest.mark.parametrize("kind", BLOCKS)
def test_as_many_drafts_are_accepted_as_the_draft_s_own_arithmetic_says(tmp_path: Path, kind: str):
    """Chains, all verified, without calibration and matches: a wrong position, state or entry costs some of them."""
    flags = [
        *(*COMMON, *TETRIS, "--speculative-draft-model-path", str(PAIR / kind)),
        *("--speculative-num-draft-tokens", str(NUM_STEPS + 1), "--speculative-tetris-capacity-per-request", str(NUM_STEPS)),
        *("--speculative-tetris-calibration", "off"),
    ]
    lines = (PAIR / "prompts.jsonl").read_text().splitlines()
    texts = [json.loads(line)["text"] for line in lines[:: len(lines) // PROMPTS]]
    with ServerProcess(flags, tmp_path / "server.log", entry_point=FORKED) as server:
        client = Client(server.url, server.log_path)
        outputs = client.generate_all(texts, concurrency=4, max_new_tokens=NEW_TOKENS)
    accepted = sum(output["meta_info"]["spec_num_correct_drafts"] for output in outputs)
    steps = sum(output["meta_info"]["spec_verify_ct"] for output in outputs)

    target = train_pair.load_model(PAIR / "target")
    head, tokenizer = load_head(PAIR / kind, target), Tokenizer.from_file(str(PAIR / "target" / "tokenizer.json"))
    expected = torch.zeros(2)
    for text in texts:
        ids = tokenizer.encode(text).ids
        expected += torch.tensor(count_accepted(target, head, write_greedily(target, ids, NEW_TOKENS), len(ids)))
    # Both end their texts with a step that is cut short, at unlike places.
    assert abs(accepted / steps - float(expected[0] / expected[1])) < 0.04 * float(expected[0] / expected[1])
