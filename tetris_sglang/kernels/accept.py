"""Ragged acceptance, and the packed target tokens back in their grid, in one launch."""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from tetris_sglang.kernels.checks import INT32, INT64, INTEGERS, check_device, check_tensor
from tetris_sglang.packing import AcceptedTokens

_BLOCK_REQUESTS = 16


def accept_rows(
    target_tokens: Tensor,
    qo_indptr: Tensor,
    candidates: Tensor,
    seq_lens: Tensor,
    parents: Tensor | None = None,
    max_depth: int = 0,
) -> AcceptedTokens:
    """Accept each request's longest verified draft prefix, or path of a tree, that equals the target's own tokens.

    The rule of `tetris_sglang.acceptance.accept_chain` and `accept_tree`, greedy or sampled, on packed rows.

    Args:
        target_tokens: [num_tokens] int32 or int64, the target's token after each packed row; surplus rows at
            the end are not read.
        qo_indptr: [batch + 1] int32, where each request's rows begin, as `pack_rows` gives it; 1 to width
            rows each.
        candidates: [batch, width] int64, roots and drafts.
        seq_lens: [batch] int32 or int64, tokens with KV before this step.
        parents: [batch, width] int64 of trees, as in `TreeShape`; None: chains. max_depth: of any node of them.
    Returns:
        AcceptedTokens; beyond a tree's accepted path target_tokens has 0.
    Raises:
        ValueError: wrong shapes, dtypes or devices.
    Sync: none; CUDA-graph safe.
    Example: candidates [[7, 1, 2], [8, 3, 4]], qo_indptr [0, 3, 4], target_tokens [1, 5, 6, 3],
        seq_lens [10, 20]
        -> num_accepted [1, 0], bonus_tokens [5, 3], last_tokens [1, 8], new_seq_lens [12, 21],
        target_tokens [[1, 5, 6], [3, 0, 0]]: request 1's draft 3 was not selected.
    """
    check_device(candidates)
    if candidates.ndim != 2 or target_tokens.ndim != 1:
        raise ValueError(
            f"candidates must be [batch, width] and target_tokens [num_tokens], got {list(candidates.shape)} "
            f"and {list(target_tokens.shape)}"
        )
    batch, width = candidates.shape
    check_tensor("candidates", candidates, (batch, width), INT64, candidates)
    check_tensor("target_tokens", target_tokens, tuple(target_tokens.shape), INTEGERS, candidates)
    check_tensor("qo_indptr", qo_indptr, (batch + 1,), INT32, candidates)
    check_tensor("seq_lens", seq_lens, (batch,), INTEGERS, candidates)
    accepted = AcceptedTokens(
        num_accepted=qo_indptr.new_empty(batch),
        bonus_tokens=candidates.new_empty(batch),
        last_tokens=candidates.new_empty(batch),
        new_seq_lens=torch.empty_like(seq_lens),
        target_tokens=torch.empty_like(candidates),
        path=None if parents is None else candidates.new_empty((batch, max_depth + 1)),
    )
    if batch > 0 and parents is not None:
        check_tensor("parents", parents, (batch, width), INT64, candidates)
        accept_tree_kernel[(batch,)](
            target_tokens,
            qo_indptr,
            candidates,
            seq_lens,
            parents,
            *accepted,
            width,
            max_depth,
            WIDTH_BLOCK=triton.next_power_of_2(width),
        )
    elif batch > 0:
        programs, width_block = _plan_launch(batch, width)
        accept_kernel[(programs,)](
            target_tokens,
            qo_indptr,
            candidates,
            seq_lens,
            *accepted[:-1],  # a chain's path is no tensor
            batch,
            width,
            BLOCK=_BLOCK_REQUESTS,
            WIDTH_BLOCK=width_block,
        )
    return accepted


@functools.cache  # on the path of every step
def _plan_launch(batch: int, width: int) -> tuple[int, int]:
    return triton.cdiv(batch, _BLOCK_REQUESTS), triton.next_power_of_2(width)


