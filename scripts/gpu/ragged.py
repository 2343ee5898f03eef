"""Random ragged verify batches, and attention over them in float64: what check.py measures attention backends against."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

KINDS = ("mixed", "even", "roots", "one takes all", "long prefixes", "single request")


@dataclass(frozen=True)
class HeadShape:
    """heads is a multiple of kv_heads."""

    heads: int
    kv_heads: int
    head_dim: int

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads


@dataclass(frozen=True)
class RaggedBatch:
    """One target pass: request r verifies verify_lens[r] tokens that follow prefix_lens[r] committed ones.

    queries: [num_tokens, heads, head_dim], request after request.
    keys, values: [num_slots, kv_heads, head_dim], a pool of slots of one token.
    slots: [num_kv_tokens] int32, the slot of every token of every request (its prefix, then its verified tokens).
    """

    verify_lens: tuple[int, ...]
    prefix_lens: tuple[int, ...]
    queries: Tensor
    keys: Tensor
    values: Tensor
    slots: Tensor

    @property
    def kv_lens(self) -> tuple[int, ...]:
        return tuple(p + v for p, v in zip(self.prefix_lens, self.verify_lens, strict=True))

    @property
    def num_tokens(self) -> int:
        return sum(self.verify_lens)

    @property
    def shape(self) -> HeadShape:
        return HeadShape(self.queries.shape[1], self.keys.shape[1], self.queries.shape[2])


def random_lens(
    kind: str, rng: random.Random, max_requests: int, max_verify: int, max_prefix: int, max_rows: int
) -> tuple[list[int], list[int]]:
    """verify_lens in 1..max_verify, at most max_rows together, and prefix_lens in 0..max_prefix of one batch of a kind.

    Raises:
        ValueError: no such kind, or fewer rows than requests.
    """
    if max_rows < max_requests:
        raise ValueError(f"{max_rows} rows are not enough for {max_requests} requests")
    if kind not in KINDS:
        raise ValueError(f"no such kind of batch: {kind!r}; there are {', '.join(KINDS)}")
    requests = 1 if kind == "single request" else rng.randint(2, max(2, max_requests))
    verify = [rng.randint(1, max_verify) for _ in range(requests)]
    prefix = [rng.randint(0, max_prefix) for _ in range(requests)]
    if kind == "even":
        verify = [verify[0]] * requests
    elif kind == "roots":
        verify = [1] * requests
    elif kind == "one takes all":
        verify = [1] * requests
        verify[rng.randrange(requests)] = max_verify
    elif kind == "long prefixes":
        prefix = [rng.randint(max_prefix // 2, max_prefix) for _ in range(requests)]
    while sum(verify) > max_rows:
        verify[verify.index(max(verify))] -= 1
    return verify, prefix


def random_batch(
    verify_lens: Sequence[int],
    prefix_lens: Sequence[int],
    shape: HeadShape,
    *,
    dtype: torch.dtype,
    device: str,
    seed: int,
) -> RaggedBatch:
    """Fill a batch of given lengths. Slots lie in random order, and those of no request hold NaN.

    Reading a slot of nobody, or one too many, shows as NaN in the result.
    """
    kv_lens = [p + v for p, v in zip(prefix_lens, verify_lens, strict=True)]
    generator = torch.Generator(device).manual_seed(seed)
    num_slots = sum(kv_lens) + 64
    slots = torch.randperm(num_slots, generator=generator, device=device)[: sum(kv_lens)]

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator, device=device).to(dtype)

    pools = []
    for _ in range(2):
        pool = torch.full((num_slots, shape.kv_heads, shape.head_dim), torch.nan, dtype=dtype, device=device)
        pool[slots] = normal(sum(kv_lens), shape.kv_heads, shape.head_dim)
        pools.append(pool)
    return RaggedBatch(
        tuple(verify_lens),
        tuple(prefix_lens),
        normal(sum(verify_lens), shape.heads, shape.head_dim),
        *pools,
        slots.to(torch.int32),
    )


def reference_attention(batch: RaggedBatch) -> Tensor:
    """Causal attention in float64: verified token i of a request sees its prefix and verified tokens 0..i.

    Returns:
        [num_tokens, heads, head_dim] float64, scaled by 1 / sqrt(head_dim).
    """
    outputs, row, start = [], 0, 0
    for verify_len, kv_len in zip(batch.verify_lens, batch.kv_lens, strict=True):
        slots = batch.slots[start : start + kv_len].long()
        keys, values = (pool[slots].double().repeat_interleave(batch.shape.group, 1) for pool in (batch.keys, batch.values))
        queries = batch.queries[row : row + verify_len].double()
        scores = torch.einsum("qhd,khd->hqk", queries, keys) / batch.shape.head_dim**0.5
        position = torch.arange(kv_len, device=scores.device)
        unseen = position[None, :] > position[kv_len - verify_len :, None]
        weights = scores.masked_fill(unseen, -torch.inf).softmax(-1)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, values))
        row, start = row + verify_len, start + kv_len
    return torch.cat(outputs)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """The largest over the rows of |actual - expected| / |expected|; infinite where anything is not finite."""
    error = (actual.double() - expected).flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1)
    return float(error.max()) if bool(torch.isfinite(error).all()) else float("inf")
