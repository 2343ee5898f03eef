"""FlashInfer's and SGLang's small kernels in torch, on the host's side of device memory."""

from __future__ import annotations

import torch
from torch import Tensor


def rmsnorm(out: Tensor, x: Tensor, weight: Tensor, eps: float, *_) -> None:
    values = x.float()
    scale = torch.rsqrt(values.square().mean(dim=-1, keepdim=True) + eps)
    out.copy_((values * scale * weight.float()).to(out.dtype))


def fused_add_rmsnorm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, *_) -> None:
    total = x.float() + residual.float()
    residual.copy_(total.to(residual.dtype))
    rmsnorm(x, total, weight, eps)


def run_rope(q: Tensor, k: Tensor, cos_sin: Tensor, positions: Tensor) -> None:
    """Rotates the halves of every head (NeoX); q, k: [rows, heads, dim]."""
    half = cos_sin.shape[-1] // 2
    cos, sin = cos_sin[positions.long()].float()[:, None].split(half, dim=-1)
    for x in (q, k):
        first, second = x[..., :half].float(), x[..., half : 2 * half].float()
        x[..., : 2 * half] = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def run_rope_store(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, cos_sin: Tensor, positions: Tensor, slots: Tensor
) -> None:
    run_rope(q, k, cos_sin, positions)
    # Views: what is written into a copy is lost.
    k_cache.view(len(k_cache), -1)[slots.long()] = k.flatten(1)
    v_cache.view(len(v_cache), -1)[slots.long()] = v.flatten(1)


def store_cache(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, num_slots: int, skipped: int) -> None:
    slots = slots.long()
    outside = slots[(slots < 0) | (slots >= num_slots)]
    assert not len(outside), f"keys are stored in slots {outside.tolist()} of {num_slots}"
    kept = slots != skipped
    k_cache[slots[kept]], v_cache[slots[kept]] = k[kept], v[kept]


def run_activation(x: Tensor, out: Tensor, name: str, *_) -> None:
    assert name == "silu", f"the activation {name} is not computed"
    gate, up = x.float().chunk(2, dim=-1)
    out.copy_((torch.nn.functional.silu(gate) * up).to(out.dtype))


def clamp_position(positions: Tensor, seq_lens: Tensor) -> None:
    positions.copy_((seq_lens - 1).clamp(min=0).to(positions.dtype))


def segment_packbits(x: Tensor, indptr: Tensor, packed_indptr: Tensor, bitorder: str, packed: Tensor) -> None:
    """Eight bools [entries] a byte, each segment from a byte of its own on."""
    assert bitorder == "little", f"the bit order {bitorder} is not computed"
    weights = 2 ** torch.arange(8)
    for start, end, at in zip(indptr[:-1].tolist(), indptr[1:].tolist(), packed_indptr[:-1].tolist(), strict=True):
        bits = torch.nn.functional.pad(x[start:end].long(), (0, -(end - start) % 8)).view(-1, 8)
        packed[at : at + len(bits)] = (bits * weights).sum(dim=1).to(torch.uint8)


# -- sampling ---------------------------------------------------------------------------------------------------------


def top_p_renorm_probs(probs: Tensor, out: Tensor, top_ps: Tensor | None, top_p: float, *_) -> None:
    kept = _keep_top_p(probs, top_ps, top_p)
    out.copy_(kept / kept.sum(dim=-1, keepdim=True))


def top_k_renorm_probs(probs: Tensor, out: Tensor, top_ks: Tensor | None, top_k: int, *_) -> None:
    kept = _keep_top_k(probs, top_ks, top_k)
    out.copy_(kept / kept.sum(dim=-1, keepdim=True))


def top_k_top_p_sampling_from_probs(
    probs: Tensor, samples: Tensor, valid: Tensor, indices: None, top_ks: Tensor | None, top_k: int,
    top_ps: Tensor | None, top_p: float, *_,
) -> None:  # fmt: skip
    kept = torch.minimum(_keep_top_k(probs, top_ks, top_k), _keep_top_p(probs, top_ps, top_p))
    samples.copy_(torch.multinomial(kept, 1)[:, 0])
    valid.fill_(True)


def min_p_sampling_from_probs(
    probs: Tensor, samples: Tensor, valid: Tensor, indices: None, min_ps: Tensor | None, min_p: float, *_
) -> None:
    limit = torch.full((len(probs),), min_p) if min_ps is None else min_ps
    kept = probs.where(probs >= limit[:, None] * probs.amax(dim=-1, keepdim=True), 0.0)
    samples.copy_(torch.multinomial(kept, 1)[:, 0])
    valid.fill_(True)


def _keep_top_p(probs: Tensor, each: Tensor | None, all_alike: float) -> Tensor:
    limit = probs.new_full((len(probs),), all_alike) if each is None else each
    ordered, at = probs.sort(dim=-1, descending=True)
    kept = ordered.cumsum(dim=-1) - ordered < limit[:, None]
    return torch.zeros_like(probs).scatter_(-1, at, ordered.where(kept, 0.0))


def _keep_top_k(probs: Tensor, each: Tensor | None, all_alike: int) -> Tensor:
    count = torch.full((len(probs),), all_alike) if each is None else each
    ordered = probs.sort(dim=-1, descending=True).values
    least = ordered.gather(-1, (count.long().clamp(1, probs.shape[-1]) - 1)[:, None])
    return probs.where(probs >= least, 0.0)
