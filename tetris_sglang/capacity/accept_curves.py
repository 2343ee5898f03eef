"""How many drafts a step can expect to have accepted, by depth and capacity, from the survivals of earlier steps."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def capacity_shares(max_nodes: int) -> list[float]:
    """Capacities per request at which curves are kept: quarters up to 4, then whole numbers.

    Args:
        max_nodes: tokens drafted per request at the full depth.
    """
    quarters = [i / 4 for i in range(4 * min(4, max_nodes) + 1)]
    return quarters + [float(i) for i in range(5, max_nodes + 1)]


def measure_curves(survival: Tensor, depths: Tensor, max_depth: int, shares: Tensor, is_real: Tensor | None = None) -> Tensor:
    """Expected accepted drafts per request, had a step drafted to each depth and verified each capacity.

    The largest C survivals of the nodes down to a depth, summed, divided by the batch size.

    Args:
        survival: [batch, n] float32. depths: [n] or [batch, n] integers, of the nodes, from 1.
        shares: [num_shares] float32, capacities per request.
        is_real: [batch] bool, where some rows only fill a graph.
    Returns:
        [max_depth + 1, num_shares] float32, on the same device; depth 0 is plain decoding.
    Sync: none; CUDA-graph safe.
    Example: survival [[.8, .4], [.6, .5]], depths [1, 2], shares [1.]: depth 0 -> 0, depth 1 -> .7, depth 2 -> .7
    """
    rows, n = survival.shape
    batch: Tensor | int = rows
    if is_real is not None:
        batch, survival = is_real.sum().clamp(min=1), survival * is_real[:, None]
    levels = torch.arange(max_depth + 1, device=survival.device)
    within = depths.expand(rows, n).reshape(1, -1) <= levels[:, None]
    best = torch.where(within, survival.reshape(1, -1), 0.0).sort(dim=1, descending=True).values
    total = torch.nn.functional.pad(best.cumsum(dim=1), (1, 0))
    # Between two whole capacities: linear.
    at = (shares * batch).clamp(max=rows * n)
    below = at.floor()
    low = total[:, below.long()]
    high = total[:, (below + 1).long().clamp(max=rows * n)]
    return torch.lerp(low, high, at - below) / batch


class AcceptCurves:
    """Moving averages of `measure_curves` on the host.

    Until something was measured, every draft token is taken to be accepted with probability 0.45, which counts as much as
    `_GUESSED_REQUESTS` that were measured.

    Args:
        max_depth: of the drafts. shares: as `capacity_shares`.
    """

    _FIRST_GUESS, _GUESSED_REQUESTS = 0.45, 8.0
    """What few first steps show is mostly luck: without a guess beside it a new server gives up a draft that pays."""
    _MEMORY_REQUESTS, _MEMORY_STEPS = 48.0, 6.0
    """Requests' steps, and steps besides, after which a measurement has lost most of its weight."""
    _MEMORY_TOKENS = 256.0
    """Expected tokens after which what was accepted has lost half of its weight."""
    _TRUST_TOKENS = 4.0
    """Of what is expected, taken to be accepted before anything was."""

    def __init__(self, max_depth: int, shares: list[float]) -> None:
        self._max_depth, self.shares = max_depth, np.array(shares)
        # The deeper, the wilder the guess.
        self._num_seen = self._GUESSED_REQUESTS / np.maximum(np.arange(max_depth + 1), 1)
        """By depth: deep drafts are seen less often."""
        self._expected = self._confirmed = 0.0
        guesses = np.concatenate(([0.0], np.cumsum(self._FIRST_GUESS ** np.arange(1, max_depth + 1))))
        self._curves = np.array(
            [np.interp(np.minimum(self.shares, depth), np.arange(max_depth + 1), guesses) for depth in range(max_depth + 1)]
        )

    def make_new(self) -> AcceptCurves:
        """Those of a draft that nothing is known of, of the same depths and shares."""
        return AcceptCurves(self._max_depth, self.shares.tolist())

    def observe(self, curves: np.ndarray, batch_size: int, capacity_tokens: int) -> float:
        """Take in one step's curves.

        Args:
            curves: [depth + 1, num_shares], from `measure_curves`, depth that of the step, from 1.
            capacity_tokens: drafts verified in it.
        Returns:
            The drafts that should be accepted of them, for `confirm`.
        """
        depth = len(curves) - 1
        # A plain average at first, the guess counted in.
        memory = self._MEMORY_REQUESTS + self._MEMORY_STEPS * batch_size
        seen = self._num_seen[: depth + 1] = np.minimum(self._num_seen[: depth + 1], memory) + batch_size
        old = self._curves[depth].copy()
        self._curves[: depth + 1] += (batch_size / seen)[:, None] * (curves - self._curves[: depth + 1])
        # What deeper drafts would add was not seen; what they rest on was.
        self._curves[depth + 1 :] += self._curves[depth] - old
        np.maximum.accumulate(self._curves[1:], axis=0, out=self._curves[1:])
        return batch_size * float(np.interp(capacity_tokens / batch_size, self.shares, curves[-1]))

    def confirm(self, expected: float, accepted: int) -> None:
        """Of one step: what `observe` returned, and what came true. Results may be a few steps late."""
        fading = 0.5 ** (expected / self._MEMORY_TOKENS)
        self._expected = fading * self._expected + expected
        self._confirmed = fading * self._confirmed + accepted

    @property
    def confidence(self) -> float:
        """Accepted drafts per expected one: near 1 once survivals are calibrated, and quick to change if they are not."""
        return (self._confirmed + self._TRUST_TOKENS) / (self._expected + self._TRUST_TOKENS)

    def accepted(self, depths: np.ndarray, capacity_shares: np.ndarray) -> np.ndarray:
        """Accepted drafts per request [n] at depths [n] and capacities per request [n]."""
        at = np.clip(np.searchsorted(self.shares, capacity_shares, side="right") - 1, 0, len(self.shares) - 2)
        left, right = self.shares[at], self.shares[at + 1]
        share = np.clip((capacity_shares - left) / (right - left), 0.0, 1.0)
        found = (1 - share) * self._curves[depths, at] + share * self._curves[depths, at + 1]
        return np.minimum(self.confidence * found, capacity_shares)
