"""Draft heads: all chains at once are those that a server drafts, and the files are what SGLang loads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaForCausalLM

from tests.tools.distill.serving import serve
from tetris_sglang.tools.distill.head_files import (
    BLOCKS,
    HEADS,
    load_head,
    make_dflash_keys,
    make_eagle3_keys,
    make_head_config,
    save_head,
)
from tetris_sglang.tools.distill.heads import Eagle3Head, Head, read_target
from tetris_sglang.tools.distill.steering import SteeredDraft
from tetris_sglang.tools.real_model import HEAD

PAIR = Path(__file__).parents[2] / "pair"
KINDS = [kind for kind in HEADS if kind != SteeredDraft.kind]
"""Those with the target's embedding."""
LAYER_IDS, MASK_TOKEN = (0, 2, 3), 0
MAX_SHIPPED_BYTES = 16e6


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(PAIR / "target", dtype=torch.float32).eval()


def random_head(target: LlamaForCausalLM, kind: str) -> Head:
    """Weights far from those a head starts with, so that every part matters; all have bfloat16's values."""
    config = make_head_config(target.config, HEADS[kind].architecture, 64)
    if kind == Eagle3Head.kind:
        config |= make_eagle3_keys(1024, LAYER_IDS)
    if kind in BLOCKS:
        config |= make_dflash_keys(6, LAYER_IDS, MASK_TOKEN, 2)
    head = HEADS[kind](config, target.model.embed_tokens.weight.detach(), target.lm_head.weight.detach())
    if kind == Eagle3Head.kind:
        head.set_draft_ids(torch.arange(1, 2048, 2))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in head.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_((noise * 0.2 + 1 if parameter.ndim == 1 else noise * 0.06).bfloat16())
    return head.eval()


def some_tokens(target: LlamaForCausalLM, *sizes: int) -> Tensor:
    return torch.randint(5, target.config.vocab_size, sizes, generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_all_chains_at_once_are_the_chains_that_serving_drafts(target, kind):
    head, steps = random_head(target, kind), 4
    tokens = some_tokens(target, 2, 24)
    drafted = head.draft(tokens, head.features(read_target(target, tokens)), steps)
    assert drafted[0].shape[:2] == (2, 20)
    for row, last in ((0, 0), (0, 1), (0, 19), (1, 11)):
        expected = serve(head, target, tokens[row], last, steps)
        for step in range(steps):
            found = drafted[step][row, last]
            assert (found - expected[step]).abs().max() <= 2e-5 * expected[step].abs().max(), (row, last, step)
    with pytest.raises(ValueError, match="too few"):
        head.draft(tokens[:, :4], head.features(read_target(target, tokens[:, :4])), steps)


@torch.no_grad()
def test_features_are_what_sglang_captures(target):
    tokens, outputs = some_tokens(target, 1, 9), []
    hooks = [layer.register_forward_hook(lambda _m, _a, out: outputs.append(out)) for layer in target.model.layers]
    states = read_target(target, tokens)
    for hook in hooks:
        hook.remove()
    assert len(states.layer_inputs) == 5
    for index in range(4):
        assert torch.equal(states.layer_inputs[index + 1], outputs[index])
    assert torch.equal(states.last, target.model.norm(outputs[4]))
    assert torch.equal(states.logits, target(tokens).logits)
    head = random_head(target, "eagle3")
    assert torch.equal(head.features(states), torch.cat([outputs[i] for i in (0, 2, 3)], -1))


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_saved_head_is_the_same_head(target, kind, tmp_path):
    head = random_head(target, kind)
    save_head(head, tmp_path)
    loaded = load_head(tmp_path, target)
    tokens = some_tokens(target, 1, 12)
    features = head.features(read_target(target, tokens))
    assert torch.equal(head.draft(tokens, features, 2)[1], loaded.draft(tokens, features, 2)[1])
    assert loaded.config == head.config
    names = set(load_file(tmp_path / "model.safetensors"))
    assert not any("embed" in name for name in names)  # the target's
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace(HEADS[kind].architecture, "LlamaForCausalLM"))
    with pytest.raises(ValueError, match="LlamaForCausalLM is not a head"):
        load_head(tmp_path, target)


def test_a_vocabulary_of_its_own_is_stored_as_differences(target):
    ids = torch.arange(0, 2048, 2)
    config = make_head_config(target.config, Eagle3Head.architecture, 64) | make_eagle3_keys(len(ids), LAYER_IDS)
    head = Eagle3Head(config, target.model.embed_tokens.weight.detach(), target.lm_head.weight.detach())
    head.set_draft_ids(ids)
    assert head.d2t.tolist()[:3] == [0, 1, 2] and head.t2d[:4].tolist() == [True, False, True, False]
    assert torch.equal(head.draft_ids, ids)
    assert torch.equal(head.lm_head.weight, target.lm_head.weight[::2])


def test_the_pairs_configs_say_what_sglang_needs():
    configs = {kind: json.loads((PAIR / kind / "config.json").read_text()) for kind in KINDS}
    target = json.loads((PAIR / "target" / "config.json").read_text())
    for kind, config in configs.items():
        assert config["architectures"] == [HEADS[kind].architecture]
        for key in ("hidden_size", "head_dim", "vocab_size", "rope_parameters", "rms_norm_eps"):
            assert config[key] == target[key], (kind, key)
        tensors = load_file(PAIR / kind / "model.safetensors")
        assert {t.dtype for name, t in tensors.items() if name not in ("d2t", "t2d")} == {torch.bfloat16}
    # SGLang deletes and replaces embedding and head one after the other, which fails where they are one.
    assert not configs["eagle"]["tie_word_embeddings"] and not configs["eagle3"]["tie_word_embeddings"]


@pytest.mark.parametrize("folder, num_layers", [(PAIR / "eagle3", 5), (HEAD, 30)], ids=["pair", "shipped"])
def test_an_eagle3_head_reads_layers_that_sglang_captures(folder, num_layers):
    layer_ids = json.loads((folder / "config.json").read_text())["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    # Captured before layer i + 1, so the last layer's output never is; in ascending order, each once.
    assert len(layer_ids) == 3 and layer_ids == sorted(set(layer_ids)) and max(layer_ids) + 1 < num_layers


def test_the_shipped_head_is_small_and_of_the_size_on_its_card():
    size = (HEAD / "model.safetensors").stat().st_size
    assert size <= MAX_SHIPPED_BYTES and f"{size / 1e6:.1f} MB" in (HEAD / "README.md").read_text()
