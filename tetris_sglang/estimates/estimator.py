"""How likely a drafted token is accepted: the one estimate that drafting, selection and planning share."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tetris_sglang.estimates.calibration import Calibration, chain_outcomes, tree_outcomes
from tetris_sglang.estimates.offsets import EvidenceOffsets
from tetris_sglang.observers import Observer, StepRecord
from tetris_sglang.texts import FIRST_COPIED, FIRST_TEXT_ONLY, INITIAL_OFFSETS, NO_DRAFT, is_copied

_MAX_REQUESTS = 128
"""In steps that are learnt from together."""


class JudgedNodes(NamedTuple):
    """What a step says about the nodes of its proposal; each [batch, num_nodes]."""

    depths: Tensor
    """int64, from 1."""
    reached: Tensor
    """bool, see `Outcomes`."""
    accepted: Tensor
    """bool."""


def judge_nodes(record: StepRecord) -> JudgedNodes:
    """Read the outcomes of a step that drafted off what it accepted. Sync: none."""
    proposal, num_accepted, grid = record.proposal, record.accepted.num_accepted, record.grid
    assert proposal is not None
    batch_size, num_nodes = proposal.tokens.shape
    draft_lens = record.packed.verify_lens - 1
    depths = proposal.depths.expand(batch_size, -1)
    if grid.shape is None:
        # Of trees, too, where chains alone were verified.
        return JudgedNodes(depths, *chain_outcomes(num_accepted, draft_lens, num_nodes))
    assert record.accepted.path is not None
    outcomes = tree_outcomes(record.accepted.path, num_accepted, draft_lens, grid.shape.parents)
    return JudgedNodes(depths, *(outcome[:, :num_nodes] for outcome in outcomes))


class AcceptanceEstimator(Observer):
    """A `Calibrate` that learns, and an `Observer`: log-odds of acceptance are the sum of two terms.

    What a draft's probability is worth at its depth (`Calibration`), and what the evidence for the token is worth
    (`EvidenceOffsets`), which is learnt from what the first leaves unexplained. CUDA-graph safe where it estimates.

    Args:
        max_depth: of any token, from 1.
        steps_together: learning costs as much for one request as for many, so small steps wait for each other. 1: none does, so
            that `observe` may be captured.
    """

    def __init__(self, max_depth: int, device: torch.device | str = "cpu", steps_together: int = 8) -> None:
        # Refreshed with every few steps, the offsets with every one.
        self.calibration = Calibration(max_depth, device, refresh_every=1)
        self.evidence = EvidenceOffsets(INITIAL_OFFSETS, device)
        self._steps_together = steps_together
        self._steps: list[tuple[Tensor, ...]] = []
        self._num_requests = 0

    def __call__(self, probs: Tensor, depths: int | Tensor, evidence: Tensor | None) -> Tensor:
        """See `Calibrate`."""
        if evidence is None:
            return self.calibration.apply(probs, depths)
        # The draft gave copied tokens no score.
        log_odds = self.calibration.log_odds(probs, depths).masked_fill_(is_copied(evidence), 0.0)
        return log_odds.add_(self.evidence.offsets(evidence)).sigmoid_().nan_to_num_(nan=0.0)

    def find_rival(self, depths: Tensor, copied: Tensor, contradicted: Tensor) -> Tensor:
        """See `Calibrate`."""
        gain = self.evidence.offsets(copied) - self.evidence.offsets(contradicted)
        return self.calibration.invert(gain, depths)

    def observe(self, record: StepRecord) -> None:
        """Take in a step's outcomes. Sync: none."""
        if record.proposal is None:
            return
        judged, probs, kinds = judge_nodes(record), record.proposal.probs, record.proposal.evidence
        if kinds is not None:
            judged = judged._replace(reached=judged.reached & (kinds != NO_DRAFT))
            self.evidence.observe(kinds, self(probs, judged.depths, kinds), judged.reached, judged.accepted)
            judged = judged._replace(reached=judged.reached & ~is_copied(kinds))
        self._steps.append(tuple(part.reshape(-1) for part in (probs, *judged)))
        self._num_requests += len(probs)
        if len(self._steps) == self._steps_together or self._num_requests >= _MAX_REQUESTS:
            self._learn()

    def forget(self) -> None:
        """All that was learnt of a draft that is gone."""
        self._steps.clear()
        self._num_requests = 0
        self.calibration.forget()
        self.evidence.forget()

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
            "copied_offset": offsets[FIRST_TEXT_ONLY - 1],
            "text_offset": offsets[NO_DRAFT - 1],
        }
