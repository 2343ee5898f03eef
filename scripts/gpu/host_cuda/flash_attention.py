"""FlashAttention 3 of sgl_kernel over a paged cache, computed from the page table and the lengths that it is given."""

from __future__ import annotations

import torch
from torch import Tensor

from host_cuda.attention import attend


def allocate(q: Tensor, k_cache: Tensor, v_cache: Tensor, k: None, v: None, qv: None, out: Tensor | None, *_):
    """What `sgl_kernel::fwd` returns: the output [rows, heads, dim], log-sums [heads, rows], and nothing of its splits."""
    out = q.new_empty(*q.shape[:-1], v_cache.shape[-1]) if out is None else out
    nothing = q.new_empty(0, dtype=torch.float32)
    return out, q.new_empty(q.shape[-2], len(q), dtype=torch.float32), nothing, nothing


def run(
    results: tuple[Tensor, ...], q: Tensor, k_cache: Tensor, v_cache: Tensor, k, v, qv, out, cu_seqlens_q: Tensor, cu_seqlens_k,
    cu_seqlens_k_new, seqused_q, cache_seqlens: Tensor, max_seqlen_q: int, max_seqlen_k, page_table: Tensor, batch_idx, leftpad,
    cos, sin, rotary_seqlens, q_descale, k_descale, v_descale, scale: float, causal: bool, left: int, right: int, chunk: int,
    softcap: float, interleaved, scheduler_metadata, num_splits, pack_gqa, sm_margin, sinks, sparse_mask, only_qv,
) -> None:  # fmt: skip
    """`flash_attn_with_kvcache` (sgl_kernel/flash_attn.py). A query of no request, or that sees nothing, is left alone or 0."""
    wanted = {"k": k, "qv": qv, "batch_idx": batch_idx, "leftpad": leftpad, "cos": cos, "k_descale": k_descale, "sinks": sinks}
    assert not any(value is not None for value in wanted.values()), f"not computed: {wanted}"
    assert (left, right) == (-1, -1) and not chunk and not softcap, "only plain attention is computed"
    out, sums = results[:2]
    page_size = k_cache.shape[1]
    for request, kv_len in enumerate(cache_seqlens.tolist()):
        rows = torch.arange(int(cu_seqlens_q[request]), int(cu_seqlens_q[request + 1]))
        assert len(rows) <= max_seqlen_q, f"{len(rows)} queries where at most {max_seqlen_q} are planned"
        tokens = torch.arange(kv_len)
        pages = page_table[request, tokens // page_size].long()
        keys, values = (cache[pages, tokens % page_size].float() for cache in (k_cache, v_cache))
        seen = torch.ones(len(rows), kv_len, dtype=torch.bool)
        if causal:
            seen = tokens[None, :] + len(rows) <= kv_len + torch.arange(len(rows))[:, None]
        attended, log_sums = attend(q[rows].float(), keys, values, seen, scale)
        out[rows] = attended.to(out.dtype)
        sums[:, rows] = log_sums.T


def allocate_metadata(batch_size: int, *args, **_) -> Tensor:
    """What `sgl_kernel::get_scheduler_metadata` returns: how tiles are shared out, which says nothing of the result."""
    device = next(argument.device for argument in args if isinstance(argument, Tensor))
    return torch.empty(1 + -(-batch_size // 4) * 4 * 4, dtype=torch.int32, device=device)


def fill_metadata(result: Tensor, *_, **__) -> None:
    result.zero_()
