"""TETRIS's selection in one launch."""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from tetris_sglang.kernels.checks import check_device, check_tensor
from tetris_sglang.selection import fill_capacity

# One program keeps the whole batch in registers: at most 64 survivals for each of its at most 512 threads
# (1024 threads get half the registers each, and some spill).
LARGEST_BATCH_TOKENS = 2**15
LARGEST_MAX_DRAFT = 64

_SMALLEST_SURVIVAL_BITS = tl.constexpr(0x00800000)


def select_drafts(survival: Tensor, capacity_tokens: int, weights: Tensor | None = None) -> Tensor:
    """Choose the draft tokens of the whole batch that are most likely to survive verification.

    TETRIS (arXiv:2502.15197), Algorithm 1. Exactly `fill_capacity(survival, capacity_tokens, weights)`, ties included.

    What is ranked is positive float32, so bit patterns order as integers do. The threshold, the C-th
    largest of the batch, is found bit by bit: 30 counts over registers. Above it everything is
    selected; the tokens equal to it follow by depth, then by request.

    A batch too large for one program's registers (the batch, rounded up to a power of two, times max_draft
    above LARGEST_BATCH_TOKENS, or max_draft above LARGEST_MAX_DRAFT) goes through the torch functions above:
    some ten launches.

    Args:
        survival: [batch, max_draft] float32 in [0, 1], contiguous, no NaN, non-increasing along dim 1: of chains, or of
            trees in the order of `Proposal`.
        capacity_tokens: draft tokens over the whole batch, roots excluded.
        weights: [batch] float32 in [0, 1]; default: 1.
    Returns:
        draft_lens: [batch] int32, sum = capacity_tokens, or all drafts of the requests with a weight above 0 if those are
            fewer.
    Raises:
        ValueError: wrong shapes, dtypes or devices, or capacity_tokens < 0.
    Sync: none; CUDA-graph safe.
    Example: [[.9, .8], [.5, .1]], 3 -> [2, 1]
    """
    check_device(survival)
    if survival.ndim != 2:
        raise ValueError(f"survival must be [batch, max_draft], got shape {list(survival.shape)}")
    batch, max_draft = survival.shape
    check_tensor("survival", survival, (batch, max_draft), (torch.float32,), survival)
    if capacity_tokens < 0:
        raise ValueError(f"capacity_tokens must be >= 0, got {capacity_tokens}")
    if weights is not None:
        check_tensor("weights", weights, (batch,), (torch.float32,), survival)

    if survival.numel() == 0:
        return torch.zeros(batch, dtype=torch.int32, device=survival.device)
    if not fits_one_launch(batch, max_draft):
        return fill_capacity(survival, capacity_tokens, weights)
    draft_lens = torch.empty(batch, dtype=torch.int32, device=survival.device)
    block, num_warps = plan_launch(batch, max_draft)
    select_kernel[(1,)](
        survival,
        min(capacity_tokens, batch * max_draft),  # an int32
        survival if weights is None else weights,
        draft_lens,
        batch,
        MAX_DRAFT=max_draft,
        DEPTH_BITS=max_draft.bit_length(),
        BLOCK=block,
        HAS_WEIGHTS=weights is not None,
        num_warps=num_warps,
    )
    return draft_lens


def fits_one_launch(batch: int, max_draft: int) -> bool:
    """Whether `select_drafts` runs as one kernel, or else in torch."""
    block, _ = plan_launch(batch, max_draft)
    return block * max_draft <= LARGEST_BATCH_TOKENS and max_draft <= LARGEST_MAX_DRAFT


@functools.cache  # on the path of every step
def plan_launch(batch: int, max_draft: int) -> tuple[int, int]:
    """The program's requests (a power of two) and warps: about 16 survivals per thread, none without."""
    block = max(32, triton.next_power_of_2(batch))
    num_warps = triton.next_power_of_2(block * max_draft) // (32 * 16)
    return block, max(1, min(num_warps, block // 32, 16))


@triton.jit(do_not_specialize=["capacity_tokens", "batch"])
def select_kernel(
    survival,
    capacity_tokens,
    weights,
    draft_lens,
    batch,
    MAX_DRAFT: tl.constexpr,
    DEPTH_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
):
    requests = tl.arange(0, BLOCK)
    is_request = requests < batch
    # A request without a weight has no tokens, as if it were none.
    has_tokens = is_request
    if HAS_WEIGHTS:
        weight = tl.load(weights + requests, mask=is_request, other=0.0)
        has_tokens = weight > 0
    max_tokens = tl.sum(has_tokens.to(tl.int32)) * MAX_DRAFT
    capacity = tl.minimum(capacity_tokens, max_tokens).to(tl.int32)

    # One vector per depth, all in the same layout: whatever follows is elementwise but for the counts.
    worth_bits = ()
    for depth in tl.static_range(MAX_DRAFT):
        worth = tl.load(survival + requests * MAX_DRAFT + depth, mask=is_request, other=0.0)
        if HAS_WEIGHTS:
            worth *= weight
        bits = worth.to(tl.int32, bitcast=True)
        bits = tl.where(has_tokens, tl.maximum(bits, _SMALLEST_SURVIVAL_BITS), 0)
        worth_bits += (bits,)

    # The largest threshold that `capacity` tokens reach. The bits of 1.0, the largest survival, are below
    # 2**30; with a capacity of 0 every count suffices, and the threshold ends above all of them.
    threshold = 0
    for bit in range(29, -1, -1):
        trial = threshold | (1 << bit)
        reaching = tl.sum(_count_reaching(worth_bits, trial, MAX_DRAFT))
        threshold = tl.where(reaching >= capacity, trial, threshold)

    # What is ranked never rises along a chain: request r's tokens above the threshold are its first fewest[r],
    # those equal to it the next ones up to most[r]. Find the largest depth above which all equal ones fit.
    fewest = _count_reaching(worth_bits, threshold + 1, MAX_DRAFT)
    most = _count_reaching(worth_bits, threshold, MAX_DRAFT)
    full_depth = 0
    for bit in range(DEPTH_BITS - 1, -1, -1):
        trial = full_depth | (1 << bit)
        fitting = tl.sum(tl.minimum(tl.maximum(fewest, trial), most))
        full_depth = tl.where(fitting <= capacity, trial, full_depth)

    # At that depth the lower requests come first.
    lens = tl.minimum(tl.maximum(fewest, full_depth), most)
    next_equal = tl.minimum(tl.maximum(fewest, full_depth + 1), most) - lens
    lens += tl.where(tl.cumsum(next_equal, 0) <= capacity - tl.sum(lens), next_equal, 0)
    tl.store(draft_lens + requests, lens, mask=is_request)


@triton.jit
def _count_reaching(worth_bits, threshold, MAX_DRAFT: tl.constexpr):
    """Per request, the tokens that reach the threshold."""
    count = (worth_bits[0] >= threshold).to(tl.int32)
    for depth in tl.static_range(1, MAX_DRAFT):
        count += (worth_bits[depth] >= threshold).to(tl.int32)
    return count
