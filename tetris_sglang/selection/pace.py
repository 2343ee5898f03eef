"""Weights for requests that have been slow so far.

TETRIS verifies what most likely survives, wherever it is, so that a step emits the most tokens. Requests that are hard to
draft for get little of it, and take long. The remedy is the one of proportional-fair schedulers (F. Kelly: Charging and rate
control for elastic traffic, 1997; a as in J. Mo, J. Walrand: Fair end-to-end window-based congestion control, 2000): a
token counts by what it adds to the sum over requests of

    U(x) = x^(1 - a) / (1 - a)        (log x for a = 1),

x the tokens that the request has been emitting per step that verified drafts: its survivals are multiplied with x^-a. One
weight for all of a request's tokens, so the choice stays prefix-closed, and a request that is fast because it is in a stretch
that repeats itself keeps that stretch. a = 0 is TETRIS as the paper has it.
"""

import torch
from torch import Tensor

LARGEST_PACE_WEIGHT = 8.0
PRIOR_STEPS = 4.0
"""At the mean pace, before a request's first."""
MEMORY_STEPS = 256.0
"""Of a request, after which older ones fade."""
MEAN_DECAY = 0.98
"""What the mean over all requests keeps of its weight with each step."""


class RequestPace:
    """Tokens per speculative step that every running request has emitted, and what follows for its drafts.

    Args:
        num_slots: request slots. fairness: a, above 0.
    Raises:
        ValueError: a setting out of range.
    """

    def __init__(self, num_slots: int, fairness: float, device: torch.device | str = "cpu") -> None:
        if num_slots < 1 or not fairness > 0:
            raise ValueError(f"num_slots and fairness must be above 0, got {num_slots} and {fairness}")
        self.fairness = fairness
        self._sums = torch.zeros(2, num_slots, device=device)
        """Tokens emitted, and steps."""
        self._all = torch.ones(2, 1, device=device)
        """The same of all requests, lately."""

    def forget(self, rows: Tensor) -> None:
        """These slots [n] belong to new requests. Sync: none."""
        self._sums.index_fill_(1, rows, 0)

    def weights(self, rows: Tensor) -> Tensor:
        """What to multiply the survivals of the requests in these slots [batch] with: float32, 1 at the mean pace.

        Sync: none; CUDA-graph safe: what it reads is updated in place.
        """
        mean = self._all[0] / self._all[1]
        emitted, steps = self._sums.index_select(1, rows).unbind()
        pace = (emitted + PRIOR_STEPS * mean) / (steps + PRIOR_STEPS)
        return (mean / pace).pow_(self.fairness).clamp_(1 / LARGEST_PACE_WEIGHT, LARGEST_PACE_WEIGHT)

    def observe(self, rows: Tensor, emitted: Tensor) -> None:
        """Count a step.

        Args:
            rows: [batch] the requests' slots, all different. emitted: [batch] integers, tokens of each, the bonus token
                included; 0: no request.
        Sync: none; CUDA-graph safe.
        """
        step = torch.stack((emitted, emitted > 0)).float()
        # Where nobody is a request, nothing fades.
        self._all.mul_(MEAN_DECAY ** step[1].amax()).add_(step.sum(dim=1, keepdim=True))
        sums = self._sums.index_select(1, rows).mul_(1 - 1 / MEMORY_STEPS).add_(step)
        self._sums.index_copy_(1, rows, sums)
