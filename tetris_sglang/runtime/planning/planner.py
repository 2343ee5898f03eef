"""What each step is to do, and what the planner learns from it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch

from tetris_sglang.capacity import (
    AutoCapacity,
    CapacityPolicy,
    DraftLimits,
    StepPlan,
    measure_curves,
)
from tetris_sglang.drafting import Proposal
from tetris_sglang.runtime.host_copy import HostCopy
from tetris_sglang.runtime.planning.clock import STEPS_THAT_COMPILE, StepClock
from tetris_sglang.runtime.ranks import Ranks
from tetris_sglang.runtime.reports.metrics import StepMetrics
from tetris_sglang.runtime.requests.weights import Wishes

_MAX_STEPS_IN_FLIGHT = 8
"""Overlap scheduling has two; should SGLang drop a result, older steps are forgotten."""


@dataclass
class _DraftedStep:
    """A speculative step whose curves or whose result the host does not have yet."""

    curves: HostCopy
    batch_size: int
    capacity_tokens: int
    expected: float | None = None
    """Drafts that should be accepted; None until the curves were read."""


class StepPlanner:
    """Asks the capacity policy before a step, and tells an automatic one what came of it. Never waits for the device.

    Args:
        device: "cuda" or "cpu". ranks: whose steps are planned; the first one's clock counts.
    """

    def __init__(self, policy: CapacityPolicy, limits: DraftLimits, metrics: StepMetrics, device: str, ranks: Ranks) -> None:
        self.policy, self._limits, self._metrics, self._ranks = policy, limits, metrics, ranks
        self._clock = StepClock(True, STEPS_THAT_COMPILE) if device == "cuda" else StepClock(False)
        self._auto = policy if isinstance(policy, AutoCapacity) else None
        if self._auto is not None:
            self._shares = torch.tensor(self._auto.curves.shares, dtype=torch.float32, device=device)
        self._unread: deque[_DraftedStep] = deque()
        # SGLang's results come in the order of the steps, plain ones (None) included.
        self._unconfirmed: deque[_DraftedStep | None] = deque(maxlen=_MAX_STEPS_IN_FLIGHT)

    def plan(self, batch, wishes: Wishes | None = None) -> StepPlan:
        """Plan a decoding step of `batch`, a ScheduleBatch.

        Args:
            wishes: of its requests; those that want no drafts leave the others their share.
        """
        batch_size = len(batch.reqs)
        num_speculating = batch_size if wishes is None else wishes.num_speculating
        if self._auto is None:
            return self._limit(self.policy.choose(batch_size, self._limits), num_speculating)
        for step in self._clock.begin():
            predicted_s = self._auto.observe_time(step.shape, step.seconds)
            if predicted_s is not None:
                self._metrics.set("step_time_predicted_seconds", predicted_s)
                self._metrics.set("step_time_measured_seconds", step.seconds)
        self._read_curves()
        context_tokens = _count_context_tokens(batch)
        plan = StepPlan(0, 0)
        if num_speculating:
            plan = self._limit(self._auto.choose(batch_size, self._limits, context_tokens), num_speculating)
            self._metrics.set("expected_gain", self._auto.expected_gain)
        plan = self._ranks.agree(plan)
        shape = self._limits.shape_of(plan, batch_size, context_tokens)
        self._clock.describe(shape)
        self._auto.begin_step(shape)
        if not plan.capacity_tokens:
            self._unconfirmed.append(None)
        return plan

    def _limit(self, plan: StepPlan, num_speculating: int) -> StepPlan:
        if not plan.capacity_tokens:
            return plan
        most = num_speculating * self._limits.count_nodes(plan.depth)
        return StepPlan(plan.depth, min(plan.capacity_tokens, most)) if most else StepPlan(0, 0)

    def after_draft(
        self,
        proposal: Proposal,
        plan: StepPlan,
        wishes: Wishes | None = None,
    ) -> None:
        """Look at what a step drafted; later steps are planned from it.

        Args:
            wishes: of the step's requests: their mean weight counts as much as one token.
        """
        if self._auto is None:
            return
        curves, survival = proposal.curves, proposal.survival
        if wishes is not None:
            # A row more is worth what it counts. `AcceptCurves.confirm` holds the sum against what is accepted.
            survival = survival * (wishes.weights / wishes.mean_weight)[:, None]
        if curves is None or wishes is not None:
            curves = measure_curves(survival, proposal.depths, plan.depth, self._shares)
        step = _DraftedStep(HostCopy(curves), len(proposal.tokens), plan.capacity_tokens)
        self._unread.append(step)
        self._unconfirmed.append(step)

    def after_result(self, accepted: int) -> None:
        """Drafts that the oldest step without a result had accepted have become known to the host."""
        if self._auto is None or not self._unconfirmed:
            return
        step = self._unconfirmed.popleft()
        self._read_curves()
        if step is not None:
            self._auto.confirm(step.batch_size, step.expected, accepted)

    def forget(self) -> None:
        """What was seen of a draft that is gone; what passes take stays."""
        # Results that are still to come keep their steps.
        self._unread.clear()
        if self._auto is not None:
            self.policy = self._auto = AutoCapacity(self._auto.step_times, self._auto.curves.make_new())

    def after_prefill(self) -> None:
        self._clock.interrupt()

    def summarise(self) -> dict[str, float]:
        """For /server_info; empty with a fixed capacity."""
        if self._auto is None:
            return {}
        return {
            "expected_gain": self._auto.expected_gain,
            "expected_accepted_per_request": self._auto.expected_accepted,
            "expected_plain_step_seconds": self._auto.expected_seconds[0],
            "expected_speculative_step_seconds": self._auto.expected_seconds[1],
            "step_time_relative_error": self._auto.step_times.relative_error,
        }

    def _read_curves(self) -> None:
        while self._unread and self._unread[0].curves.is_ready:
            step = self._unread.popleft()
            (curves,) = step.curves.tensors
            step.expected = self._auto.curves.observe(curves.numpy(), step.batch_size, step.capacity_tokens)


def _count_context_tokens(batch) -> float:
    """Of all requests; 0 where only the device knows. SGLang forgets the sum whenever requests leave or join."""
    if batch.seq_lens_sum is not None:
        return float(batch.seq_lens_sum)
    return 0.0 if batch.seq_lens_cpu is None else float(batch.seq_lens_cpu.sum())
