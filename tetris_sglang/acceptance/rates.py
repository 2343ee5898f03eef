"""How often the next token is a draft's, rule by rule, for known laws of target and draft; and the most possible.

All take p (the target's) and q (the draft's) [n, vocab] float64, rows that sum to 1, and return [n] float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tetris_sglang.acceptance.noise import exponentials


def rejection(p: Tensor, q: Tensor) -> Tensor:
    """One draft, rejection sampling: what overlaps. No rule accepts more of one draft from q."""
    return torch.minimum(p, q).sum(dim=1)


def recursion(p: Tensor, q: Tensor) -> Tensor:
    """Two drafts without replacement, recursive rejection (`acceptance/recursive.py`)."""
    overlap = torch.minimum(p, q)
    first = overlap.sum(dim=1)
    left = _normalise(p - overlap)
    rejected = q - overlap
    second = torch.zeros_like(first)
    # The tokens that are ever rejected, most of a row's mass among a few.
    for column in range(q.shape[1]):
        others = q.clone()
        others[:, column] = 0
        second += rejected[:, column] * torch.minimum(left, _normalise(others)).sum(dim=1)
    return first + second


def coupled(p: Tensor, q: Tensor, num_drafts: int, num_draws: int = 2000, seed: int = 0) -> Tensor:
    """The first `num_drafts` of the draft's race over the noise that the target draws with (`acceptance/noise.py`): by
    simulation, with a standard error of at most 0.5 / sqrt(num_draws)."""
    found = torch.zeros(len(p), dtype=torch.float64)
    tokens, rows = torch.arange(p.shape[1]), torch.arange(len(p))
    for draw in range(num_draws):
        arrivals = exponentials(torch.full_like(rows, seed), rows * num_draws + draw, tokens).double()
        target = (p / arrivals).argmax(dim=1, keepdim=True)
        found += ((q / arrivals).topk(num_drafts, dim=1).indices == target).any(dim=1)
    return found / num_draws


def best(p: Tensor, q: Tensor, num_drafts: int, *, with_replacement: bool) -> Tensor:
    """The most that any rule accepts of drafts drawn from q, independently or (of two) without replacement.

    By duality (Hu et al., "Towards Optimal Multi-draft Speculative Decoding", arXiv:2502.18779) it is the minimum over sets H
    of tokens of p(H) + 1 - P(all drafts are in H), reached by the tokens with the largest q / p.

    Raises:
        ValueError: more than two drafts without replacement.
    """
    if not with_replacement and num_drafts != 2:
        raise ValueError(f"without replacement two drafts are known here, not {num_drafts}")
    order = (q / p.clamp(min=torch.finfo(p.dtype).tiny)).argsort(dim=1, descending=True)
    inside_p, inside_q = p.gather(1, order).cumsum(dim=1), q.gather(1, order)
    all_inside = inside_q.cumsum(dim=1) ** num_drafts
    if not with_replacement:
        # The second draft is x with q(x) / (1 - q(first)).
        share = inside_q / (1 - inside_q).clamp(min=torch.finfo(p.dtype).tiny)
        all_inside = inside_q.cumsum(dim=1) * share.cumsum(dim=1) - (inside_q * share).cumsum(dim=1)
    return (inside_p + 1 - all_inside).amin(dim=1).clamp(max=1)


def _normalise(weights: Tensor) -> Tensor:
    return weights / weights.sum(dim=1, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)
