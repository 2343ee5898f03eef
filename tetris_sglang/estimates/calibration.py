"""What the draft's probabilities are worth: acceptance counted online, per depth and score bin.

A draft's own probability is a biased estimate of acceptance (arXiv:2502.15197 uses it as it is). Here it is corrected by
what happened to tokens of like score at like depth, before survivals are multiplied from it. Selection stays prefix-closed:
a corrected probability is at most 1, so a survival never exceeds its parent's.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

# Bins of width 1 in log-odds, at these centres: probabilities of 0.007 to 0.999994. Drafts that are far too sure crowd
# beyond 0.999, where float32 still tells them apart.
LOWEST_CENTRE, HIGHEST_CENTRE = -5, 12
NUM_BINS = HIGHEST_CENTRE - LOWEST_CENTRE + 1

# Keeps log-odds finite; about what float32 resolves below 1.
_EPSILON = 1e-7


class Outcomes(NamedTuple):
    """What a verify pass says about each drafted token."""

    reached: Tensor
    """[batch, nodes] bool, verified, and everything before it accepted: only then the target has judged it."""
    accepted: Tensor
    """[batch, nodes] bool, implies reached."""


def chain_outcomes(num_accepted: Tensor, draft_lens: Tensor, max_draft: int) -> Outcomes:
    """Outcomes of chains.

    Args:
        num_accepted: [batch] integers, drafts accepted, at most draft_lens.
        draft_lens: [batch] integers, drafts verified.
        max_draft: columns of the result, the root excluded.
    Sync: none; CUDA-graph safe.
    Example: num_accepted [1], draft_lens [3], max_draft 4 -> reached [[T, T, F, F]], accepted [[T, F, F, F]]
    """
    columns = torch.arange(max_draft, dtype=num_accepted.dtype, device=num_accepted.device)
    judged = torch.minimum(num_accepted + 1, draft_lens)
    return Outcomes(columns < judged[:, None], columns < num_accepted[:, None])


def tree_outcomes(path: Tensor, num_accepted: Tensor, draft_lens: Tensor, parents: Tensor) -> Outcomes:
    """Outcomes of trees. All verified children of an accepted node are judged; at most one of them is accepted.

    Args:
        path: [batch, max_depth + 1] int64, columns of the root and the accepted nodes, as `accept_tree` gives it; what
            stands beyond num_accepted does not matter.
        num_accepted: [batch] integers.
        draft_lens: [batch] integers, nodes verified: columns 1..draft_lens.
        parents: [batch, width] int64, column of each column's parent.
    Returns:
        [batch, width - 1], node i is column i + 1.
    Sync: none; CUDA-graph safe.
    Example: parents [[0, 0, 1, 0]], path [[0, 1, 3]], num_accepted [1], draft_lens [2] -> reached [[T, T, F]],
        accepted [[T, F, F]]
    """
    batch, width = parents.shape
    device = parents.device
    steps = torch.arange(path.shape[1], dtype=num_accepted.dtype, device=device)
    # Surplus entries become the root, which is on every path.
    columns = path.where(steps <= num_accepted[:, None], 0)
    on_path = torch.zeros(batch, width, dtype=torch.bool, device=device).scatter_(1, columns, True)
    verified = torch.arange(width, dtype=draft_lens.dtype, device=device) <= draft_lens[:, None]
    return Outcomes((verified & on_path.gather(1, parents))[:, 1:], on_path[:, 1:])


@dataclass(frozen=True)
class ReliabilityBin:
    """Reached drafts of one depth and score bin, weighted by how recent they are."""

    depth: int
    centre: float
    """Probability at the bin's centre."""
    count: float
    raw: float
    """Mean probability that the draft gave."""
    expected: float
    """Mean calibrated probability, each as it was when its draft was observed."""
    observed: float
    """Share accepted."""


@dataclass(frozen=True)
class Reliability:
    bins: list[ReliabilityBin]
    error: float
    """Expected calibration error: mean of |expected - observed| over the bins, weighted by count."""
    raw_error: float
    """The same of the draft's own probabilities."""


