"""The question every capacity policy answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from tetris_sglang.capacity.step_time import StepShape


class StepPlan(NamedTuple):
    """What a step does; decided on the host."""

    depth: int
    """Levels drafted, at most num_steps."""
    capacity_tokens: int
    """Draft tokens verified over the whole batch, roots excluded; 0: a plain decoding step, and depth is 0."""


def _as_asked(batch_size: int, rows: int) -> int | None:
    return None


@dataclass(frozen=True)
class DraftLimits:
    """What a server can draft and verify.

    depths: to which it can draft, ascending; of captured passes a few, of a block one.
    count_nodes: depth -> tokens drafted per request.
    fit_rows: (batch_size, rows) -> rows that a target's pass for them has (those of its graph); None: as many as asked for.
    """

    depths: Sequence[int]
    count_nodes: Callable[[int], int]
    fit_rows: Callable[[int, int], int | None] = _as_asked

    @property
    def num_steps(self) -> int:
        return self.depths[-1]

    def fit(self, batch_size: int, depth: int, capacity_tokens: int) -> StepPlan:
        """A plan with at least so many tokens, if as many are drafted: the rows up to a graph's are paid for anyway."""
        num_nodes = batch_size * self.count_nodes(depth)
        capacity_tokens = min(capacity_tokens, num_nodes)
        rows = self.count_rows(batch_size, capacity_tokens)
        return StepPlan(depth, min(rows - batch_size, num_nodes))

    def count_rows(self, batch_size: int, capacity_tokens: int) -> int:
        """Rows of the target's pass."""
        return self.fit_rows(batch_size, batch_size + capacity_tokens) or batch_size + capacity_tokens

    def shape_of(self, plan: StepPlan, batch_size: int, context_tokens: float = 0.0) -> StepShape:
        """What the time of a step planned so depends on."""
        return StepShape(batch_size, plan.depth, self.count_rows(batch_size, plan.capacity_tokens), context_tokens)


class CapacityPolicy(Protocol):
    """Decides a step's depth and capacity on the host before the step's draft runs, from what earlier steps have shown.

    A capacity that depended on this step's draft would not change the output's distribution (docs/how-it-works.md), but on a
    GPU the host would have to wait for the draft.
    """

    def choose(self, batch_size: int, limits: DraftLimits, context_tokens: float = 0.0) -> StepPlan:
        """Plan a step of `batch_size` running requests; `limits` are the same for all steps of a server."""
        ...
