"""FlashInfer's paged attention, computed from what its kernels read: the arrays of a plan, the page table, the packed mask.

Never from the lengths that the plan was made of, so a plan that is wrong, stale or incomplete shows in the output. Args stand
in the order of FlashInfer 0.7.2's bindings (csrc/batch_prefill.cu, batch_decode.cu).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_HND = 1
"""Layout of the cache: [pages, heads, entries, dim]; otherwise [pages, entries, heads, dim]."""
_CAUSAL, _CUSTOM = 1, 2
"""Mask modes; 0: none."""


class PrefillPlan(NamedTuple):
    """What `plan` of the prefill module returns; offsets are bytes into the integer or the float workspace."""

    padded_batch_size: int
    total_num_rows: int
    total_num_rows_at: int
    cta_tile_q: int
    request_indices_at: int
    qo_tile_indices_at: int
    kv_tile_indices_at: int
    merge_indptr_at: int
    o_indptr_at: int
    kv_chunk_size_at: int
    v_at: int
    s_at: int
    block_valid_mask_at: int
    has_graph: int
    splits_kv: int


class DecodePlan(NamedTuple):
    """The same of the decode module."""

    padded_batch_size: int
    v_at: int
    s_at: int
    request_indices_at: int
    kv_tile_indices_at: int
    o_indptr_at: int
    block_valid_mask_at: int
    kv_chunk_size_at: int
    has_graph: int
    splits_kv: int


class _Pages(NamedTuple):
    """The cache of a batch."""

    keys: Tensor
    """[pages, entries, kv_heads, dim]."""
    values: Tensor
    indptr: Tensor
    """[batch + 1], where each request's pages begin in `indices`."""
    indices: Tensor
    last_lens: Tensor
    """[batch], entries of each request's last page."""

    @classmethod
    def of(cls, keys: Tensor, values: Tensor, indptr: Tensor, indices: Tensor, last_lens: Tensor, layout: int) -> _Pages:
        if layout == _HND:
            keys, values = keys.transpose(1, 2), values.transpose(1, 2)
        return cls(keys, values, indptr, indices, last_lens)

    def kv_len(self, request: int) -> int:
        pages = int(self.indptr[request + 1]) - int(self.indptr[request])
        return (pages - 1) * self.keys.shape[1] + int(self.last_lens[request]) if pages > 0 else 0

    def gather(self, request: int, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Keys and values [end - start, kv_heads, dim] float32."""
        tokens, page_size = torch.arange(start, end), self.keys.shape[1]
        pages = self.indices[int(self.indptr[request]) + tokens // page_size].long()
        return self.keys[pages, tokens % page_size].float(), self.values[pages, tokens % page_size].float()


def run_prefill(
    float_workspace, int_workspace, plan, q, k_cache, v_cache, qo_indptr, kv_indptr, kv_indices, last_page_len, out, lse,
    mask_mode, layout, window_left, enable_pdl, custom_mask, mask_indptr, alibi, prefix_len, token_pos, max_item_len,
    k_scales, v_scales, soft_cap, sm_scale, *rope,
) -> None:  # fmt: skip
    """`paged_run`: queries [rows, heads, dim] of several requests over their pages."""
    plan = PrefillPlan(*map(int, plan))
    assert window_left < 0 and not soft_cap, "only plain attention is computed"
    pages = _Pages.of(k_cache, v_cache, kv_indptr, kv_indices, last_page_len, layout)
    heads, dim = q.shape[1:]
    group = heads // pages.keys.shape[2]
    num_requests = len(qo_indptr) - 1
    read = _Words(int_workspace)
    o_indptr = read(plan.o_indptr_at, num_requests + 1)
    target, states = out, lse
    if plan.splits_kv:
        target, states = _partials(float_workspace, plan.v_at, plan.s_at, heads, dim, out.dtype)
        # What the plan leaves out shows in what is merged.
        used = int(read(plan.merge_indptr_at, plan.total_num_rows + 1).max())
        target[:used], states[:used] = torch.nan, torch.nan
    mask = _Mask(mask_mode, custom_mask, mask_indptr)
    for request, qo_tile, kv_tile in _work_items(plan, int_workspace, num_requests):
        first_row, qo_len = int(qo_indptr[request]), int(qo_indptr[request + 1] - qo_indptr[request])
        kv_len = pages.kv_len(request)
        start, end, chunks = _chunk(plan, read, kv_tile, kv_len)
        # Rows and the heads of a group are one axis, cut into tiles.
        packed = torch.arange(qo_tile * plan.cta_tile_q, min((qo_tile + 1) * plan.cta_tile_q, qo_len * group))
        if not len(packed):
            continue
        queries, members = packed // group, packed % group
        keys, values = pages.gather(request, start, end)
        seen = mask.look(request, queries, torch.arange(start, end), qo_len, kv_len)
        place = int(o_indptr[request]) + queries * chunks + (kv_tile if plan.splits_kv else 0)
        for kv_head in range(keys.shape[1]):
            head = kv_head * group + members
            logits = q[first_row + queries, head].float() @ keys[:, kv_head].T * sm_scale
            probs, sums = _softmax(logits.masked_fill(~seen, -torch.inf))
            target[place, head] = (probs @ values[:, kv_head]).to(target.dtype)
            if states is not None:
                states[place, head] = sums
    if plan.splits_kv:
        num_rows = int(read(plan.total_num_rows_at, 1)) if plan.has_graph else plan.total_num_rows
        _merge(target, states, read(plan.merge_indptr_at, plan.total_num_rows + 1), out, lse, num_rows)


def run_decode(
    float_workspace, int_workspace, plan, q, k_cache, v_cache, kv_indptr, kv_indices, last_page_len, out, lse, layout,
    window_left, enable_pdl, alibi, soft_cap, sm_scale, *rope,
) -> None:  # fmt: skip
    """`run`: one query [batch, heads, dim] per request over its pages."""
    plan = DecodePlan(*map(int, plan))
    assert window_left < 0 and not soft_cap, "only plain attention is computed"
    pages = _Pages.of(k_cache, v_cache, kv_indptr, kv_indices, last_page_len, layout)
    heads, dim = q.shape[1:]
    kv_heads, batch = pages.keys.shape[2], len(kv_indptr) - 1
    read = _Words(int_workspace)
    target, states = out, lse
    if plan.splits_kv:
        target, states = _partials(float_workspace, plan.v_at, plan.s_at, heads, dim, out.dtype)
    requests = read(plan.request_indices_at, plan.padded_batch_size).tolist()
    tiles = read(plan.kv_tile_indices_at, plan.padded_batch_size).tolist()
    masked = plan.splits_kv and plan.has_graph
    for item in range(plan.padded_batch_size):
        if masked and not int_workspace[plan.block_valid_mask_at + item]:
            continue
        request = requests[item]
        assert 0 <= request < batch, f"the plan names request {request} of {batch}"
        start, end, _ = _chunk(plan, read, tiles[item], pages.kv_len(request))
        keys, values = pages.gather(request, start, end)
        query = q[request].float().view(kv_heads, heads // kv_heads, dim)
        probs, sums = _softmax(torch.einsum("hgd,thd->hgt", query, keys) * sm_scale)
        target[item] = torch.einsum("hgt,thd->hgd", probs, values).reshape(heads, dim).to(target.dtype)
        if states is not None:
            states[item] = sums.reshape(heads)
    if plan.splits_kv:
        _merge(target, states, read(plan.o_indptr_at, batch + 1), out, lse, batch)


class _Words:
    """int32 arrays in the integer workspace."""

    def __init__(self, workspace: Tensor) -> None:
        self._workspace = workspace

    def __call__(self, at: int, count: int) -> Tensor:
        return self._workspace[at : at + 4 * count].view(torch.int32)


def _work_items(plan: PrefillPlan, workspace: Tensor, num_requests: int) -> Sequence[tuple[int, int, int]]:
    """(request, tile of queries, tile of keys) of every block that is valid."""
    read, count = _Words(workspace), plan.padded_batch_size
    places = (plan.request_indices_at, plan.qo_tile_indices_at, plan.kv_tile_indices_at)
    items = list(zip(*(read(at, count).tolist() for at in places), strict=True))
    if plan.has_graph:
        valid = workspace[plan.block_valid_mask_at : plan.block_valid_mask_at + count].tolist()
        items = [item for item, is_valid in zip(items, valid, strict=True) if is_valid]
    for request, _, _ in items:
        assert 0 <= request < num_requests, f"the plan names request {request} of {num_requests}"
    return items


def _chunk(plan: PrefillPlan | DecodePlan, read: _Words, kv_tile: int, kv_len: int) -> tuple[int, int, int]:
    """Where a tile of keys begins and ends, and how many tiles the request has."""
    if not plan.splits_kv:
        return 0, kv_len, 1
    size = int(read(plan.kv_chunk_size_at, 1))
    return min(kv_tile * size, kv_len), min((kv_tile + 1) * size, kv_len), -(-max(kv_len, 1) // size)


class _Mask:
    """What a query sees."""

    def __init__(self, mode: int, packed: Tensor | None, indptr: Tensor | None) -> None:
        assert mode in (0, _CAUSAL, _CUSTOM), f"mask mode {mode} is not computed"
        self._mode, self._packed, self._indptr = mode, packed, indptr

    def look(self, request: int, queries: Tensor, keys: Tensor, qo_len: int, kv_len: int) -> Tensor:
        """[queries, keys] bool."""
        if self._mode == _CAUSAL:
            return keys[None, :] + qo_len <= kv_len + queries[:, None]
        if self._mode == _CUSTOM:
            bit = queries[:, None] * kv_len + keys[None, :]
            octets = self._packed[int(self._indptr[request]) + bit // 8].long()
            return (octets >> (bit % 8)) & 1 == 1
        return torch.ones(len(queries), len(keys), dtype=torch.bool)


def _softmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities, and log2 of the sums; of a row that sees nothing 0 and -inf."""
    sums = logits.logsumexp(dim=-1)
    probs = torch.where(sums.isinf()[..., None], 0.0, (logits - sums[..., None]).exp())
    return probs, sums / math.log(2)


def attend(q: Tensor, keys: Tensor, values: Tensor, seen: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """One request's attention, undivided.

    Args:
        q: [queries, heads, dim] float32.
        keys, values: [tokens, kv_heads, dim] float32.
        seen: [queries, tokens] bool.

    Returns:
        [queries, heads, dim] and natural logarithms of the sums [queries, heads].
    """
    heads, kv_heads = q.shape[1], keys.shape[1]
    grouped = q.view(len(q), kv_heads, heads // kv_heads, q.shape[2])
    logits = torch.einsum("qhgd,thd->qhgt", grouped, keys) * scale
    probs, sums = _softmax(logits.masked_fill(~seen[:, None, None, :], -torch.inf))
    out = torch.einsum("qhgt,thd->qhgd", probs, values)
    return out.flatten(1, 2), sums.flatten(1) * math.log(2)


def _partials(workspace: Tensor, v_at: int, s_at: int, heads: int, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Where the tiles' outputs [rows, heads, dim] and sums [rows, heads] stand, up to the workspace's end."""
    v_bytes, s_bytes = heads * dim * dtype.itemsize, heads * 4
    v_rows, s_rows = (workspace.numel() - v_at) // v_bytes, (workspace.numel() - s_at) // s_bytes
    values = workspace[v_at : v_at + v_rows * v_bytes].view(dtype).view(v_rows, heads, dim)
    sums = workspace[s_at : s_at + s_rows * s_bytes].view(torch.float32).view(s_rows, heads)
    return values, sums


def _merge(values: Tensor, sums: Tensor, indptr: Tensor, out: Tensor, lse: Tensor | None, num_rows: int) -> None:
    """Every row's tiles, weighted by their sums."""
    for row in range(num_rows):
        first, last = int(indptr[row]), int(indptr[row + 1])
        if first == last:
            out[row] = 0
            if lse is not None:
                lse[row] = -torch.inf
            continue
        largest = sums[first:last].amax(dim=0)
        weights = torch.exp2(sums[first:last] - largest.where(~largest.isinf(), 0.0))
        total = weights.sum(dim=0)
        out[row] = ((weights[..., None] * values[first:last].float()).sum(dim=0) / total[..., None]).to(out.dtype)
        if lse is not None:
            lse[row] = total.log2() + largest
