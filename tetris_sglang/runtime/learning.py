"""What verification says about the draft's probabilities, gathered over a few steps."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tetris_sglang.drafting import (
    FIRST_CONTINUED,
    FIRST_COPIED,
    INITIAL_OFFSETS,
    NOT_CONTINUED,
    NUM_EVIDENCE,
    Calibrate,
    Grid,
    Proposal,
    is_copied,
)
from tetris_sglang.kernels.reference import AcceptedTokens
from tetris_sglang.selection import (
    AcceptanceHistory,
    Calibration,
    EvidenceOffsets,
    chain_outcomes,
    tree_outcomes,
)

INITIAL_KINDS = 2 * INITIAL_OFFSETS
"""Log-odds of each kind of evidence before anything was seen: greedy requests', then sampled ones'."""
_MOST_STEPS = 8
_MOST_REQUESTS = 128
"""Learning costs as much for one request as for many, so small steps wait for each other."""


class JudgedNodes(NamedTuple):
    """What a step says about the nodes of its proposal; each [batch, num_nodes]."""

    depths: Tensor
    """int64, from 1."""
    reached: Tensor
    """bool, see `selection.Outcomes`."""
    accepted: Tensor
    """bool."""


def judge_nodes(proposal: Proposal, grid: Grid, accepted: AcceptedTokens, verify_lens: Tensor) -> JudgedNodes:
    """Read a step's outcomes off what it accepted.

    Args:
        verify_lens: [batch], selected drafts and the root.
    Sync: none.
    """
    batch_size, num_nodes = proposal.tokens.shape
    draft_lens = verify_lens - 1
    if grid.shape is None:
        depths = torch.arange(1, num_nodes + 1, device=draft_lens.device).expand(batch_size, -1)
        return JudgedNodes(depths, *chain_outcomes(accepted.accept_lens, draft_lens, num_nodes))
    outcomes = tree_outcomes(accepted.path, accepted.accept_lens, draft_lens, grid.shape.parents)
    depths = grid.shape.depths[:, 1 : num_nodes + 1]
    return JudgedNodes(depths, *(outcome[:, :num_nodes] for outcome in outcomes))


class RequestsCalibration(NamedTuple):
    """A `Calibrate` for the requests of a batch. CUDA-graph safe."""

    calibration: Calibration
    evidence: EvidenceOffsets
    offsets: Tensor
    """float32 [batch], of the requests."""
    first_kinds: Tensor | None = None
    """int64 [batch], where the kinds of evidence begin for each request; None: at 0."""

    def kinds(self, evidence: Tensor) -> Tensor:
        """[batch, ...] int64, what `evidence` is called in `self.evidence`."""
        if self.first_kinds is None:
            return evidence
        return evidence + self.first_kinds.view(-1, *[1] * (evidence.ndim - 1))

    def __call__(self, probs: Tensor, depths: int | Tensor, evidence: Tensor | None) -> Tensor:
        offsets = self.offsets.view(-1, *[1] * (probs.ndim - 1))
        if evidence is None:
            return self.calibration.apply(probs, depths, offsets)
        # The draft gave copied tokens no score.
        log_odds = self.calibration.log_odds(probs, depths).masked_fill_(is_copied(evidence), 0.0)
        worth = self.evidence.offsets(self.kinds(evidence))
        return log_odds.add_(offsets + worth).sigmoid_().nan_to_num_(nan=0.0)

    def find_rival(self, depths: Tensor, copied: Tensor, contradicted: Tensor) -> Tensor:
        # The request's own offset stands on both sides.
        gain = self.evidence.offsets(self.kinds(copied)) - self.evidence.offsets(self.kinds(contradicted))
        return self.calibration.invert(gain, depths)


class AcceptanceLearner:
    """Feeds all that estimates acceptance with every step's outcomes. No sync.

    Log-odds of acceptance are the sum of three things: what a score is worth at its depth, what the evidence for the token
    is worth, and how the request's drafts have fared. Each is learnt from what those before it leave unexplained. What a text
    says is worth less where tokens are drawn than where the likeliest one is taken, so sampled requests have kinds of their own.

    Args:
        calibration: refreshed with every few steps.
        evidence: of what the requests' texts say, with INITIAL_KINDS; refreshed with every step.
        history: of all request slots; refreshed with every step.
    """

    def __init__(
        self, calibration: Calibration, evidence: EvidenceOffsets, history: AcceptanceHistory
    ) -> None:
        self.calibration, self.evidence, self.history = calibration, evidence, history
        self._steps: list[tuple[Tensor, ...]] = []
        self._num_requests = 0
        self._first_kinds = torch.zeros(history.num_slots, dtype=torch.int64, device=calibration.device)

    def add_prefilled(self, rows: Tensor, is_sampled: Tensor) -> None:
        """New requests run in these slots [batch]; which of them are not greedy [batch] bool. Sync: none."""
        self.history.forget(rows)
        self._first_kinds[rows] = is_sampled * NUM_EVIDENCE

    def calibrate(self, rows: Tensor) -> Calibrate:
        """How to calibrate drafts of the requests in these slots [batch]. CUDA-graph safe."""
        return RequestsCalibration(
            self.calibration, self.evidence, self.history.offsets(rows), self._first_kinds[rows]
        )

    def add(
        self, proposal: Proposal, grid: Grid, accepted: AcceptedTokens, verify_lens: Tensor, rows: Tensor
    ) -> None:
        """Take in one step.

        Args:
            verify_lens: [batch], selected drafts and the root. rows: [batch], the requests' slots.
        """
        judged, probs = judge_nodes(proposal, grid, accepted, verify_lens), proposal.probs
        kinds = proposal.evidence
        if kinds is not None:
            judged = judged._replace(reached=judged.reached & (kinds != NOT_CONTINUED))
        calibrate = RequestsCalibration(
            self.calibration,
            self.evidence,
            torch.zeros_like(rows, dtype=torch.float32),
            self._first_kinds[rows],
        )
        calibrated = calibrate(probs, judged.depths, kinds)
        self.history.observe(rows, calibrated, judged.reached, judged.accepted)
        if kinds is not None:
            self.evidence.observe(calibrate.kinds(kinds), calibrated, judged.reached, judged.accepted)
            judged = judged._replace(reached=judged.reached & ~is_copied(kinds))
        self._steps.append(tuple(part.reshape(-1) for part in (probs, *judged)))
        self._num_requests += len(probs)
        if len(self._steps) == _MOST_STEPS or self._num_requests >= _MOST_REQUESTS:
            self._learn()

    def _learn(self) -> None:
        together = (torch.cat(parts)[None] for parts in zip(*self._steps, strict=True))
        self.calibration.observe(*together)
        self._steps.clear()
        self._num_requests = 0

    def summarise(self) -> dict[str, float]:
        """For /server_info. Sync: copies to the host."""
        reliability = self.calibration.reliability()
        offsets = self.evidence.summarise()
        return {
            "calibration_error": reliability.error,
            "calibration_error_raw": reliability.raw_error,
            # After long matches, where there is most evidence.
            "agreement_offset": offsets[FIRST_COPIED - 2],
            "contradiction_offset": offsets[FIRST_COPIED - 1],
            "copied_offset": offsets[FIRST_CONTINUED - 1],
            "continued_offset": offsets[NOT_CONTINUED - 1],
            "history_gain": self.history.gain,
        }