class Calibration:
    """Corrects one kind of draft's probabilities by what was accepted.

    In each bin the correction is the difference in log-odds between the share accepted and the mean probability; between
    bin centres it is interpolated, beyond the last ones it is constant. A share is shrunk by `prior_strength`
    pseudo-observations: a bin at one depth towards the same bin over all depths, that one towards its neighbours, and those
    towards the draft's own probability. So deep levels, rarely reached, learn from shallow ones, and scores that were never
    selected learn from those that were.

    Args:
        max_depth: deepest draft, from 1.
        device: of all state and arguments.
        prior_strength: pseudo-observations, above 0.
        decay: what an observation keeps of its weight with each later one, whatever their bins: the last 1 / (1 - decay)
            reached drafts count. In (0, 1].
        refresh_every: calls of `observe` between two updates of what `apply` uses.
    Raises:
        ValueError: a setting out of range.
    """

    def __init__(
        self,
        max_depth: int,
        device: torch.device | str = "cpu",
        prior_strength: float = 4.0,
        decay: float = 0.9999,
        refresh_every: int = 8,
    ) -> None:
        if max_depth < 1 or refresh_every < 1:
            raise ValueError(f"max_depth and refresh_every must be >= 1, got {max_depth} and {refresh_every}")
        if not prior_strength > 0 or not 0 < decay <= 1:
            raise ValueError(f"prior_strength must be above 0 and decay in (0, 1], got {prior_strength} and {decay}")
        self.max_depth, self.device = max_depth, torch.device(device)
        self.prior_strength, self.decay, self.refresh_every = prior_strength, decay, refresh_every
        self._calls = 0
        # Everything below is indexed by depth; row 0 is where nothing that counts goes.
        centres = torch.arange(LOWEST_CENTRE, HIGHEST_CENTRE + 1, dtype=torch.float32, device=device)
        self._centre_probs = centres.sigmoid()
        self._edge_probs = (centres[1:] - 0.5).sigmoid()
        # Segments are looked up by probability, so they must meet where `apply` sees those probabilities: near 1 the
        # rounding of a probability is a hundredth in log-odds.
        self._centres = _logit(self._centre_probs)
        self._widths = self._centres.diff()
        # What an observation is worth to a bin that far away.
        self._nearness = 0.25 ** (centres - centres[:, None]).double().abs()
        # float64: the mean of probabilities near 1 must say how near.
        self._sums = torch.zeros(4, (max_depth + 1) * NUM_BINS, dtype=torch.float64, device=device)
        """Reached, accepted, raw probability, calibrated probability: each [depth * NUM_BINS + bin]."""
        self._lines = torch.zeros((max_depth + 1) * (NUM_BINS + 1), 2, device=device)
        """Slope and intercept of the corrected log-odds; segment i ends at centre i, the last one has no end."""
        self._levels = self._centres.repeat(max_depth + 1, 1)
        """[depth, bin], the corrected log-odds at the centres."""
        self._decay = torch.tensor(decay, device=device)
        self.forget()

    def forget(self) -> None:
        """Take probabilities for what they are, as before anything was observed; in place, as graphs read it."""
        self._sums.zero_()
        self._lines[:, 0], self._lines[:, 1] = 1, 0
        self._levels.copy_(self._centres.expand_as(self._levels))

    def apply(self, probs: Tensor, depths: int | Tensor) -> Tensor:
        """The calibrated probability that a token is accepted, given that everything before it is.

        Non-decreasing in probs at each depth, up to rounding. Before any observation: probs, up to rounding.

        Args:
            probs: [batch, ...] float32, the draft's probability of each token given those before it.
            depths: from 1 to max_depth: of all of them, or int64 to be broadcast against probs (not checked).
        Returns:
            float32 in [0, 1], the shape of probs; NaN becomes 0.
        Raises:
            ValueError: an int depth out of range.
        Sync: none; CUDA-graph safe: what it reads is updated in place.
        """
        if isinstance(depths, int) and not 1 <= depths <= self.max_depth:
            raise ValueError(f"depth must be in 1..{self.max_depth}, got {depths}")
        return self.log_odds(probs, depths).sigmoid_().nan_to_num_(nan=0.0)

    def log_odds(self, probs: Tensor, depths: int | Tensor) -> Tensor:
        """The log-odds of what `apply` gives; NaN stays NaN. Args, Sync: as there."""
        # NaN falls into the last segment.
        segments = torch.bucketize(probs.contiguous(), self._centre_probs) + depths * (NUM_BINS + 1)
        slopes, intercepts = torch.nn.functional.embedding(segments, self._lines).unbind(-1)
        return torch.addcmul(intercepts, slopes, _logit(probs))

    def invert(self, log_odds: Tensor, depths: Tensor) -> Tensor:
        """The probabilities that `log_odds` takes to these log-odds; where many are, one of them.

        Args:
            log_odds: [..., n] float32. depths: [n] int64, from 1 to max_depth.
        Returns:
            float32, the shape of log_odds.
        Sync: none; CUDA-graph safe: what it reads is updated in place.
        """
        segments = (self._levels[depths] < log_odds[..., None]).sum(dim=-1) + depths * (NUM_BINS + 1)
        slopes, intercepts = torch.nn.functional.embedding(segments, self._lines).unbind(-1)
        return ((log_odds - intercepts) / slopes.clamp_min(_EPSILON)).sigmoid_()

    def observe(self, probs: Tensor, depths: Tensor, reached: Tensor, accepted: Tensor) -> None:
        """Count a verify pass.

        Args:
            probs: [batch, n] float32, the draft's own probabilities, not calibrated ones.
            depths: [n] or [batch, n] int64, 1..max_depth; anything in 0..max_depth where not reached.
            reached, accepted: [batch, n] bool, see `Outcomes`. What was not reached is not counted: it looks rejected,
                whatever it was worth.
        Sync: none.
        """
        probs = probs.nan_to_num(nan=0.0, posinf=1.0, neginf=0.0)
        calibrated = self.apply(probs, depths)
        cells = torch.bucketize(probs.contiguous(), self._edge_probs) + depths * NUM_BINS
        cells = cells.where(reached, 0).flatten()
        observed = torch.stack((reached, accepted, probs, calibrated)).flatten(1).double()
        # By the number observed, not by calls: the memory is then as long with 1 running request as with 64, measured in
        # evidence, and idle steps forget nothing. One rate for all bins: what is seen rarely gets old, too.
        self._sums.mul_(self._decay ** reached.sum())
        self._sums.index_add_(1, cells, observed)
        self._calls += 1
        if self._calls % self.refresh_every == 0:
            self.refresh()

    def refresh(self) -> None:
        """Let `apply` use all that was observed.

        Sync: none; CUDA-graph safe.
        """
        # [depth, bin]; from the widest evidence to a cell's own.
        count, accepted, total = sums = self._sums[:3].view(3, -1, NUM_BINS)[:, 1:]
        pooled = sums.sum(dim=1)
        near = pooled @ self._nearness
        correction = self._correct(near[0], near[1], near[2], 0.0)
        correction = self._correct(pooled[0], pooled[1], pooled[2], correction)
        correction = self._correct(count, accepted, total, correction)
        levels = _make_monotone(self._centres + correction, count + self.prior_strength)
        self._levels[1:] = levels
        slopes = self._lines[:, 0].view(-1, NUM_BINS + 1)[1:]
        intercepts = self._lines[:, 1].view(-1, NUM_BINS + 1)[1:]
        torch.div(levels.diff(dim=1), self._widths, out=slopes[:, 1:-1])
        torch.addcmul(levels, slopes[:, :-1], self._centres, value=-1, out=intercepts[:, :-1])
        torch.sub(levels[:, -1], self._centres[-1], out=intercepts[:, -1])

    def reliability(self) -> Reliability:
        """Expected against observed acceptance, of bins that anything was observed in.

        Sync: copies to the host.
        """
        sums = self._sums.view(4, -1, NUM_BINS)[:, 1:].cpu()
        bins = []
        for depth, centre in (sums[0] > 0).nonzero().tolist():
            count, accepted, raw, calibrated = sums[:, depth, centre].tolist()
            bins.append(
                ReliabilityBin(
                    depth=depth + 1,
                    centre=self._centre_probs[centre].item(),
                    count=count,
                    raw=raw / count,
                    expected=calibrated / count,
                    observed=accepted / count,
                )
            )
        weight = max(sum(cell.count for cell in bins), 1e-30)
        return Reliability(
            bins,
            error=sum(cell.count * abs(cell.expected - cell.observed) for cell in bins) / weight,
            raw_error=sum(cell.count * abs(cell.raw - cell.observed) for cell in bins) / weight,
        )

    def _correct(self, count: Tensor, accepted: Tensor, total: Tensor, prior: Tensor | float) -> Tensor:
        """Log-odds of the share accepted, shrunk towards the prior correction, less those of the mean probability."""
        # The centre as a thousandth of an observation: where nothing was counted it is the mean, without a branch.
        mean = _logit(torch.add(total, self._centre_probs, alpha=1e-3).div_(count + 1e-3))
        believed = (mean + prior).sigmoid_()
        share = torch.add(accepted, believed, alpha=self.prior_strength).div_(count + self.prior_strength)
        return _logit(share).sub_(mean)


