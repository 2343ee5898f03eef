"""TETRIS's selection for a whole batch at once: one stable sort instead of a heap."""

from collections.abc import Callable

import torch
from torch import Tensor

from tetris_sglang.selection.survival import SMALLEST_SURVIVAL


def select_prefixes(survival: Tensor, capacity_tokens: int, max_draft_lens: Tensor | None = None) -> Tensor:
    """Choose the per-request draft prefixes that maximise the expected number of accepted tokens.

    TETRIS (arXiv:2502.15197), Algorithm 1. Survival never rises along a request, so the `capacity_tokens`
    largest of the whole batch are prefixes already, provided that ties go to the shallower token. Further
    ties go to the lower request. A token of survival 0 is left out even when capacity remains. Equal to
    `select_prefixes_reference`, ties included.

    Args:
        survival: [batch, max_draft] float32 in [0, 1], no NaN, non-increasing along dim 1, as
            `survival_from_probs` gives it.
        capacity_tokens: draft tokens over the whole batch, roots excluded.
        max_draft_lens: [batch] integers, the most draft tokens each request may verify; default: no limit.
    Returns:
        draft_lens: [batch] int32, sum <= capacity_tokens, on the same device.
    Raises:
        ValueError: wrong shapes or dtypes, or capacity_tokens < 0.
    Sync: none; CUDA-graph safe.
    Example: [[.9, .8], [.5, .1]], 3 -> [2, 1]
    """
    if survival.ndim != 2 or not survival.is_floating_point():
        raise ValueError(f"survival must be floats [batch, max_draft], got {survival.dtype} {tuple(survival.shape)}")
    batch, max_draft = survival.shape
    device = survival.device
    if max_draft_lens is not None:
        if max_draft_lens.shape != (batch,):
            raise ValueError(f"max_draft_lens must be [{batch}], got shape {tuple(max_draft_lens.shape)}")
        within = torch.arange(max_draft, device=device) < max_draft_lens[:, None]
        survival = survival.where(within, 0.0)

    # Depth-major and stable: at equal survival the shallower token precedes, then the lower request.
    ranked, order = survival.t().flatten().sort(descending=True, stable=True)
    if capacity_tokens < 0:
        raise ValueError(f"capacity_tokens must be >= 0, got {capacity_tokens}")
    order, selected = order[:capacity_tokens], ranked[:capacity_tokens] > 0

    # Each token is written once, so no atomics decide anything; unranked ones stay False.
    chosen = torch.zeros(max_draft * batch, dtype=torch.bool, device=device).scatter_(0, order, selected)
    return chosen.view(max_draft, batch).sum(dim=0, dtype=torch.int32)


def fill_capacity(
    survival: Tensor,
    capacity_tokens: int,
    weights: Tensor | None = None,
    select: Callable[..., Tensor] = select_prefixes,
) -> Tensor:
    """Select so that the number of tokens is known without a sync: whatever the survivals, the capacity is filled.

    Args:
        survival: as for `select_prefixes`.
        weights: [batch] float32 in [0, 1], what each request's survivals are multiplied with: one factor, so what was ordered
            within a request still is. Default: 1.
        select: `select_prefixes`, or a baseline.
    Returns:
        draft_lens: [batch] int32, sum = capacity_tokens, or all drafts of the requests with a weight above 0 if those are
            fewer.
    Sync: none; CUDA-graph safe.
    Example: [[.9, .8], [.5, 0]], 3, weights [.5, 1] -> [2, 1]
    """
    max_draft_lens = None
    if weights is not None:
        survival = survival * weights[:, None]
        # A weight of 0 is not enough: what is lifted is chosen.
        max_draft_lens = (weights > 0) * survival.shape[1]
    return select(survival.clamp(min=SMALLEST_SURVIVAL), capacity_tokens, max_draft_lens)
