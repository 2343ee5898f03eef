"""What verification says about the draft's probabilities, gathered over a few steps."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tetris_sglang.drafting import Grid, Proposal
from tetris_sglang.estimates import Calibration, EvidenceOffsets, chain_outcomes, tree_outcomes
from tetris_sglang.packing import AcceptedTokens
from tetris_sglang.texts import FIRST_EXTENSION, FIRST_COPIED, NO_EXTENSION, is_copied

_MAX_STEPS = 8
_MAX_REQUESTS = 128
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


class EvidenceCalibration(NamedTuple):
    """A `Calibrate`: what a score is worth at its depth, and what the evidence for the token is. CUDA-graph safe."""

    calibration: Calibration
    evidence: EvidenceOffsets

    def __call__(self, probs: Tensor, depths: int | Tensor, evidence: Tensor | None) -> Tensor:
        if evidence is None:
            return self.calibration.apply(probs, depths)
        # The draft gave copied tokens no score.
        log_odds = self.calibration.log_odds(probs, depths).masked_fill_(is_copied(evidence), 0.0)
        return log_odds.add_(self.evidence.offsets(evidence)).sigmoid_().nan_to_num_(nan=0.0)

    def find_rival(self, depths: Tensor, copied: Tensor, contradicted: Tensor) -> Tensor:
        gain = self.evidence.offsets(copied) - self.evidence.offsets(contradicted)
        return self.calibration.invert(gain, depths)


class AcceptanceLearner:
    """Feeds all that estimates acceptance with every step's outcomes. No sync.

    Log-odds of acceptance are the sum of two things: what a score is worth at its depth, and what the evidence for the token
    is worth, which is learnt from what the first leaves unexplained.

    Args:
        calibration: refreshed with every few steps.
        evidence: of what the requests' texts say; refreshed with every step.
    """

    def __init__(self, calibration: Calibration, evidence: EvidenceOffsets) -> None:
        self.calibration, self.evidence = calibration, evidence
        self.calibrate = EvidenceCalibration(calibration, evidence)
        self._steps: list[tuple[Tensor, ...]] = []
        self._num_requests = 0

    def add(self, proposal: Proposal, grid: Grid, accepted: AcceptedTokens, verify_lens: Tensor) -> None:
        """Take in one step.

        Args:
            verify_lens: [batch], selected drafts and the root.
        """
        judged, probs = judge_nodes(proposal, grid, accepted, verify_lens), proposal.probs
        kinds = proposal.evidence
        if kinds is not None:
            judged = judged._replace(reached=judged.reached & (kinds != NO_EXTENSION))
            calibrated = self.calibrate(probs, judged.depths, kinds)
            self.evidence.observe(kinds, calibrated, judged.reached, judged.accepted)
            judged = judged._replace(reached=judged.reached & ~is_copied(kinds))
        self._steps.append(tuple(part.reshape(-1) for part in (probs, *judged)))
        self._num_requests += len(probs)
        if len(self._steps) == _MAX_STEPS or self._num_requests >= _MAX_REQUESTS:
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
            "copied_offset": offsets[FIRST_EXTENSION - 1],
            "extension_offset": offsets[NO_EXTENSION - 1],
        }
