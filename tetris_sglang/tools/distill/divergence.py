"""How far a draft's law is from the target's: what training can lessen (DistillSpec, arXiv:2310.08461, section 4.2).

All take p [rows, tokens], the target's probabilities, and log_q [rows, tokens], the draft's logarithms, which sum to 1 where p
may sum to less: a draft with a vocabulary of its own never says the rest. All return [rows] float32, 0 where the laws are the
same.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_TINY = torch.finfo(torch.float32).tiny


def forward_kl(p: Tensor, log_q: Tensor) -> Tensor:
    """The draft covers whatever the target may say. Its gradient is that of the cross-entropy."""
    return (p * (_log(p) - log_q)).sum(-1)


def reverse_kl(p: Tensor, log_q: Tensor) -> Tensor:
    """The draft says nothing that the target would not."""
    return (log_q.exp() * (log_q - _log(p))).sum(-1)


def jensen_shannon(p: Tensor, log_q: Tensor) -> Tensor:
    """The mean of both, each to the mixture of the two laws."""
    log_mixture = _log((p + log_q.exp()) / 2)
    rest = (1 - p.sum(-1)).clamp(min=0)  # of it the mixture has half
    to_mixture = (p * (_log(p) - log_mixture)).sum(-1) + rest * torch.log(torch.tensor(2.0))
    return (to_mixture + (log_q.exp() * (log_q - log_mixture)).sum(-1)) / 2


def total_variation(p: Tensor, log_q: Tensor) -> Tensor:
    """The share of drafts that rejection sampling rejects."""
    return 1 - torch.minimum(p, log_q.exp()).sum(-1)


def disagreement(p: Tensor, log_q: Tensor) -> Tensor:
    """The share of drafts that acceptance by shared noise rejects, which is what TETRIS serves with (`acceptance/noise.py`).

    Both draw the first of exponential arrivals at rates p and q; they agree with probability
    sum_t 1 / sum_s max(p_s / p_t, q_s / q_t) (arXiv:2408.07978). In the order of q / p each inner sum has p's up to t, and q's
    after it.
    """
    q = log_q.exp()
    order = (q / p.clamp(min=_TINY)).detach().argsort(dim=-1)
    p, q = p.gather(-1, order), q.gather(-1, order)
    rest = (1 - p.sum(-1, keepdim=True)).clamp(min=0)
    up_to = rest + p.cumsum(-1)
    after = q.flip(-1).cumsum(-1).flip(-1) - q
    return 1 - (p * q / (up_to * q + after * p).clamp(min=_TINY)).sum(-1)


DIVERGENCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "forward-kl": forward_kl,
    "reverse-kl": reverse_kl,
    "jensen-shannon": jensen_shannon,
    "total-variation": total_variation,
    "disagreement": disagreement,
}


def agreement_on(p: Tensor, q: Tensor, columns: Tensor) -> Tensor:
    """The chance that the draft draws the target's own token, which is known, with the noise that it was drawn with.

    Args:
        p, q: [rows, tokens]; p may sum to less than 1, see above. columns: [rows] int64, of the target's tokens.
    Returns:
        [rows] float32; 0 where the draft cannot say the token.
    Example: p [.5, .5], q [1, 0] -> 1 for column 0, whose share it is; 0 for column 1
    """
    own_p, own_q = p.gather(-1, columns[:, None]), q.gather(-1, columns[:, None])
    # max(p_s / p_t, q_s / q_t) is the first one where q_s p_t <= p_s q_t.
    is_first = q * own_p <= p * own_q
    first = (p * is_first).sum(-1, keepdim=True) + (1 - p.sum(-1, keepdim=True)).clamp(min=0)
    second = (q * ~is_first).sum(-1, keepdim=True)
    chance = own_q / (first * own_q + second * own_p).clamp(min=_TINY)
    return torch.where(own_q > 0, chance, 0.0).squeeze(-1).clamp(max=1)


def _log(p: Tensor) -> Tensor:
    return p.clamp(min=_TINY).log()
