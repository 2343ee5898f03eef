"""What verification says about the draft's probabilities, gathered over a few steps."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tetris_sglang.drafting import Grid, Proposal
from tetris_sglang.kernels.reference import AcceptedTokens
from tetris_sglang.selection import Calibration, chain_outcomes, tree_outcomes

_MOST_STEPS = 8
_MOST_REQUESTS = 128
"""Learning costs as much for one request as for many, so small steps wait for each other."""


class _Verified(NamedTuple):
    """One step; columns of a grid without its roots."""

    probs: Tensor
    depths: Tensor
    reached: Tensor
    accepted: Tensor


class AcceptanceLearner:
    """Feeds a `Calibration` with every step's outcomes. No sync.

    Args:
        calibration: refreshed with every few steps.
        copies: whether a proposal's tensors are overwritten by the next step's (captured passes).
    """

    def __init__(self, calibration: Calibration, copies: bool) -> None:
        self.calibration, self._copies = calibration, copies
        self._steps: list[_Verified] = []
        self._num_requests = 0

    def add(self, proposal: Proposal, grid: Grid, accepted: AcceptedTokens, verify_lens: Tensor) -> None:
        """Take in one step.

        Args:
            verify_lens: [batch], selected drafts and the root.
        """
        probs, draft_lens = proposal.probs, verify_lens - 1
        batch_size, num_nodes = probs.shape
        if grid.shape is None:
            depths = torch.arange(1, num_nodes + 1, device=probs.device).expand(batch_size, -1)
            reached, kept = chain_outcomes(accepted.accept_lens, draft_lens, num_nodes)
        else:
            depths = grid.shape.depths[:, 1 : num_nodes + 1]
            reached, kept = (
                outcome[:, :num_nodes]
                for outcome in tree_outcomes(
                    accepted.path, accepted.accept_lens, draft_lens, grid.shape.parents
                )
            )
        if self._copies:
            probs = probs.clone()
        self._steps.append(_Verified(*(t.reshape(-1) for t in (probs, depths, reached, kept))))
        self._num_requests += batch_size
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
        return {"calibration_error": reliability.error, "calibration_error_raw": reliability.raw_error}
