"""Draft heads that read a target's hidden states, in plain torch: EAGLE, EAGLE-3, MiMo's MTP layer, DFlash and DFlare.

Parameter names are those of the checkpoints that SGLang loads. At position p a head reads hidden state p of the
target and token p + 1, and predicts token p + 2; while it drafts, its own hidden state stands in for the
target's:

| | hidden state it reads | before the layer | hands on to its next step | logits |
|---|---|---|---|---|
| eagle | after the target's last norm | fc(token, hidden) | the layer's output | the target's lm_head |
| eagle3 | inputs of three target layers, through fc | norm(token), norm(hidden) | the layer's output | its own lm_head |
| mtp | after the target's last norm | input_proj(norm(hidden), norm(token)) | final_layernorm(output) | the target's |

DFlash drafts all tokens at once, behind token p + 1: what it reads of the target's layers, through fc, are keys and values.
DFlare has a mixture of these layers for each of its own instead of fc, and matrices of their own to these keys and values.

Embedding and lm_head (eagle3: the embedding) are the target's and not part of a head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaForCausalLM


class TargetStates(NamedTuple):
    """What one pass of the target over [batch, length] tokens leaves behind."""

    logits: Tensor  # [batch, length, vocabulary]
    last: Tensor  # [batch, length, hidden], after the last norm
    layer_inputs: tuple[Tensor, ...]  # one [batch, length, hidden] per layer: the residual stream before it


@torch.no_grad()
def read_target(target: LlamaForCausalLM, tokens: Tensor) -> TargetStates:
    """Run the target once over [batch, length] tokens, keeping every hidden state that some head reads."""
    output = target(input_ids=tokens, use_cache=False, output_hidden_states=True)
    return TargetStates(output.logits, output.hidden_states[-1], output.hidden_states[:-1])


class RmsNorm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions; the input may be wider than the output.

    Args:
        has_norms: queries and keys have norms.
        has_context: what the target has read has projections of its own.
    """

    def __init__(self, config: dict, input_size: int, has_norms: bool = False, has_context: bool = False):
        super().__init__()
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.head_dim = config["head_dim"]
        self.theta = config["rope_parameters"]["rope_theta"]
        self.q_proj = nn.Linear(input_size, self.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(input_size, self.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(input_size, self.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_dim, config["hidden_size"], bias=False)
        self.has_norms = has_norms
        if has_norms:
            self.q_norm, self.k_norm = (RmsNorm(self.head_dim, config["rms_norm_eps"]) for _ in range(2))
        self.has_context = has_context
        if has_context:
            sizes = input_size, self.kv_heads * self.head_dim
            self.k_proj_target, self.v_proj_target = (nn.Linear(*sizes, bias=False) for _ in range(2))

    def project(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns: queries, keys and values, each [batch, heads, length, head_dim]; one key head per query head."""
        q = self._split(self.q_proj(x))
        if self.has_norms:
            q = self.q_norm(q)
        return self._rotate(q, positions), *self._project_keys(self.k_proj(x), self.v_proj(x), positions)

    def project_context(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of what the target has read, as `project`."""
        k_proj, v_proj = (self.k_proj_target, self.v_proj_target) if self.has_context else (self.k_proj, self.v_proj)
        return self._project_keys(k_proj(x), v_proj(x), positions)

    def _project_keys(self, keys: Tensor, values: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        k, v = self._split(keys), self._split(values)
        if self.has_norms:
            k = self.k_norm(k)
        group = self.heads // self.kv_heads
        return self._rotate(k, positions).repeat_interleave(group, 1), v.repeat_interleave(group, 1)

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.float32, device=x.device) / self.head_dim
        angles = positions[:, None].float() * self.theta**-exponents
        cos, sin = angles.cos(), angles.sin()
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    def attend(self, q: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        """Attend as chain p does in its latest step.

        Args:
            q: [batch, heads, chains, head_dim], of the latest step.
            keys, values: one per step so far, each as `q`. Chain p sees the first step's entries 0 to p, which the
                target's hidden states made, and of the later steps only its own.
        Returns: [batch, chains, hidden]
        """
        batch, _, chains, _ = q.shape
        if len(keys) == 1:
            mixed = F.scaled_dot_product_attention(q, keys[0], values[0], is_causal=True)
        else:
            q = q * self.head_dim**-0.5
            unseen = torch.ones(chains, chains, dtype=torch.bool, device=q.device).triu(1)
            scores = [(q @ keys[0].mT).masked_fill(unseen, float("-inf"))]
            scores += [(q * k).sum(-1, keepdim=True) for k in keys[1:]]
            shares = torch.cat(scores, dim=-1).softmax(-1)
            mixed = shares[..., :chains] @ values[0]
            for step, v in enumerate(values[1:]):
                mixed = mixed + shares[..., chains + step, None] * v
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, chains, -1))


class Mlp(nn.Module):
    def __init__(self, config: dict):
        super().__init__()
        self.gate_proj = nn.Linear(config["hidden_size"], config["intermediate_size"], bias=False)
        self.up_proj = nn.Linear(config["hidden_size"], config["intermediate_size"], bias=False)
        self.down_proj = nn.Linear(config["intermediate_size"], config["hidden_size"], bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """A decoder layer whose norms before the attention are the head's business."""

    def __init__(self, config: dict, input_size: int, input_norms: tuple[str, ...], **attention: bool):
        super().__init__()
        self.self_attn, self.mlp = Attention(config, input_size, **attention), Mlp(config)
        for name in (*input_norms, "post_attention_layernorm"):
            self.add_module(name, RmsNorm(config["hidden_size"], config["rms_norm_eps"]))


@torch.no_grad()
def _start_by_passing_on(linear: nn.Linear, columns: slice, layer: Layer) -> None:
    """Initial weights with which the hidden state in `columns` nearly passes through the head unchanged."""
    linear.weight.normal_(std=0.02)
    linear.weight[:, columns] = torch.eye(len(linear.weight), device=linear.weight.device)
    if linear.bias is not None:
        linear.bias.zero_()
    layer.self_attn.o_proj.weight.zero_()
    layer.mlp.down_proj.weight.zero_()


def count_chains(tokens: Tensor, steps: int) -> int:
    """Of `steps` drafts each, one behind every token but the first, as far as [batch, length] tokens judge them."""
    chains = tokens.shape[1] - steps
    if chains < 1:
        raise ValueError(f"{tokens.shape[1]} tokens are too few for chains of {steps}")
    return chains


def join_layers(states: TargetStates, layer_ids: Sequence[int]) -> Tensor:
    """[batch, length, layers * hidden], the outputs of these layers, side by side."""
    # The output of layer i is the input of layer i + 1. SGLang collects them in the order of the layers.
    return torch.cat([states.layer_inputs[i + 1] for i in sorted(layer_ids)], dim=-1)


class Head(nn.Module):
    """What all have in common.

    Args:
        config: the head's config.json.
        embedding: [vocabulary, hidden], the target's.
        lm_head: as `embedding`.
    """

    kind: ClassVar[str]
    architecture: ClassVar[str]

    def __init__(self, config: dict, embedding: Tensor, lm_head: Tensor):
        super().__init__()
        self.config = config
        self.register_buffer("embedding", embedding, persistent=False)
        self.register_buffer("target_head", lm_head, persistent=False)

    @property
    def layer(self) -> Layer:
        raise NotImplementedError

    @property
    def draft_ids(self) -> Tensor | None:
        """[the head's vocabulary] int64, the target's id of each of its tokens; None when they are the same."""
        return None

    def features(self, states: TargetStates) -> Tensor:
        """[batch, length, ...], what SGLang captures from the target for this kind of head."""
        return states.last

    def project(self, features: Tensor) -> Tensor:
        """The features as a hidden state that a step reads."""
        return features

    def enter(self, embeds: Tensor, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Returns: the residual stream, and the attention's input."""
        raise NotImplementedError

    def leave(self, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Returns: what the logits are made of, and the hidden state for the next step."""
        return residual, residual

    def read_logits(self, x: Tensor) -> Tensor:
        return F.linear(x, self.target_head)

    def draft(self, tokens: Tensor, features: Tensor, steps: int) -> list[Tensor]:
        """A chain from every position at once: chain p starts at hidden state p, reads tokens p + 1, p + 2, ...

        Each chain is what serving computes when the target has written `tokens` up to p + 1 and the head drafts
        the rest of them; only its own hidden states enter after the first step, and its own keys and values.

        Args:
            tokens: [batch, length].
            features: [batch, length, ...] from `features`.
            steps: drafted tokens per chain.
        Returns: per step [batch, length - steps, the head's vocabulary]; the logits of step j of chain p are those of token
            p + 2 + j.
        """
        return [self.read_logits(x) for x in self.unroll(tokens, features, steps)]

    def unroll(self, tokens: Tensor, features: Tensor, steps: int) -> Iterator[Tensor]:
        """As `draft`, before the logits: per step what `read_logits` takes, [batch, chains, hidden]."""
        chains = count_chains(tokens, steps)
        # In float32 also where an autocast computes the products in bfloat16: the residual stream starts here.
        hidden, keys, values = self.project(features[:, :chains]).float(), [], []
        for step in range(steps):
            positions = torch.arange(step, step + chains, device=tokens.device)
            embeds = F.embedding(tokens[:, 1 + step : 1 + step + chains], self.embedding)
            residual, x = self.enter(embeds, hidden, positions)
            q, k, v = self.layer.self_attn.project(x, positions)
            keys.append(k)
            values.append(v)
            residual = residual + self.layer.self_attn.attend(q, keys, values)
            residual = residual + self.layer.mlp(self.layer.post_attention_layernorm(residual))
            x, hidden = self.leave(residual)
            yield x


class EagleHead(Head):
    kind, architecture = "eagle", "LlamaForCausalLMEagle"

    def __init__(self, config: dict, embedding: Tensor, lm_head: Tensor):
        super().__init__(config, embedding, lm_head)
        hidden = config["hidden_size"]
        self.fc = nn.Linear(2 * hidden, hidden)
        self.layers = nn.ModuleList([Layer(config, hidden, ())])
        _start_by_passing_on(self.fc, slice(hidden, None), self.layer)

    @property
    def layer(self) -> Layer:
        return self.layers[0]

    def enter(self, embeds, hidden, positions):
        x = self.fc(torch.cat((embeds, hidden), dim=-1))
        return x, x


class Eagle3Head(Head):
    kind, architecture = "eagle3", "LlamaForCausalLMEagle3"

    def __init__(self, config: dict, embedding: Tensor, lm_head: Tensor):
        super().__init__(config, embedding, lm_head)
        hidden, eps, size = config["hidden_size"], config["rms_norm_eps"], config["draft_vocab_size"]
        self.layer_ids: list[int] = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
        self.fc = nn.Linear(len(self.layer_ids) * hidden, hidden, bias=False)
        self.midlayer = Layer(config, 2 * hidden, ("input_layernorm", "hidden_norm"))
        self.norm = RmsNorm(hidden, eps)
        self.lm_head = nn.Linear(hidden, size, bias=False)
        # d2t[i] + i is the target's id of the head's token i; t2d marks those ids among the target's.
        self.register_buffer("d2t", torch.zeros(size, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(len(embedding), dtype=torch.bool))
        _start_by_passing_on(self.fc, slice(-hidden, None), self.layer)

    def set_draft_ids(self, ids: Tensor) -> None:
        """Choose the head's vocabulary, and start from the target's rows of it.

        Args:
            ids: [draft_vocab_size] ascending ids of the target.
        """
        self.d2t.copy_(ids - torch.arange(len(ids), device=ids.device))
        self.t2d.zero_()[ids] = True
        self.lm_head.weight.detach().copy_(self.target_head[ids])

    @property
    def layer(self) -> Layer:
        return self.midlayer

    @property
    def draft_ids(self) -> Tensor:
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def features(self, states: TargetStates) -> Tensor:
        return join_layers(states, self.layer_ids)

    def project(self, features):
        return self.fc(features)

    def enter(self, embeds, hidden, positions):
        parts = self.layer.input_layernorm(embeds), self.layer.hidden_norm(hidden)
        return hidden, torch.cat(parts, dim=-1)

    def leave(self, residual):
        return self.norm(residual), residual

    def read_logits(self, x):
        return self.lm_head(x)


class MtpHead(Head):
    kind, architecture = "mtp", "MiMoForCausalLM"

    def __init__(self, config: dict, embedding: Tensor, lm_head: Tensor):
        super().__init__(config, embedding, lm_head)
        hidden, eps = config["hidden_size"], config["rms_norm_eps"]
        self.token_layernorm, self.hidden_layernorm = RmsNorm(hidden, eps), RmsNorm(hidden, eps)
        self.input_proj = nn.Linear(2 * hidden, hidden, bias=False)
        self.block = Layer(config, hidden, ("input_layernorm",))
        self.final_layernorm = RmsNorm(hidden, eps)
        _start_by_passing_on(self.input_proj, slice(0, hidden), self.layer)

    @property
    def layer(self) -> Layer:
        return self.block

    def enter(self, embeds, hidden, positions):
        embeds = embeds * (positions != 0)[:, None]  # as MiMo does: the first position's token is not read
        parts = self.hidden_layernorm(hidden), self.token_layernorm(embeds)
        x = self.input_proj(torch.cat(parts, dim=-1))
        return x, self.layer.input_layernorm(x)

    def leave(self, residual):
        x = self.final_layernorm(residual)
        return x, x


class DFlashHead(Head):
    """A block in one pass: its rows, the last known token's and a mask's for each draft, see all of each other."""

    kind, architecture, has_context = "dflash", "DFlashDraftModel", False

    def __init__(self, config: dict, embedding: Tensor, lm_head: Tensor):
        super().__init__(config, embedding, lm_head)
        hidden, eps, num_layers = config["hidden_size"], config["rms_norm_eps"], config["num_hidden_layers"]
        self.layer_ids: list[int] = config["dflash_config"]["target_layer_ids"]
        self.mask_token: int = config["dflash_config"]["mask_token_id"]
        self._make_mixer(num_layers, len(self.layer_ids), hidden)
        self.hidden_norm, self.norm = RmsNorm(hidden, eps), RmsNorm(hidden, eps)
        norms = {"has_norms": True, "has_context": self.has_context}
        self.layers = nn.ModuleList([Layer(config, hidden, ("input_layernorm",), **norms) for _ in range(num_layers)])
        self.vocabulary: Tensor | None = None
        """[tokens] int64, the target's ids that are learnt from and drafted from; None: all."""

    @property
    def draft_ids(self) -> Tensor | None:
        return self.vocabulary

    def features(self, states: TargetStates) -> Tensor:
        return join_layers(states, self.layer_ids)

    def _make_mixer(self, num_layers: int, num_read: int, hidden: int) -> None:
        self.fc = nn.Linear(num_read * hidden, hidden, bias=False)

    def mix(self, features: Tensor) -> list[Tensor]:
        """What each layer reads of the target, before the norm, [batch, length, hidden]."""
        return [self.fc(features).float()] * len(self.layers)

    def read_logits(self, x: Tensor) -> Tensor:
        return F.linear(x, self.target_head if self.vocabulary is None else self.target_head[self.vocabulary])

    def unroll(self, tokens: Tensor, features: Tensor, steps: int) -> Iterator[Tensor]:
        """Of a block behind every token but the first; see `Head.unroll`."""
        blocks, width = count_chains(tokens, steps), steps + 1
        contexts = [self.hidden_norm(mixed) for mixed in self.mix(features[:, :blocks])]
        known = torch.arange(blocks, device=tokens.device)
        places = (known[:, None] + 1 + torch.arange(width, device=tokens.device)).flatten()
        read = tokens.new_full((*tokens[:, 1 : 1 + blocks].shape, width), self.mask_token)
        read[:, :, 0] = tokens[:, 1 : 1 + blocks]
        x = F.embedding(read.flatten(1), self.embedding)
        unseen = torch.ones(blocks, blocks, dtype=torch.bool, device=tokens.device).triu(1).repeat_interleave(width, 0)
        for layer, context in zip(self.layers, contexts, strict=True):
            attention = layer.self_attn
            q, *own = attention.project(layer.input_layernorm(x), places)
            keys, values = attention.project_context(context, known)
            q = q * attention.head_dim**-0.5
            own_keys, own_values = (part.unflatten(2, (blocks, width)) for part in own)
            # [batch, heads, blocks, width, ...]
            seen = (q @ keys.mT).masked_fill(unseen, float("-inf")).unflatten(2, (blocks, width))
            shares = torch.cat((seen, q.unflatten(2, (blocks, width)) @ own_keys.mT), dim=-1).softmax(-1)
            mixed = shares[..., :blocks].flatten(2, 3) @ values + (shares[..., blocks:] @ own_values).flatten(2, 3)
            x = x + attention.o_proj(mixed.transpose(1, 2).flatten(2))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        yield from self.norm(x).unflatten(1, (blocks, width)).unbind(2)[1:]


class DFlareHead(DFlashHead):
    """arXiv:2606.02091; names and initial mixtures are AngelSlim's (models/draft/qwen_dflare.py there)."""

    kind, architecture, has_context = "dflare", "QwenDFlareDraftModel", True

    def _make_mixer(self, num_layers: int, num_read: int, hidden: int) -> None:
        nearest = torch.arange(num_layers) * num_read // num_layers
        self.layer_fusion_weights = nn.Parameter(2.0 * F.one_hot(nearest, num_read).float())

    def mix(self, features: Tensor) -> list[Tensor]:
        states = features.unflatten(-1, (len(self.layer_ids), -1)).float()
        return [torch.einsum("btlh,l->bth", states, shares) for shares in self.layer_fusion_weights.softmax(-1)]
