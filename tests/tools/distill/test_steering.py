"""A steered draft's chains, all at once, are those that transformers' own layers draft with the same vectors."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from tests.steered_draft import LAYER_IDS, PAIR, make_steered
from tetris_sglang.tools.distill.head_files import load_head, save_head
from tetris_sglang.tools.distill.heads import read_target
from tetris_sglang.tools.distill.steering import SteeredDraft, steer_config


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(PAIR / "target", dtype=torch.float32).eval()


def serve_one_chain(draft: SteeredDraft, features: Tensor, tokens: Tensor, last: int, steps: int) -> Tensor:
    """[steps, vocabulary], as a server: rows of the text are steered by their own states, the chain's by the last one."""
    config = LlamaConfig(**{k: v for k, v in draft.config.items() if k != "architectures"}, attn_implementation="eager")
    model = LlamaForCausalLM(config).eval()
    model.load_state_dict({k: v for k, v in draft.state_dict().items() if k.startswith("model.")}, strict=False)
    model.tie_weights()
    vectors = draft.make_vectors(features[: last + 1])
    vectors = torch.cat((vectors, vectors[-1:].expand(steps - 1, -1)))
    size = config.hidden_size
    for index, layer in enumerate(model.model.layers):
        matrix = draft.steer.weight[index * size : (index + 1) * size]
        layer.mlp.register_forward_pre_hook(lambda _m, args, matrix=matrix: (args[0] + vectors @ matrix.T,))
    return model(tokens[None, 1 : last + 1 + steps]).logits[0, last:]


@torch.no_grad()
def test_all_chains_at_once_are_the_chains_that_serving_drafts(target):
    draft, steps = make_steered(target, 0.05), 4
    tokens = torch.randint(5, target.config.vocab_size, (2, 24), generator=torch.Generator().manual_seed(4))
    features = draft.features(read_target(target, tokens))
    drafted = draft.draft(tokens, features, steps)
    unsteered = make_steered(target, 0.0).draft(tokens, features, steps)
    assert drafted[0].shape[:2] == (2, 20)
    for row, last in ((0, 0), (0, 1), (0, 19), (1, 11)):
        expected = serve_one_chain(draft, features[row], tokens[row], last, steps)
        found = torch.stack([logits[row, last] for logits in drafted])
        assert (found - expected).abs().max() <= 2e-5 * expected.abs().max(), (row, last)
        assert (found - torch.stack([logits[row, last] for logits in unsteered])).abs().max() > 0.1


@torch.no_grad()
def test_a_draft_that_is_steered_nowhere_yet_is_the_draft(target):
    tokens = torch.randint(5, 2048, (1, 16), generator=torch.Generator().manual_seed(5))
    draft, alone = make_steered(target, 0.0), LlamaForCausalLM.from_pretrained(PAIR / "draft", dtype=torch.float32).eval()
    found = draft.draft(tokens, draft.features(read_target(target, tokens)), 1)[0]
    torch.testing.assert_close(found, alone(tokens[:, 1:]).logits, rtol=1e-4, atol=1e-4)


def test_another_architecture_is_refused():
    config = json.loads((PAIR / "draft" / "config.json").read_text()) | {"architectures": ["Qwen3ForCausalLM"]}
    with pytest.raises(ValueError, match="Qwen3ForCausalLM: drafts of LlamaForCausalLM alone"):
        steer_config(config, 192, LAYER_IDS)


@torch.no_grad()
def test_a_saved_draft_is_the_same_draft(target, tmp_path):
    draft = make_steered(target)
    save_head(draft, tmp_path)
    tokens = torch.randint(5, 2048, (1, 12), generator=torch.Generator().manual_seed(6))
    features, loaded = draft.features(read_target(target, tokens)), load_head(tmp_path, target)
    assert torch.equal(draft.draft(tokens, features, 2)[1], loaded.draft(tokens, features, 2)[1])
    assert loaded.config == draft.config


def test_a_draft_as_wide_as_what_it_reads_is_refused():
    config = json.loads((PAIR / "draft" / "config.json").read_text())
    with pytest.raises(ValueError, match="cannot be steered: --layer-ids"):
        steer_config(config, config["hidden_size"] // 2, (0, 1))