def _logit(probs: Tensor) -> Tensor:
    """Finite log-odds; NaN stays NaN. Sync: none; CUDA-graph safe."""
    if probs.device.type != "cpu":
        return probs.logit(_EPSILON)
    # torch's own wakes every thread there, however few the numbers, and waits for them (docs/lessons.md).
    probs = probs.clamp(_EPSILON, 1 - _EPSILON)
    return (probs / (1 - probs)).log_()


def _make_monotone(levels: Tensor, weights: Tensor) -> Tensor:
    """The non-decreasing rows that are nearest to levels [depth, bin] float64 in weighted squares (isotonic regression).

    Entry b is the smallest over j >= b of the largest over i <= b of the weighted means of i..j. Where noise orders two bins
    wrongly, the one that has seen more has more of a say.
    """
    sums = torch.nn.functional.pad(torch.stack((levels * weights, weights)).cumsum(dim=2), (1, 0))
    # [depth, i, j]; a range that ends before it begins (j < i) has no mean. Row b of `largest` is the one that b looks at.
    tops, bottoms = sums[:, :, None, 1:] - sums[:, :, :-1, None]
    largest = (tops / bottoms).cummax(dim=1).values
    bins = torch.arange(levels.shape[1], device=levels.device)
    return largest.masked_fill_(bins < bins[:, None], torch.inf).amin(dim=2)
