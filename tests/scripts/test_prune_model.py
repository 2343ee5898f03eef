"""scripts/prune_model.py: the layers that are kept, in their order."""

import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parents[2]
PAIR = ROOT / "tests" / "pair"
sys.path.insert(0, str(ROOT / "scripts"))

import prune_model


@torch.no_grad()
def test_the_layers_that_are_asked_for_are_kept(tmp_path):
    prune_model.prune(PAIR / "target", [0, 4], tmp_path)
    whole = AutoModelForCausalLM.from_pretrained(PAIR / "target", dtype=torch.float32)
    pruned = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tokens = torch.randint(5, 2048, (1, 12), generator=torch.Generator().manual_seed(0))
    # What lies between passes the residual stream on.
    for layer in whole.model.layers[1:4]:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    torch.testing.assert_close(pruned(tokens).logits, whole(tokens).logits)
    assert AutoTokenizer.from_pretrained(tmp_path).get_vocab() == AutoTokenizer.from_pretrained(PAIR / "target").get_vocab()


@pytest.mark.parametrize("layers", [[], [5], [-1]])
def test_a_layer_that_is_not_there_is_named(tmp_path, layers):
    with pytest.raises(ValueError, match="has 0 to 4"):
        prune_model.prune(PAIR / "target", layers, tmp_path)
