"""FlashInfer's prefill plan, made on the device from lengths that only the device knows.

FlashInfer plans on the host: it cuts the batch's attention into work items (request, query tile, key-value chunk), writes
them into an integer workspace and copies that to the device. Under a CUDA graph the kernel's grid and the place of every
array in the workspace are fixed at capture, so only the arrays' contents have to follow the lengths. `plan_prefill` writes
them in one launch, with the arithmetic of FlashInfer 0.7.2 (include/flashinfer/attention/scheduler.cuh:
PrefillBinarySearchKVChunkSize, PrefillSplitQOKVIndptr, PrefillPlanImpl) for page size 1 and no sliding window.
`plan_prefill_reference` is the same in plain Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tetris_sglang.kernels.checks import check_device

# FlashInfer: std::max(128 / page_size, 1) with pages of one token, and two resident CTAs per SM.
MIN_KV_CHUNK_TOKENS = 128
_CTAS_PER_SM = 2

_BLOCK_ITEMS = 32


class PlanLayout(NamedTuple):
    """What a captured plan has fixed: FlashInfer's `PrefillPlanInfo`. Offsets in bytes from the workspace's start."""

    padded_batch_size: int
    """Work items that the captured grid has room for."""
    total_num_rows: int
    """Query rows that merge_indptr has room for."""
    total_num_rows_offset: int
    cta_tile_q: int
    request_indices_offset: int
    qo_tile_indices_offset: int
    kv_tile_indices_offset: int
    merge_indptr_offset: int
    o_indptr_offset: int
    kv_chunk_size_ptr_offset: int
    v_offset: int
    s_offset: int
    block_valid_mask_offset: int
    enable_cuda_graph: int
    split_kv: int

    @classmethod
    def parse(cls, plan_info: Sequence[int]) -> PlanLayout:
        """Read the vector that FlashInfer's plan() returns.

        Raises:
            ValueError: it is not a split CUDA-graph plan in the layout of FlashInfer 0.7.2.
        """
        values = [int(value) for value in plan_info]
        if len(values) != len(cls._fields):
            raise ValueError(f"FlashInfer's plan has {len(values)} entries, {len(cls._fields)} are known")
        layout = cls(*values)
        arrays = [getattr(layout, name) for name in cls._fields if name.endswith("_offset")]
        sane = (
            layout.enable_cuda_graph == 1
            and layout.split_kv == 1
            and layout.cta_tile_q in (16, 32, 64, 128)
            and layout.total_num_rows > 0
            and 0 < layout.padded_batch_size < 2**20
            and all(0 <= offset < 2**40 and offset % 4 == 0 for offset in arrays)
            and layout.request_indices_offset
            < layout.qo_tile_indices_offset
            < layout.kv_tile_indices_offset
            < layout.o_indptr_offset
            < layout.kv_chunk_size_ptr_offset
            < layout.total_num_rows_offset
            < layout.merge_indptr_offset
            < layout.block_valid_mask_offset
        )
        if not sane:
            raise ValueError(f"FlashInfer's plan does not look like a split CUDA-graph plan: {layout}")
        return layout


class Plan(NamedTuple):
    """The contents of the arrays, as plain lists."""

    kv_chunk_tokens: int
    request_indices: list[int]
    qo_tile_indices: list[int]
    kv_tile_indices: list[int]
    o_indptr: list[int]
    merge_indptr: list[int]
    total_num_rows: int


def max_work_items(num_sms: int, num_kv_heads: int) -> int:
    """Work items that FlashInfer splits the batch into at most, unless every tile needs one of its own."""
    return _CTAS_PER_SM * num_sms // num_kv_heads


def plan_prefill_reference(
    qo_lens: Sequence[int], kv_lens: Sequence[int], *, group_size: int, cta_tile_q: int, max_items: int
) -> Plan:
    """FlashInfer's arithmetic in plain Python; see `plan_prefill`."""
    tiles = [-(-length * group_size // cta_tile_q) for length in qo_lens]
    kv_lens = [max(1, length) for length in kv_lens]
    low, high = MIN_KV_CHUNK_TOKENS, max(kv_lens)
    while low < high:
        middle = (low + high) // 2
        items = sum(t * -(-length // middle) for t, length in zip(tiles, kv_lens, strict=True))
        low, high = (middle + 1, high) if items > max_items else (low, middle)
    plan = Plan(low, [], [], [], [0], [0], sum(qo_lens))
    for request, (rows, num_tiles, kv_len) in enumerate(zip(qo_lens, tiles, kv_lens, strict=True)):
        chunks = -(-kv_len // low)
        for tile in range(num_tiles):
            for chunk in range(chunks):
                plan.request_indices.append(request)
                plan.qo_tile_indices.append(tile)
                plan.kv_tile_indices.append(chunk)
        for _ in range(rows):
            plan.merge_indptr.append(plan.merge_indptr[-1] + chunks)
        plan.o_indptr.append(plan.o_indptr[-1] + rows * chunks)
    return plan


def plan_prefill(
    workspace: Tensor,
    layout: PlanLayout,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    *,
    group_size: int,
    max_items: int,
) -> None:
    """Rewrite a captured plan for other lengths.

    Args:
        workspace: uint8, FlashInfer's integer workspace on the device; written.
        layout: of the plan made at capture, with the same number of requests.
        qo_indptr, kv_indptr: [requests + 1] int32, on the same device. At most layout.total_num_rows query rows; then the
            work items fit as well, as FlashInfer sizes the grid for any lengths that sum to as much.
        group_size: query heads per key-value head.
        max_items: `max_work_items`.
    Raises:
        ValueError: shapes or dtypes that do not fit.
    Sync: none; one launch.
    """
    check_device(workspace)
    if workspace.dtype != torch.uint8 or workspace.ndim != 1:
        raise ValueError(f"workspace must be a flat uint8 tensor, got {workspace.dtype} of {workspace.ndim} dimensions")
    num_requests = qo_indptr.shape[0] - 1
    if num_requests < 1 or qo_indptr.shape != kv_indptr.shape or qo_indptr.ndim != 1:
        raise ValueError(
            f"qo_indptr and kv_indptr must be [requests + 1], got {tuple(qo_indptr.shape)} and {tuple(kv_indptr.shape)}"
        )
    if qo_indptr.dtype != torch.int32 or kv_indptr.dtype != torch.int32:
        raise ValueError(f"qo_indptr and kv_indptr must be int32, got {qo_indptr.dtype} and {kv_indptr.dtype}")
    num_entries = max(layout.padded_batch_size, layout.total_num_rows + 1)
    _plan_prefill_kernel[(triton.cdiv(num_entries, _BLOCK_ITEMS),)](
        qo_indptr,
        kv_indptr,
        workspace[: workspace.shape[0] // 4 * 4].view(torch.int32),
        workspace,
        num_requests,
        layout.padded_batch_size,
        layout.total_num_rows,
        layout.cta_tile_q,
        group_size,
        max_items,
        layout.request_indices_offset // 4,
        layout.qo_tile_indices_offset // 4,
        layout.kv_tile_indices_offset // 4,
        layout.o_indptr_offset // 4,
        layout.kv_chunk_size_ptr_offset // 4,
        layout.total_num_rows_offset // 4,
        layout.merge_indptr_offset // 4,
        layout.block_valid_mask_offset,
        MIN_KV_CHUNK=MIN_KV_CHUNK_TOKENS,
        BLOCK_REQUESTS=triton.next_power_of_2(num_requests),
        BLOCK_ITEMS=_BLOCK_ITEMS,
    )


@triton.jit
def _plan_prefill_kernel(
    qo_indptr,
    kv_indptr,
    words,
    octets,
    num_requests,
    padded_batch_size,
    total_num_rows,
    cta_tile_q,
    group_size,
    max_items,
    request_indices,
    qo_tile_indices,
    kv_tile_indices,
    o_indptr,
    kv_chunk_size,
    num_rows,
    merge_indptr,
    block_valid_mask,
    MIN_KV_CHUNK: tl.constexpr,
    BLOCK_REQUESTS: tl.constexpr,
    BLOCK_ITEMS: tl.constexpr,
):
    # Every program repeats the search over the requests, which is cheaper than a second launch.
    request = tl.arange(0, BLOCK_REQUESTS)
    is_request = request < num_requests
    row_start = tl.load(qo_indptr + request, mask=is_request, other=0)
    rows = tl.load(qo_indptr + request + 1, mask=is_request, other=0) - row_start
    kv_start = tl.load(kv_indptr + request, mask=is_request, other=0)
    kv_len = tl.load(kv_indptr + request + 1, mask=is_request, other=0) - kv_start
    kv_len = tl.maximum(kv_len, 1)
    tiles = (rows * group_size + cta_tile_q - 1) // cta_tile_q

    low = MIN_KV_CHUNK
    high = tl.max(kv_len, axis=0)
    while low < high:
        middle = (low + high) // 2
        items = tl.sum(tiles * ((kv_len + middle - 1) // middle), axis=0)
        if items > max_items:
            low = middle + 1
        else:
            high = middle
    chunks = (kv_len + low - 1) // low

    items = tiles * chunks
    item_end = tl.cumsum(items, axis=0)
    partial_rows = rows * chunks
    partial_end = tl.cumsum(partial_rows, axis=0)
    row_end = tl.cumsum(rows, axis=0)
    total_items = tl.sum(items, axis=0)
    total_rows = tl.sum(rows, axis=0)

    entry = tl.program_id(0) * BLOCK_ITEMS + tl.arange(0, BLOCK_ITEMS)

    # Work items: the owner of an item is the number of requests whose items end at or before it.
    owner = tl.sum((item_end[None, :] <= entry[:, None]).to(tl.int32), axis=1)
    is_owner = owner[:, None] == request[None, :]
    within = entry - tl.sum(tl.where(is_owner, (item_end - items)[None, :], 0), axis=1)
    owner_chunks = tl.maximum(tl.sum(tl.where(is_owner, chunks[None, :], 0), axis=1), 1)
    is_item = entry < total_items
    in_grid = entry < padded_batch_size
    tl.store(words + request_indices + entry, tl.where(is_item, owner, 0), mask=in_grid)
    tl.store(words + qo_tile_indices + entry, tl.where(is_item, within // owner_chunks, 0), mask=in_grid)
    tl.store(words + kv_tile_indices + entry, tl.where(is_item, within % owner_chunks, 0), mask=in_grid)
    tl.store(octets + block_valid_mask + entry, is_item.to(tl.uint8), mask=in_grid)

    # Rows: each has one partial result per chunk of its request. The entry after the last row closes the last one.
    owner = tl.sum((row_end[None, :] <= entry[:, None]).to(tl.int32), axis=1)
    is_owner = owner[:, None] == request[None, :]
    within = entry - tl.sum(tl.where(is_owner, (row_end - rows)[None, :], 0), axis=1)
    first = tl.sum(tl.where(is_owner, (partial_end - partial_rows)[None, :], 0), axis=1)
    owner_chunks = tl.sum(tl.where(is_owner, chunks[None, :], 0), axis=1)
    merge = tl.where(entry < total_rows, first + within * owner_chunks, tl.sum(partial_rows, axis=0))
    tl.store(words + merge_indptr + entry, merge, mask=entry <= total_num_rows)

    if tl.program_id(0) == 0:
        tl.store(words + o_indptr + request, partial_end - partial_rows, mask=is_request)
        tl.store(words + o_indptr + num_requests, tl.sum(partial_rows, axis=0))
        tl.store(words + kv_chunk_size, low)
        tl.store(words + num_rows, total_rows)
