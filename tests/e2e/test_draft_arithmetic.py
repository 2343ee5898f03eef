"""What a server drafts with a DFlash, DFlare or steered draft is what the draft computes in plain torch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from tests.e2e.client import Client, texts
from tests.e2e.conftest import COMMON, FORKED, NUM_STEPS, PAIR, TETRIS
from tests.steered_draft import save_steered
from tetris_sglang.tools.distill.corpus import Text
from tetris_sglang.tools.distill.head_files import BLOCKS
from tetris_sglang.tools.distill.lesson import judge
from tetris_sglang.tools.distill.steering import SteeredDraft
from tetris_sglang.tools.distill.students import Teacher, load_student
from tetris_sglang.tools.server_process import ServerProcess

NEW_TOKENS, PROMPTS = 96, 12


@pytest.mark.parametrize("kind", [*BLOCKS, SteeredDraft.kind])
def test_as_many_drafts_are_accepted_as_the_draft_s_own_arithmetic_says(plain: Client, tmp_path: Path, kind: str):
    """Chains, all verified, without calibration and matches: a wrong position, state or entry costs some of them."""
    draft = save_steered(tmp_path / "draft") if kind == SteeredDraft.kind else PAIR / kind
    flags = [
        *(*COMMON, *TETRIS, "--speculative-draft-model-path", str(draft)),
        *("--speculative-num-draft-tokens", str(NUM_STEPS + 1), "--speculative-tetris-capacity-per-request", str(NUM_STEPS)),
        *("--speculative-tetris-calibration", "off"),
    ]
    lines = (PAIR / "prompts.jsonl").read_text().splitlines()
    prompts = [json.loads(line)["text"] for line in lines[:: len(lines) // PROMPTS]]
    with ServerProcess(flags, tmp_path / "server.log", entry_point=FORKED) as server:
        client = Client(server.url, server.log_path)
        outputs = client.generate_all(prompts, concurrency=4, max_new_tokens=NEW_TOKENS)
    assert texts(outputs) == texts(plain.generate_all(prompts, concurrency=4, max_new_tokens=NEW_TOKENS))
    accepted = sum(output["meta_info"]["spec_num_correct_drafts"] for output in outputs)
    steps = sum(output["meta_info"]["spec_verify_ct"] for output in outputs)

    teacher = Teacher(PAIR / "target", torch.device("cpu"), torch.float32)
    tokenizer = Tokenizer.from_file(str(PAIR / "target" / "tokenizer.json"))
    written = []
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = tokenizer.encode(prompt).ids
        written.append(Text(torch.tensor([*ids, *output["output_ids"]]), len(ids), 0.0, "greedy"))
    expected = judge(load_student(draft, teacher).eval(), teacher, written, NUM_STEPS, batch_tokens=512)["0"]["overall"]
    # Both end their texts with a step that is cut short, at unlike places.
    assert abs(accepted / steps - expected.mean) < 0.04 * expected.mean
