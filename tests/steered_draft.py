"""The pair's standalone draft, steered at random: what a steered draft computes, without one that was trained."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from tetris_sglang.tools.distill.head_files import save_head
from tetris_sglang.tools.distill.steering import SteeredDraft, steer_draft

PAIR = Path(__file__).parent / "pair"
LAYER_IDS = (0, 2, 3)


@torch.no_grad()
def make_steered(target: LlamaForCausalLM, strength: float = 0.006) -> SteeredDraft:
    """With bfloat16's values; strength: of each weight."""
    weight = target.model.embed_tokens.weight.detach()
    draft = steer_draft(LlamaForCausalLM.from_pretrained(PAIR / "draft", dtype=torch.float32), LAYER_IDS, weight, weight).eval()
    generator = torch.Generator().manual_seed(3)
    for matrix in (draft.read_target.weight, draft.steer.weight):
        matrix.copy_((strength * torch.randn(matrix.shape, generator=generator)).bfloat16())
    return draft


def save_steered(folder: Path) -> Path:
    target = LlamaForCausalLM.from_pretrained(PAIR / "target", dtype=torch.float32)
    save_head(make_steered(target), folder)
    return folder
