"""What a step did, and who learns from it."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from torch import Tensor

from tetris_sglang.capacity import StepPlan
from tetris_sglang.drafting import Grid, Proposal
from tetris_sglang.packing import AcceptedTokens, PackedTokens


class StepRecord(NamedTuple):
    """One decode step, whose result SGLang has been given."""

    batch: Any
    """The ScheduleBatch, its lengths still those of before."""
    plan: StepPlan
    proposal: Proposal | None
    """None: a plain step."""
    grid: Grid
    packed: PackedTokens
    accepted: AcceptedTokens
    max_drafts: int
    """That any request has verified, as far as the host knows."""


class Observer(Protocol):
    """Learns from what is served, and does nothing where it has nothing to learn. Never waits for the device."""

    def begin(self, batch, next_token_ids: Tensor) -> None:
        """Requests begin, or come back after a retraction.

        Args:
            batch: the extend ScheduleBatch. next_token_ids: [batch], the target's tokens after the prompts.
        """

    def observe(self, record: StepRecord) -> None:
        """A step is done."""
