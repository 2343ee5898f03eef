"""Drawing the target's own token for every verified row."""

import torch
from torch import Tensor


def sample_rows(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Draw one token per row by inverse CDF; a token of probability 0 is never drawn.

    Rows need not sum to 1: a row filtered by top-k, top-p or min-p is drawn from as if renormalised.

    Args:
        probs: [rows, vocab] floats, finite and >= 0, each row with a positive sum.
        uniforms: [rows] float64 in [0, 1); float32 is too coarse for tokens below about 1e-6.
    Returns:
        tokens: [rows] int64, on the same device.
    Raises:
        ValueError: shapes or dtypes that do not fit.
    Sync: none; CUDA-graph safe.
    Example: probs [[.2, 0, .8]], uniforms [.1] -> [0]; [.3] -> [2]
    """
    if probs.ndim != 2 or uniforms.shape != probs.shape[:1] or uniforms.dtype != torch.float64:
        raise ValueError(
            f"probs [rows, vocab] need float64 uniforms [rows], got {tuple(probs.shape)} and "
            f"{uniforms.dtype} {tuple(uniforms.shape)}"
        )
    cdf = probs.cumsum(dim=1, dtype=torch.float64)
    thresholds = uniforms[:, None] * cdf[:, -1:]
    # The first token whose CDF exceeds the threshold has itself raised the CDF: its probability is positive.
    tokens = torch.searchsorted(cdf, thresholds, right=True).clamp_(max=probs.shape[1] - 1)
    # Except where rounding interferes: a device's parallel scan may wobble between equal sums, and a
    # subnormal total swallows a uniform next to 1. Those draws (one in 1e16) go to the mode.
    drawable = probs.gather(1, tokens) > 0
    return torch.where(drawable, tokens, probs.argmax(dim=1, keepdim=True)).squeeze(1)