@triton.jit(do_not_specialize=["batch", "width"])
def accept_kernel(
    packed_tokens,
    qo_indptr,
    candidates,
    seq_lens,
    num_accepted,
    bonus_tokens,
    last_tokens,
    new_seq_lens,
    target_tokens,
    batch,
    width,
    BLOCK: tl.constexpr,
    WIDTH_BLOCK: tl.constexpr,
):
    requests = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_request = requests < batch
    starts = tl.load(qo_indptr + requests, mask=is_request, other=0)
    verify_lens = tl.load(qo_indptr + requests + 1, mask=is_request, other=0) - starts

    columns = tl.arange(0, WIDTH_BLOCK)[None, :]
    cells = requests[:, None] * width + columns
    is_row = columns < verify_lens[:, None]
    is_draft = columns + 1 < verify_lens[:, None]
    tokens = tl.load(packed_tokens + starts[:, None] + columns, mask=is_row, other=0).to(tl.int64)
    drafts = tl.load(candidates + cells + 1, mask=is_draft, other=0)
    tl.store(target_tokens + cells, tokens, mask=is_request[:, None] & (columns < width))

    # A request's last row verifies no draft, so a first column without a match always exists.
    matches = is_draft & (drafts == tokens)
    lens = tl.min(tl.where(matches, WIDTH_BLOCK, columns), axis=1)
    bonus = tl.load(packed_tokens + starts + lens, mask=is_request, other=0).to(tl.int64)
    last = tl.load(candidates + requests * width + lens, mask=is_request, other=0)
    old_seq_lens = tl.load(seq_lens + requests, mask=is_request, other=0)
    tl.store(num_accepted + requests, lens, mask=is_request)
    tl.store(bonus_tokens + requests, bonus, mask=is_request)
    tl.store(last_tokens + requests, last, mask=is_request)
    tl.store(new_seq_lens + requests, old_seq_lens + lens + 1, mask=is_request)


@triton.jit(do_not_specialize=["width", "max_depth"])
def accept_tree_kernel(
    packed_tokens,
    qo_indptr,
    candidates,
    seq_lens,
    parents,
    num_accepted,
    bonus_tokens,
    last_tokens,
    new_seq_lens,
    target_tokens,
    path,
    width,
    max_depth,
    WIDTH_BLOCK: tl.constexpr,
):
    request = tl.program_id(0)
    start = tl.load(qo_indptr + request)
    verify_len = tl.load(qo_indptr + request + 1) - start
    columns = tl.arange(0, WIDTH_BLOCK)
    is_draft = (columns > 0) & (columns < verify_len)
    drafts = tl.load(candidates + request * width + columns, mask=is_draft, other=0)
    above = tl.load(parents + request * width + columns, mask=is_draft, other=-1).to(tl.int32)

    at = start * 0
    length = at
    bonus = tl.load(packed_tokens + start).to(tl.int64)
    emitted = tl.where(columns == 0, bonus, 0)
    taken = tl.where(columns == 0, 0, width - 1)
    for depth in range(1, max_depth + 1):
        # Siblings differ, so at most one is the target's own token; nothing hangs below the end of a path.
        is_next = is_draft & (above == at) & (drafts == bonus)
        found = tl.min(tl.where(is_next, columns, WIDTH_BLOCK), axis=0)
        goes_on = (found < WIDTH_BLOCK) & (length == depth - 1)
        at = tl.where(goes_on, found, at)
        length = tl.where(goes_on, depth, length)
        bonus = tl.load(packed_tokens + start + at).to(tl.int64)
        is_here = (columns == depth) & goes_on
        emitted = tl.where(is_here, bonus, emitted)
        taken = tl.where(is_here, at, taken)
    tl.store(target_tokens + request * width + columns, emitted, mask=columns < width)
    tl.store(path + request * (max_depth + 1) + columns, taken.to(tl.int64), mask=columns <= max_depth)
    old_seq_len = tl.load(seq_lens + request)
    tl.store(num_accepted + request, length)
    tl.store(bonus_tokens + request, bonus)
    tl.store(last_tokens + request, tl.load(candidates + request * width + at))
    tl.store(new_seq_lens + request, old_seq_len + length + 1)
