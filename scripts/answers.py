"""Answers that a model writes to prompts, with the hidden states that a draft head learns from, in plain torch.

One process, continuous batching: a slot whose answer has ended takes the next prompt. The states are those of the very
passes that wrote the tokens, so no further pass of the target is needed for training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaForCausalLM


class Prompt(NamedTuple):
    """What is asked, and how the answer is drawn."""

    id: str
    kind: str
    token_ids: list[int]
    temperature: float
    """0: greedy."""


class Answer(NamedTuple):
    """A prompt with its answer, and what the target held at each position."""

    prompt: Prompt
    token_ids: Tensor
    """[length] int32, prompt and answer."""
    prompt_tokens: int
    states: Tensor
    """[length - 1, layers, hidden] bfloat16: for every token but the last, the inputs of `layer_inputs` and the output
    after the last norm."""
    log_normalizers: Tensor
    """[length - prompt_tokens] float32, of the positions that the answer's tokens were drawn from: the logarithm of the sum of
    the exponentials of the logits."""


class _Layer(NamedTuple):
    qkv: Tensor
    out: Tensor
    gate_up: Tensor
    down: Tensor
    input_norm: Tensor
    post_norm: Tensor


class Writer:
    """A Llama-architecture target that continues many texts at once.

    Args:
        target: its weights are copied in `dtype`.
        slots: texts at once.
        max_tokens: of prompt and answer together.
        layer_inputs: the layers whose inputs are kept, ascending.
    """

    def __init__(
        self,
        target: LlamaForCausalLM,
        slots: int,
        max_tokens: int,
        layer_inputs: Sequence[int],
        dtype: torch.dtype = torch.bfloat16,
        seed: int = 0,
    ) -> None:
        config = target.config
        self.slots, self.max_tokens, self.kept_layers = slots, max_tokens, tuple(layer_inputs)
        self.heads, self.kv_heads, self.head_dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        self.eps, self.hidden = config.rms_norm_eps, config.hidden_size
        ends = target.generation_config.eos_token_id
        self.ends = set(ends if isinstance(ends, list) else [ends])
        self.dtype = dtype

        def cast(*weights: Tensor) -> Tensor:
            return torch.cat([w.detach() for w in weights]).to(dtype).contiguous()

        self.layers = [
            _Layer(
                cast(a.q_proj.weight, a.k_proj.weight, a.v_proj.weight),
                cast(a.o_proj.weight),
                cast(m.gate_proj.weight, m.up_proj.weight),
                cast(m.down_proj.weight),
                layer.input_layernorm.weight.detach().float(),
                layer.post_attention_layernorm.weight.detach().float(),
            )
            for layer in target.model.layers
            for a, m in [(layer.self_attn, layer.mlp)]
        ]
        self.norm = target.model.norm.weight.detach().float()
        self.embedding = cast(target.model.embed_tokens.weight)
        self.lm_head = cast(target.lm_head.weight)
        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.float32) / self.head_dim
        angles = torch.arange(max_tokens)[:, None].float() * config.rope_parameters["rope_theta"] ** -exponents
        self.cos, self.sin = angles.cos(), angles.sin()
        self.keys = torch.zeros(len(self.layers), slots, self.kv_heads, max_tokens, self.head_dim, dtype=dtype)
        self.values = torch.zeros_like(self.keys)
        self.generator = torch.Generator().manual_seed(seed)

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """x: [tokens, heads, head_dim]."""
        cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]
        first, second = x.float().chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(self.dtype)

    def _pass(self, token_ids: Tensor, positions: Tensor, attend: Callable[[int, Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        """Returns: [tokens, kept layers + 1, hidden]."""
        # The residual stream in float32: a few of its entries are so large that bfloat16 would lose the layers' own.
        residual, kept = F.embedding(token_ids, self.embedding).float(), []
        heads, kv_heads, count = self.heads, self.kv_heads, len(token_ids)
        for index, layer in enumerate(self.layers):
            if index in self.kept_layers:
                kept.append(residual)
            x = F.linear(self._norm(residual, layer.input_norm), layer.qkv)
            q, k, v = x.view(count, -1, self.head_dim).split((heads, kv_heads, kv_heads), 1)
            mixed = attend(index, self._rotate(q, positions), self._rotate(k, positions), v)
            residual = residual + F.linear(mixed, layer.out)
            gate, up = F.linear(self._norm(residual, layer.post_norm), layer.gate_up).chunk(2, -1)
            residual = residual + F.linear(F.silu(gate) * up, layer.down)
        return torch.stack([*(state.to(self.dtype) for state in kept), self._norm(residual, self.norm)], 1)

    def _norm(self, residual: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(residual, (self.hidden,), weight, self.eps).to(self.dtype)

    def _read_logits(self, states: Tensor) -> Tensor:
        """[tokens, vocabulary] float32"""
        return F.linear(states[:, -1], self.lm_head).float()

    def _prefill(self, slot: int, token_ids: Tensor) -> Tensor:
        length = len(token_ids)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            k, v = k.transpose(0, 1), v.transpose(0, 1)
            self.keys[layer, slot, :, :length], self.values[layer, slot, :, :length] = k, v
            group = self.heads // self.kv_heads
            mixed = F.scaled_dot_product_attention(
                q.transpose(0, 1)[None],
                k.repeat_interleave(group, 0)[None],
                v.repeat_interleave(group, 0)[None],
                is_causal=True,
            )
            return mixed[0].transpose(0, 1).reshape(length, -1)

        return self._pass(token_ids, torch.arange(length), attend)

    def _decode(self, token_ids: Tensor, lengths: Tensor) -> Tensor:
        """One more token in every slot. lengths: [slots], of the text before it."""
        longest = int(lengths.max()) + 1
        unseen = torch.zeros(self.slots, 1, 1, longest, dtype=self.dtype)
        unseen.masked_fill_((torch.arange(longest) > lengths[:, None])[:, None, None], float("-inf"))
        rows, group = torch.arange(self.slots), self.heads // self.kv_heads

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.keys[layer, rows, :, lengths], self.values[layer, rows, :, lengths] = k, v
            # The query heads of one key head are so many queries at one position.
            mixed = F.scaled_dot_product_attention(
                q.view(self.slots, self.kv_heads, group, self.head_dim),
                self.keys[layer, :, :, :longest],
                self.values[layer, :, :, :longest],
                attn_mask=unseen.expand(-1, -1, group, -1),
            )
            return mixed.reshape(self.slots, -1)

        return self._pass(token_ids, lengths, attend)

    def _draw(self, logits: Tensor, temperatures: Tensor) -> Tensor:
        """[rows]: the likeliest token where the temperature is 0, else a drawn one."""
        drawn = logits.argmax(-1)
        if (sampled := (temperatures > 0).nonzero().flatten()).numel():
            probs = (logits[sampled] / temperatures[sampled, None]).softmax(-1)
            # By the inverse of the distribution function: multinomial takes as long as a pass of the target.
            cumulated = probs.double().cumsum(-1)
            level = torch.rand(len(sampled), 1, generator=self.generator, dtype=torch.float64)
            drawn[sampled] = torch.searchsorted(cumulated, level * cumulated[:, -1:])[:, 0]
        return drawn

    @torch.no_grad()
    def write(self, prompts: Iterable[Prompt]) -> Iterator[Answer]:
        """Answer all prompts, in the order in which answers end; prompts longer than half of max_tokens are left out."""
        waiting = (p for p in prompts if len(p.token_ids) <= self.max_tokens // 2)
        texts: list[Prompt | None] = [None] * self.slots
        tokens: list[list[int]] = [[] for _ in texts]
        states: list[list[Tensor]] = [[] for _ in texts]
        normalizers: list[list[Tensor]] = [[] for _ in texts]
        lengths, temperatures = torch.zeros(self.slots, dtype=torch.long), torch.zeros(self.slots)
        while True:
            for slot in [s for s in range(self.slots) if texts[s] is None]:
                if (prompt := next(waiting, None)) is None:
                    break
                kept = self._prefill(slot, torch.tensor(prompt.token_ids))
                logits = self._read_logits(kept[-1:])
                texts[slot], lengths[slot] = prompt, len(prompt.token_ids)
                temperatures[slot] = prompt.temperature
                states[slot], normalizers[slot] = [kept], [logits.logsumexp(-1)]
                first = self._draw(logits, temperatures[slot : slot + 1])
                tokens[slot] = [*prompt.token_ids, int(first)]
            busy = [s for s in range(self.slots) if texts[s] is not None]
            if not busy:
                return
            for slot in busy:
                if tokens[slot][-1] in self.ends or len(tokens[slot]) >= self.max_tokens:
                    yield Answer(
                        texts[slot],
                        torch.tensor(tokens[slot], dtype=torch.int32),
                        len(texts[slot].token_ids),
                        torch.cat(states[slot]),
                        torch.cat(normalizers[slot]),
                    )
                    texts[slot], lengths[slot], temperatures[slot] = None, 0, 0.0
            busy = [s for s in busy if texts[s] is not None]
            if not busy:
                continue
            latest = torch.tensor([tokens[s][-1] if texts[s] is not None else 0 for s in range(self.slots)])
            kept = self._decode(latest, lengths)
            logits = self._read_logits(kept)
            drawn, normalizer = self._draw(logits, temperatures).tolist(), logits.logsumexp(-1)
            for slot in busy:
                states[slot].append(kept[slot : slot + 1])
                normalizers[slot].append(normalizer[slot : slot + 1])
                tokens[slot].append(drawn[slot])
            lengths[busy] += 1
