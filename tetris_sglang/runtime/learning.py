"""What verification says about the draft's probabilities, gathered over a few steps."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tetris_sglang.drafting import Calibrate, Grid, Proposal
from tetris_sglang.kernels.reference import AcceptedTokens
from tetris_sglang.selection import AcceptanceHistory, Calibration, chain_outcomes, tree_outcomes

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


class AcceptanceLearner:
    """Feeds a `Calibration` and an `AcceptanceHistory` with every step's outcomes. No sync.

    Args:
        calibration: refreshed with every few steps.
        history: of all request slots; refreshed with every step.
        copies: whether a proposal's tensors are overwritten by the next step's (captured passes).
    """

    def __init__(self, calibration: Calibration, history: AcceptanceHistory, copies: bool) -> None:
        self.calibration, self.history, self._copies = calibration, history, copies
        self._steps: list[tuple[Tensor, ...]] = []
        self._num_requests = 0

    def calibrate(self, rows: Tensor) -> Calibrate:
        """How to calibrate drafts of the requests in these slots [batch]. CUDA-graph safe."""
        offsets = self.history.offsets(rows)
        return lambda probs, depths: self.calibration.apply(probs, depths, offsets)

    def add(
        self, proposal: Proposal, grid: Grid, accepted: AcceptedTokens, verify_lens: Tensor, rows: Tensor
    ) -> None:
        """Take in one step.

        Args:
            verify_lens: [batch], selected drafts and the root. rows: [batch], the requests' slots.
        """
        judged, probs = judge_nodes(proposal, grid, accepted, verify_lens), proposal.probs
        calibrated = self.calibration.apply(probs, judged.depths)
        self.history.observe(rows, calibrated, judged.reached, judged.accepted)
        if self._copies:
            probs = probs.clone()
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
        return {
            "calibration_error": reliability.error,
            "calibration_error_raw": reliability.raw_error,
            "history_gain": self.history.gain,
        }
