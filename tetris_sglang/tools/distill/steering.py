"""A standalone draft that the target steers (SD², arXiv:2511.09844), in plain torch.

A vector is made of the target's state after the last token that it has read. A matrix turns it into one for each layer, which
is added to what that layer's feed-forward part reads, in all passes of a step alike. Embedding and output layer are its own.

Each of the target's layers is scaled to a mean square of 1 first: a late layer's states are ten times as long as an early one's
and two hundred times what a feed-forward part reads, which a few steps of training would drown.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from tetris_sglang.tools.distill.heads import Head, Layer, RmsNorm, TargetStates, count_chains, join_layers

_STATES_EPS = 1e-6


class SteeredDraft(Head):
    """Parameters have the names that `steer_config`'s architecture loads: a Llama's, `read_target` and `steer`.

    Args:
        config: of `steer_config`.
    """

    kind, architecture = "steered", "SteeredLlamaForCausalLM"

    def __init__(self, config: dict, embedding: Tensor, lm_head: Tensor) -> None:
        super().__init__(config, embedding, lm_head)
        hidden, eps = config["hidden_size"], config["rms_norm_eps"]
        self.layer_ids: list[int] = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(config["vocab_size"], hidden)
        layers = [Layer(config, hidden, ("input_layernorm",)) for _ in range(config["num_hidden_layers"])]
        self.model.layers = nn.ModuleList(layers)
        self.model.norm = RmsNorm(hidden, eps)
        self.lm_head = None if config["tie_word_embeddings"] else nn.Linear(hidden, config["vocab_size"], bias=False)
        self.read_target = nn.Linear(len(self.layer_ids) * config["target_hidden_size"], hidden, bias=False)
        self.steer = nn.Linear(hidden, len(layers) * hidden, bias=False)
        nn.init.zeros_(self.steer.weight)

    def features(self, states: TargetStates) -> Tensor:
        return join_layers(states, self.layer_ids)

    def make_vectors(self, features: Tensor) -> Tensor:
        """[..., hidden] of the target's states, as `features` has them."""
        layers = features.unflatten(-1, (len(self.layer_ids), -1))
        return self.read_target(F.rms_norm(layers, layers.shape[-1:], eps=_STATES_EPS).flatten(-2))

    def read_logits(self, x: Tensor) -> Tensor:
        return F.linear(x, (self.model.embed_tokens if self.lm_head is None else self.lm_head).weight)

    def unroll(self, tokens: Tensor, features: Tensor, steps: int) -> Iterator[Tensor]:
        """See `Head.unroll`; chain p is steered by the target's state p in all its steps."""
        chains, layers = count_chains(tokens, steps), self.model.layers
        pushes = self.steer(self.make_vectors(features[:, :chains])).chunk(len(layers), dim=-1)
        keys: list[list[Tensor]] = [[] for _ in layers]
        values: list[list[Tensor]] = [[] for _ in layers]
        for step in range(steps):
            positions = torch.arange(step, step + chains, device=tokens.device)
            x = self.model.embed_tokens(tokens[:, 1 + step : 1 + step + chains])
            for index, layer in enumerate(layers):
                q, k, v = layer.self_attn.project(layer.input_layernorm(x), positions)
                keys[index].append(k)
                values[index].append(v)
                x = x + layer.self_attn.attend(q, keys[index], values[index])
                x = x + layer.mlp(layer.post_attention_layernorm(x) + pushes[index])
            yield self.model.norm(x)


def steer_config(config: dict[str, Any], target_hidden_size: int, layer_ids: Sequence[int]) -> dict[str, Any]:
    """The config.json of a steered draft.

    Args:
        config: the standalone draft's. layer_ids: the target's, whose outputs it reads, ascending.
    Raises:
        ValueError: it is no Llama.
    """
    if config["architectures"] != ["LlamaForCausalLM"]:
        raise ValueError(f"{', '.join(config['architectures'])}: drafts of LlamaForCausalLM alone can be steered")
    if config["hidden_size"] == len(layer_ids) * target_hidden_size:
        raise ValueError("a draft as wide as the states it would read cannot be steered: --layer-ids with one more or less")
    return config | {
        "architectures": [SteeredDraft.architecture],
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(layer_ids), "use_aux_hidden_state": True},
        "target_hidden_size": target_hidden_size,
        "dtype": "bfloat16",
    }


def steer_draft(model: LlamaForCausalLM, layer_ids: Sequence[int], embedding: Tensor, lm_head: Tensor) -> SteeredDraft:
    """A standalone draft that is steered nowhere yet.

    Args:
        embedding, lm_head: the target's.
    """
    config = steer_config(json.loads(model.config.to_json_string()), embedding.shape[1], layer_ids)
    draft = SteeredDraft(config, embedding, lm_head)
    weights = model.state_dict()
    if draft.lm_head is None:
        del weights["lm_head.weight"]
    draft.load_state_dict(weights | {name: value for name, value in draft.state_dict().items() if name not in weights})
    return draft
