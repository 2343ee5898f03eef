"""What a kind of evidence about a drafted token is worth: an offset in log-odds for each kind, learnt online.

Of two tokens with the same score at the same depth, the one that something else speaks for is the likelier one (for example
a match in a recent text, texts/match.py). With p the probability including the offset so far, every
judged token of a kind moves that kind's offset by

    (accepted - p) / precision,    precision = 1 + sum of p (1 - p) over this kind's tokens so far

a Newton step of a logistic regression's intercept with a Gaussian prior of deviation 1, one after the other (an extended Kalman
filter of one number per kind). Older tokens fade from the precision, so it keeps learning.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_LARGEST_OFFSET = 6.0


class EvidenceOffsets:
    """The offset of every kind.

    Args:
        initial: [kinds], each offset before anything was seen.
        decay: what a judged token keeps of its weight with each later one, of whatever kind, in (0, 1].
    Raises:
        ValueError: a setting out of range.
    """

    def __init__(self, initial: Sequence[float], device: torch.device | str = "cpu", decay: float = 0.9999) -> None:
        if not initial or not 0 < decay <= 1:
            raise ValueError(f"there must be kinds, and decay be in (0, 1], got {initial} and {decay}")
        self._decay = torch.tensor(decay, dtype=torch.float64, device=device)
        self._information = torch.zeros(len(initial), dtype=torch.float64, device=device)
        """Of p (1 - p)."""
        self._initial = torch.tensor(initial, dtype=torch.float32, device=device)
        self._offsets = self._initial.clone()

    def offsets(self, kinds: Tensor) -> Tensor:
        """What to add to the log-odds of tokens with evidence of these kinds: int64 -> float32 of the same shape.

        Sync: none; CUDA-graph safe: what it reads is updated in place.
        """
        return torch.nn.functional.embedding(kinds, self._offsets[:, None]).squeeze(-1)

    def observe(self, kinds: Tensor, probs: Tensor, reached: Tensor, accepted: Tensor) -> None:
        """Count a step.

        Args:
            kinds: [batch, n] int64.
            probs: [batch, n] float32, calibrated, with these offsets.
            reached, accepted: [batch, n] bool, see `Outcomes`.
        Sync: none.
        """
        gradient, curvature = accepted.to(probs.dtype) - probs, probs - probs * probs
        judged = torch.stack((gradient, curvature)).mul_(reached).flatten(1)
        sums = torch.zeros(2, len(self._offsets), dtype=torch.float64, device=probs.device)
        surprise, information = sums.index_add_(1, kinds.flatten(), judged.double())
        self._information.mul_(self._decay ** reached.sum()).add_(information)
        self._offsets.add_(surprise / (self._information + 1))
        self._offsets.clamp_(-_LARGEST_OFFSET, _LARGEST_OFFSET)

    def forget(self) -> None:
        """Begin anew; in place, as graphs read it."""
        self._information.zero_()
        self._offsets.copy_(self._initial)

    def summarise(self) -> list[float]:
        """The offset of every kind. Sync: copies to the host."""
        return self._offsets.tolist()
