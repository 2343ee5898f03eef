"""How likely each draft token is to be accepted, with everything before it."""

import torch
from torch import Tensor

# Selection must fill its capacity, so that the host knows the number of verified tokens without a sync: serving lifts
# survivals to this, so that one that underflows to 0 is still selectable, after every other.
SMALLEST_SURVIVAL = torch.finfo(torch.float32).tiny


def survival_from_probs(probs: Tensor) -> Tensor:
    """Multiply the draft's probabilities of its own tokens along each chain.

    survival[r, j] = prod_{i <= j} probs[r, i], TETRIS's surrogate (arXiv:2502.15197) for the
    probability that request r's first j + 1 draft tokens are all accepted.

    Probabilities outside [0, 1] (softmax rounding) are clamped. A NaN counts as 0: it says nothing about its
    token, and neither that token nor any behind it is ever selected.

    Args:
        probs: [batch, max_draft], any float dtype.
    Returns:
        survival: [batch, max_draft] float32 in [0, 1], non-increasing along dim 1, on the same device.
    Raises:
        ValueError: probs is not two-dimensional.
    Sync: none; CUDA-graph safe.
    Example: [[.9, .5, nan]] -> [[.9, .45, 0]]
    """
    if probs.ndim != 2:
        raise ValueError(f"probs must be [batch, max_draft], got shape {tuple(probs.shape)}")
    # A device may multiply in any order, so rounding could lift a token above its parent: cummin forbids it.
    return as_probability(probs).cumprod(dim=1).cummin(dim=1).values


def as_probability(probs: Tensor) -> Tensor:
    """As float32 in [0, 1]: softmax rounding is clamped, and a NaN, which says nothing about its token, is 0."""
    return probs.float().nan_to_num(nan=0.0).clamp(0.0, 1.0)
