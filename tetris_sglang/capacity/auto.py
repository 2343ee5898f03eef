"""A capacity and a depth that set themselves, with plain decoding as one of the choices.

Each step maximises expected tokens emitted per second,

    (B + expected accepted drafts(depth, C)) / t(B, depth, B + C),

over plain decoding (depth 0, C = 0) and all depths and capacities (docs/capacity.md derives it). Both parts come from
earlier steps. Where chains go on from recent texts, so can the root itself: depth 0 with C > 0.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tetris_sglang.capacity.accept_curves import AcceptCurves
from tetris_sglang.capacity.policy import DraftLimits, StepPlan
from tetris_sglang.capacity.step_time import StepTimeModel

_GAIN_TO_ENTER = 1.02
_GAIN_TO_LEAVE = 0.995
"""Of speculation against plain decoding: between them nothing changes."""
_LEAST_STEPS = 4
"""Steps of one kind before the other kind may follow."""
_FIRST_LOOK_AFTER, _LAST_LOOK_AFTER = 8, 64
"""Speculative steps after which one goes to the full depth, to see what lies there: each look doubles them."""
_PROBE_STEPS = 2
_FIRST_PROBE_AFTER, _LAST_PROBE_AFTER = 64, 2048
"""Plain steps before a probe: each probe that changes nothing doubles them."""
_LOOK_AT_TEXTS_EVERY = 16
"""Plain steps after which one verifies a few tokens from recent texts, which no pass has to draft."""
_REQUESTS_PER_LOOK = 8
"""Requests that share one such token."""
_DRAW_EVERY = 8
"""Steps planned with one draw of the uncertain step times (Thompson sampling): plans that may well be faster get tried, and
those known to be slower do not."""
_FIRST_STEPS, _FIRST_DRAFTS = 3, 24
"""A server's first steps draft to the full depth, whatever is expected of them, until so many drafts were verified."""


class _Candidates(NamedTuple):
    """Every plan for a batch size; the first is plain decoding."""

    depths: np.ndarray
    capacity_tokens: np.ndarray
    features: np.ndarray


class AutoCapacity:
    """Chooses what the model of step times and the curves of acceptance say is fastest."""

    def __init__(self, step_times: StepTimeModel, curves: AcceptCurves) -> None:
        self.step_times, self.curves = step_times, curves
        self._candidates: dict[int, _Candidates] = {}
        self._speculates = True
        self._steps_in_mode = 0
        self._steps_since_full_depth = 0
        self._look_after = _FIRST_LOOK_AFTER
        self._first_steps = self._first_drafts = 0
        """That a new server has behind it."""
        self._random = np.random.default_rng(0)
        self._drawn: np.ndarray | None = None
        self._steps_with_drawn = 0
        self._probe_after = _FIRST_PROBE_AFTER
        self._probe_steps = 0
        self.expected_gain = 1.0
        """Of the best speculative plan against plain decoding, at the last choice."""
        self.expected_accepted = 0.0
        """Drafts per request that this plan should have accepted."""
        self.expected_seconds = 0.0, 0.0
        """Of a plain step, and of that plan's."""

    def choose(self, batch_size: int, limits: DraftLimits, context_tokens: float = 0.0) -> StepPlan:
        found = self._candidates.get(batch_size)
        if found is None:
            found = self._candidates[batch_size] = self._list_candidates(batch_size, limits)
        if self._steps_with_drawn == 0:
            self._drawn = self.step_times.draw(self._random)
            self._steps_with_drawn = _DRAW_EVERY
        self._steps_with_drawn -= 1
        seconds = self.step_times.predict(found.features, context_tokens, self._drawn)
        accepted = self.curves.accepted(found.depths, found.capacity_tokens / batch_size)
        # However many siblings a tree verifies, one token a level is accepted.
        emitted = 1 + np.minimum(accepted, found.depths + limits.num_continued)
        value = emitted / seconds
        best = 1 + int(value[1:].argmax())
        self.expected_gain = float(value[best] / value[0])
        self.expected_accepted = float(emitted[best] - 1)
        self.expected_seconds = float(seconds[0]), float(seconds[best])
        plan = StepPlan(int(found.depths[best]), int(found.capacity_tokens[best]))
        if self._first_steps < _FIRST_STEPS or self._first_drafts < _FIRST_DRAFTS:
            chosen = self._look_deep(batch_size, limits, 2 * batch_size)
            self._first_steps += 1
            self._first_drafts += chosen.capacity_tokens
            return chosen
        return self._keep_or_change(plan, batch_size, limits)

    def _keep_or_change(self, plan: StepPlan, batch_size: int, limits: DraftLimits) -> StepPlan:
        self._steps_in_mode += 1
        if self._speculates:
            if self.expected_gain < _GAIN_TO_LEAVE and self._steps_in_mode > _LEAST_STEPS:
                self._change_mode()
                return StepPlan(0, 0)
            self._steps_since_full_depth += 1
            if plan.depth == limits.num_steps:
                self._steps_since_full_depth = 0
            elif self._steps_since_full_depth >= self._look_after:
                self._steps_since_full_depth = 0
                self._look_after = min(2 * self._look_after, _LAST_LOOK_AFTER)
                return self._look_deep(batch_size, limits, plan.capacity_tokens)
            return plan
        if self.expected_gain > _GAIN_TO_ENTER and self._steps_in_mode > _LEAST_STEPS:
            self._change_mode()
            return plan
        if self._steps_in_mode >= self._probe_after:
            self._probe_steps += 1
            if self._probe_steps >= _PROBE_STEPS:
                self._probe_steps = self._steps_in_mode = 0
                self._probe_after = min(2 * self._probe_after, _LAST_PROBE_AFTER)
            return self._look_deep(batch_size, limits, batch_size)
        if limits.depths[0] == 0 and self._steps_in_mode % _LOOK_AT_TEXTS_EVERY == 0:
            return limits.fit(batch_size, 0, max(1, batch_size // _REQUESTS_PER_LOOK))
        return StepPlan(0, 0)

    def _change_mode(self) -> None:
        self._speculates = not self._speculates
        self._steps_in_mode = self._probe_steps = 0
        if self._speculates:
            self._probe_after = _FIRST_PROBE_AFTER

    @staticmethod
    def _look_deep(batch_size: int, limits: DraftLimits, capacity_tokens: int) -> StepPlan:
        return limits.fit(batch_size, limits.num_steps, max(1, capacity_tokens))

    def _list_candidates(self, batch_size: int, limits: DraftLimits) -> _Candidates:
        capacities = np.unique(np.rint(self.curves.shares * batch_size).astype(int)).tolist()
        # Several capacities may fill the same graph.
        plans = {StepPlan(0, 0): None}
        for depth in limits.depths:
            num_nodes = batch_size * limits.count_nodes(depth)
            plans |= {limits.fit(batch_size, depth, c): None for c in capacities if 0 < c <= num_nodes}
        depths, capacity_tokens = (np.array(column) for column in zip(*plans, strict=True))
        rows = np.array([limits.count_rows(batch_size, plan.capacity_tokens) for plan in plans])
        features = self.step_times.features(batch_size, depths, rows)
        return _Candidates(depths, capacity_tokens, features)
