"""Laying out the tokens to verify, and looking up their slots, in one launch."""

import functools

import triton
import triton.language as tl
from torch import Tensor

from tetris_sglang.kernels.checks import INT32, INT64, INTEGERS, check_device, check_tensor
from tetris_sglang.packing import PackedTokens, empty_packed_tokens

_BLOCK_REQUESTS = 16


def pack_rows(
    draft_lens: Tensor,
    candidates: Tensor,
    seq_lens: Tensor,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    num_tokens: int,
    depths: Tensor | None = None,
) -> PackedTokens:
    """Lay out each request's root and selected drafts, request after request, with positions and KV slots.

    num_tokens may exceed the sum(draft_lens) + batch tokens there are, to fill a captured graph. The surplus
    rows at the end are harmless to a forward pass and to gathers of per-request settings: request batch - 1
    (a valid index), column 0, input id 0, position 0, KV written to slot 0, which SGLang keeps for that. Do not scatter by
    (requests, columns) with them, they would hit the last root; `accept_rows` goes by qo_indptr, which leaves
    them out.

    Args:
        draft_lens: [batch] int32 in 0..width - 1, batch >= 1.
        candidates: [batch, width] int64, column 0 the root, columns 1..draft_lens the selected drafts.
        seq_lens: [batch] int32 or int64, tokens with KV: the root's position.
        req_to_token: [pool, max_context] int32, SGLang's table of KV slots; rows contiguous. Positions up to
            seq_lens + draft_lens must be below max_context and allocated.
        req_pool_indices: [batch] int32 or int64, the table's row of each request.
        num_tokens: rows to fill, >= sum(draft_lens) + batch. That is not checked, for it would need a sync;
            tokens for which there is no row are left out.
        depths: [batch, width] int64 of trees: a token's position is its depth after seq_lens, its slot still its column.
    Raises:
        ValueError: wrong shapes, dtypes or devices, an empty batch, or num_tokens < batch.
    Sync: none; CUDA-graph safe.
    Example: draft_lens [1, 0], seq_lens [5, 9], num_tokens 4 -> requests [0, 0, 1, 1], columns [0, 1, 0, 0],
        qo_indptr [0, 2, 3], positions [5, 6, 9, 0]: the last row is surplus.
    """
    check_device(draft_lens)
    if candidates.ndim != 2 or req_to_token.ndim != 2:
        raise ValueError(
            f"candidates [batch, width] and req_to_token [pool, max_context] must be matrices, got "
            f"{list(candidates.shape)} and {list(req_to_token.shape)}"
        )
    batch, width = candidates.shape
    if batch == 0 or num_tokens < batch:
        raise ValueError(f"a batch of {batch} cannot be packed into {num_tokens} rows")
    check_tensor("draft_lens", draft_lens, (batch,), INT32, draft_lens)
    check_tensor("candidates", candidates, (batch, width), INT64, draft_lens)
    check_tensor("seq_lens", seq_lens, (batch,), INTEGERS, draft_lens)
    check_tensor("req_to_token", req_to_token, tuple(req_to_token.shape), INT32, draft_lens)
    check_tensor("req_pool_indices", req_pool_indices, (batch,), INTEGERS, draft_lens)
    if depths is not None:
        check_tensor("depths", depths, (batch, width), INT64, draft_lens)
    packed = empty_packed_tokens(batch, num_tokens, draft_lens.device)
    programs, whole_batch, width_block = _plan_launch(batch, width, num_tokens)
    pack_kernel[(programs,)](
        draft_lens,
        candidates,
        seq_lens,
        req_to_token,
        req_pool_indices,
        candidates if depths is None else depths,
        *packed,
        batch,
        width,
        req_to_token.shape[1],
        num_tokens,
        HAS_DEPTHS=depths is not None,
        WHOLE_BATCH=whole_batch,
        BLOCK=_BLOCK_REQUESTS,
        WIDTH_BLOCK=width_block,
    )
    return packed


@functools.cache  # on the path of every step
def _plan_launch(batch: int, width: int, num_tokens: int) -> tuple[int, int, int]:
    whole_batch = max(256, triton.next_power_of_2(batch))  # from 256: few variants to compile
    width_block = triton.next_power_of_2(width)
    programs = max(
        triton.cdiv(batch + 1, _BLOCK_REQUESTS),  # + 1: qo_indptr's last entry
        triton.cdiv(num_tokens, _BLOCK_REQUESTS * width_block),  # each also fills a stretch of surplus rows
    )
    return programs, whole_batch, width_block


@triton.jit(do_not_specialize=["batch", "width", "max_context", "num_tokens"])
def pack_kernel(
    draft_lens,
    candidates,
    seq_lens,
    req_to_token,
    req_pool_indices,
    depths,
    packed_requests,
    packed_columns,
    verify_lens,
    qo_indptr,
    positions,
    input_ids,
    slots,
    batch,
    width,
    max_context,
    num_tokens,
    HAS_DEPTHS: tl.constexpr,
    WHOLE_BATCH: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH_BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    first = program * BLOCK
    # Every program sums the whole batch: cheaper than a second launch, or than waiting for one another.
    everyone = tl.arange(0, WHOLE_BATCH)
    all_verify_lens = tl.load(draft_lens + everyone, mask=everyone < batch, other=-1) + 1
    num_before = tl.sum(tl.where(everyone < first, all_verify_lens, 0))
    num_packed = tl.sum(all_verify_lens)

    requests = first + tl.arange(0, BLOCK)
    is_request = requests < batch
    lens = tl.load(draft_lens + requests, mask=is_request, other=-1) + 1
    starts = num_before + tl.cumsum(lens, 0) - lens
    tl.store(verify_lens + requests, lens, mask=is_request)
    tl.store(qo_indptr + requests, starts, mask=requests <= batch)

    columns = tl.arange(0, WIDTH_BLOCK)[None, :]
    rows = starts[:, None] + columns
    is_token = (columns < lens[:, None]) & (rows < num_tokens)
    first_positions = tl.load(seq_lens + requests, mask=is_request, other=0).to(tl.int64)[:, None]
    cells = requests[:, None] * width + columns
    pool_rows = tl.load(req_pool_indices + requests, mask=is_request, other=0).to(tl.int64)[:, None]
    row_slots = tl.load(req_to_token + pool_rows * max_context + first_positions + columns, mask=is_token, other=0)
    row_ids = tl.load(candidates + cells, mask=is_token, other=0)
    row_positions = first_positions + columns
    if HAS_DEPTHS:
        row_positions = first_positions + tl.load(depths + cells, mask=is_token, other=0)
    tl.store(packed_requests + rows, requests[:, None].to(tl.int64), mask=is_token)
    tl.store(packed_columns + rows, columns.to(tl.int64), mask=is_token)
    tl.store(positions + rows, row_positions, mask=is_token)
    tl.store(input_ids + rows, row_ids, mask=is_token)
    tl.store(slots + rows, row_slots.to(tl.int64), mask=is_token)

    stretch = program * BLOCK * WIDTH_BLOCK + tl.arange(0, BLOCK * WIDTH_BLOCK)
    is_surplus = (stretch >= num_packed) & (stretch < num_tokens)
    nothing = tl.zeros([BLOCK * WIDTH_BLOCK], tl.int64)
    tl.store(packed_requests + stretch, nothing + (batch - 1), mask=is_surplus)
    tl.store(packed_columns + stretch, nothing, mask=is_surplus)
    tl.store(positions + stretch, nothing, mask=is_surplus)
    tl.store(input_ids + stretch, nothing, mask=is_surplus)
    tl.store(slots + stretch, nothing, mask=is_surplus)
