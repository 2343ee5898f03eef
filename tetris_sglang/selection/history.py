"""How well a draft suits each running request: what its scores alone do not say.

Of two tokens with the same score at the same depth, the one in the request whose drafts were accepted so far is the
likelier one. So each request has an offset, which is added to its tokens' calibrated log-odds:

    offset = gain * sum(accepted - p) / (sum(p (1 - p)) + 1 / deviation^2)

The sums run over the drafts that the target has judged in the request's earlier steps, p is their calibrated
probability, and older steps fade. The fraction is one Newton step from 0 towards the most likely intercept of this request in a
logistic regression, if such intercepts have that deviation. The gain is the same step for how much these
fractions were worth, over all requests: near 0 where a request's past says nothing about its future, as when the
target samples at a high temperature.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tetris_sglang.selection.calibration import newton_terms

_LARGEST_GAIN = 1.5


class AcceptanceHistory:
    """The offset of every request slot.

    Only earlier steps enter.

    Args:
        num_slots: request slots.
        deviation: of requests' intercepts, in log-odds, above 0.
        step_decay: what a step's evidence keeps of its weight with each later step that drafts, in (0, 1]. A request
            whose offset leaves it without drafts is so given some again.
        gain_decay: what evidence for the gain keeps of its weight with each later draft judged, in (0, 1].
        gain_prior: evidence for a gain of 1, in units of sum(offset^2 p (1 - p)), above 0.
    Raises:
        ValueError: a setting out of range.
    """

    def __init__(
        self,
        num_slots: int,
        device: torch.device | str = "cpu",
        deviation: float = 0.8,
        step_decay: float = 0.9,
        gain_decay: float = 0.9999,
        gain_prior: float = 2.0,
    ) -> None:
        if num_slots < 1 or not deviation > 0 or not gain_prior > 0:
            raise ValueError(
                f"num_slots, deviation and gain_prior must be above 0, got {num_slots}, {deviation} and {gain_prior}"
            )
        if not (0 < step_decay <= 1 and 0 < gain_decay <= 1):
            raise ValueError(f"decays must be in (0, 1], got {step_decay} and {gain_decay}")
        self.num_slots = num_slots
        self._least_information, self._gain_prior = deviation**-2, gain_prior
        self._step_decay = step_decay
        self._gain_decay = torch.tensor(gain_decay, dtype=torch.float64, device=device)
        self._sums = torch.zeros(2, num_slots, device=device)
        """Of accepted - p, and of p (1 - p)."""
        self._intercepts = torch.zeros(num_slots, device=device)
        """The fractions."""
        self._gain_sums = torch.zeros(2, dtype=torch.float64, device=device)
        """Of intercept * (accepted - p), and of intercept^2 p (1 - p)."""
        self._gain = torch.ones((), device=device)

    def forget(self, rows: Tensor) -> None:
        """These slots [n] belong to new requests. Sync: none."""
        self._sums.index_fill_(1, rows, 0)
        self._intercepts.index_fill_(0, rows, 0)

    def offsets(self, rows: Tensor) -> Tensor:
        """What to add to the log-odds of the requests in these slots [batch], float32.

        Sync: none; CUDA-graph safe: what it reads is updated in place.
        """
        return self._intercepts.index_select(0, rows) * self._gain

    def observe(self, rows: Tensor, probs: Tensor, reached: Tensor, accepted: Tensor) -> None:
        """Count a step.

        Args:
            rows: [batch] the requests' slots, all different.
            probs: [batch, n] float32, calibrated, without offsets.
            reached, accepted: [batch, n] bool, see `Outcomes`.
        Sync: none.
        """
        # Few operations: there is one small tensor to a step, so each costs what it takes to launch.
        evidence = newton_terms(probs, reached, accepted).sum(dim=2)

        intercepts = self._intercepts.index_select(0, rows)
        worth = (evidence * torch.stack((intercepts, intercepts * intercepts))).sum(dim=1)
        self._gain_sums.mul_(self._gain_decay ** reached.sum()).add_(worth)
        over, under = (self._gain_sums + self._gain_prior).unbind()
        torch.div(over, under, out=self._gain).clamp_(0, _LARGEST_GAIN)

        sums = self._sums.index_select(1, rows).mul_(self._step_decay).add_(evidence)
        self._sums.index_copy_(1, rows, sums)
        self._intercepts.index_copy_(0, rows, sums[0] / (sums[1] + self._least_information))

    @property
    def gain(self) -> float:
        """Sync: copies to the host."""
        return float(self._gain)
