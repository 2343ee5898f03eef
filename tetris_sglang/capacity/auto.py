"""A capacity and a depth that set themselves, with plain decoding as one of the choices.

Each step maximises expected tokens emitted per second,

    (B + expected accepted drafts(depth, C)) / t(B, depth, B + C),

over plain decoding (depth 0, C = 0) and all depths and capacities (docs/capacity.md derives it). Both parts come from
earlier steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from tetris_sglang.capacity.accept_curves import AcceptCurves
from tetris_sglang.capacity.policy import DraftLimits, StepPlan
from tetris_sglang.capacity.step_time import PATIENCE, StepShape, StepTimeModel, is_suspension

_GAIN_TO_ENTER = 1.06
_GAIN_TO_LEAVE = 1.02
"""Of speculation against plain decoding: between them nothing changes. Of many plans whose times are known to a few hundredths
the best one is the luckiest, too: what looks 2% faster is slower (docs/lessons.md)."""
_MIN_STEPS = 4
"""Steps of one kind before the other kind may follow."""
_PLAIN_STEPS_TOGETHER = 4
"""Plain steps of one batch size that are planned, and learnt from, once: next to what decodes, planning them one by one would
cost a hundredth."""
_FIRST_LOOK_AFTER, _LAST_LOOK_AFTER = 4, 64
"""Speculative steps after which one does something else: each look doubles them. In turns it goes to the full depth and
verifies twice as much, to see what lies there and what it takes, and is a plain one, whose time nothing else shows."""
_CLEAR_GAIN = 1.5
"""Above which no plain step is worth a look."""
_DRAW_EVERY = 8
"""Steps planned with one draw of the uncertain step times (Thompson sampling): plans that may well be faster get tried, and
those known to be slower do not."""
_ALLOWED_SHARE = 0.003
"""Of all time, what may be lost against plain decoding: the price of noticing that a draft has become useful."""
_ALLOWED_OF_GAIN = 0.2
"""And of what is expected above `_GAIN_TO_ENTER`, of plain steps: where speculation should pay, waiting costs that. What is
expected in vain is soon expected no more."""
_FIRST_ALLOWANCE, _MAX_ALLOWANCE, _PLAIN_ALLOWANCE, _MIN_ALLOWANCE = 0.5, 8.0, 3.0, -2.0
"""In plain steps: what a new server may lose beside that, what speculation can save up, what it leaves to plain decoding, and
how far a slow step can take it."""
_FIRST_LESSONS = 2.0
"""Plain steps, times their requests, that a new server may lose besides: so much has to be seen of a draft to judge it."""
_WORTH_A_LESSON = 0.95
"""The expected gain below which it is judged already: bad luck and step times a little off do not look like that."""

_PROBED_DEPTH = 1
"""Where plain decoding looks at the draft: the first tokens say whether it is of use, and deeper ones cost a pass each."""
_MAX_CORRECTION = 2.0
"""Plain steps that one measured time may differ by from what was charged for it: one that was disturbed must not keep a draft
from being tried for hundreds of steps."""


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
        self._count_rows: Callable[[int, int], int] = int.__add__
        """Of the server's `DraftLimits`."""
        self._speculates = True
        self._steps_in_mode = 0
        self._steps_since_look = 0
        self._looks_deep = False
        self._look_after = _FIRST_LOOK_AFTER
        self._allowance, self._lessons = _FIRST_ALLOWANCE, _FIRST_LESSONS
        """Plain steps' time that may still be lost, and what is left of `_FIRST_LESSONS`."""
        self._random = np.random.default_rng(0)
        self._drawn: np.ndarray | None = None
        self._steps_with_drawn = 0
        self._planned_size = 0
        self._best = StepPlan(0, 0)
        """The best speculative plan at the last evaluation, which was for that batch size; 0: more is known by now."""
        self._plain_steps = 0
        """One after the other, as far as their times have come in."""
        self._num_late = 0
        """Of steps that followed plain ones, those in a row that were suspended."""
        self._probe_price = 0.0
        """Plain steps that the last step after plain ones took longer than one, as far as a debt reaches."""
        self._size_class = 0
        self._others: dict[int, float] = {}
        """The allowances of batches of about other sizes: what did not pay there says little here."""
        self.expected_gain = 1.0
        """Of the best speculative plan against plain decoding, at the last choice."""
        self.expected_accepted = 0.0
        """Drafts per request that this plan should have accepted."""
        self.expected_seconds = 0.0, 0.0
        """Of a plain step, and of that plan's."""

    def choose(self, batch_size: int, limits: DraftLimits, context_tokens: float = 0.0) -> StepPlan:
        self._count_rows = limits.count_rows
        if (size_class := batch_size.bit_length()) != self._size_class:
            self._others[self._size_class] = self._allowance
            self._size_class = size_class
            self._allowance = self._others.get(size_class, max(self._allowance, _FIRST_ALLOWANCE))
            if not self._speculates:
                self._allowance = min(self._allowance, _PLAIN_ALLOWANCE)
        is_known = not self._speculates and batch_size == self._planned_size
        if not is_known or self._steps_in_mode % _PLAIN_STEPS_TOGETHER == 0:
            self._evaluate(batch_size, limits, context_tokens)
        return self._keep_or_change(self._best, batch_size, context_tokens, limits)

    def _evaluate(self, batch_size: int, limits: DraftLimits, context_tokens: float) -> None:
        """Find the best speculative plan, and what it gains."""
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
        emitted = 1 + np.minimum(accepted, found.depths)
        value = emitted / seconds
        best = 1 + int(value[1:].argmax())
        self.expected_gain = float(value[best] / value[0])
        self.expected_accepted = float(emitted[best] - 1)
        self.expected_seconds = float(seconds[0]), float(seconds[best])
        self._planned_size = batch_size
        self._best = StepPlan(int(found.depths[best]), int(found.capacity_tokens[best]))

    def observe_time(self, shape: StepShape, seconds: float) -> float | None:
        """Learn from a step's time. Returns what was predicted for it; None: one of several plain steps that nothing is learnt
        from."""
        is_plain, follows_plain = shape.depth == 0, self._plain_steps > 0
        self._plain_steps = self._plain_steps + 1 if is_plain else 0
        # The first one after others may be all that shows what a plain step takes.
        if is_plain and self._plain_steps % _PLAIN_STEPS_TOGETHER != 1:
            return None
        if is_plain or not follows_plain:
            # A device that is slower than was timed is slower for plain steps, too: what counts is what is believed now.
            price = self._price(shape)
            predicted = self.step_times.observe(shape, seconds)
            self._charge(self._price(shape) - price, shape.batch_size)
            return predicted
        # After plain steps the draft first reads what they emitted: no shape says how much. It is paid, and teaches nothing but
        # that such a step takes no longer.
        predicted = self.step_times.predict_step(shape)
        if seconds < predicted:
            self.step_times.observe(shape, seconds)
        self._num_late = self._num_late + 1 if is_suspension(predicted, seconds) else 0
        if not 0 < self._num_late <= PATIENCE:
            plain = self.step_times.predict_step(self._plain(shape))
            self._charge(min(max((seconds - predicted) / plain, -_MAX_CORRECTION), _MAX_CORRECTION), shape.batch_size)
            self._probe_price = min(max(seconds / plain - 1, 0.0), -_MIN_ALLOWANCE)
        return predicted

    def begin_step(self, shape: StepShape) -> None:
        """A step of this shape begins: what it should take longer than a plain one is charged; `observe_time` corrects it."""
        share = _ALLOWED_SHARE
        if not self._speculates:
            share += _ALLOWED_OF_GAIN * max(0.0, self.expected_gain - _GAIN_TO_ENTER)
        self._allowance = min(self._allowance, _MAX_ALLOWANCE) + share
        self._charge(self._price(shape), shape.batch_size)

    def confirm(self, batch_size: int, expected: float | None, accepted: int) -> None:
        """Of one speculative step: what `AcceptCurves.observe` returned (None: not known), and what came true."""
        self._planned_size = 0
        if expected is not None:
            self.curves.confirm(expected, accepted)
        self._allowance += accepted / batch_size

    def _charge(self, plain_steps: float, batch_size: int) -> None:
        is_open = self.expected_gain > _WORTH_A_LESSON
        lesson = min(max(plain_steps, 0.0), self._lessons / batch_size) if is_open else 0.0
        self._lessons -= lesson * batch_size
        self._allowance = max(self._allowance + lesson - plain_steps, _MIN_ALLOWANCE)

    def _price(self, shape: StepShape) -> float:
        """Plain steps that such a step takes longer than a plain one."""
        if shape.depth == 0:
            return 0.0
        return max(0.0, self.step_times.predict_step(shape) / self.step_times.predict_step(self._plain(shape)) - 1)

    def _plain(self, shape: StepShape) -> StepShape:
        """A plain step of the same batch, which under CUDA graphs has more rows than requests, too."""
        return shape._replace(depth=0, rows=self._count_rows(shape.batch_size, 0))

    def _keep_or_change(self, plan: StepPlan, batch_size: int, context_tokens: float, limits: DraftLimits) -> StepPlan:
        self._steps_in_mode += 1
        if self._speculates:
            is_slower = self.expected_gain < _GAIN_TO_LEAVE and self._steps_in_mode > _MIN_STEPS
            if is_slower or self._allowance < 0:
                self._change_mode()
                return StepPlan(0, 0)
            self._steps_since_look += 1
            if self._steps_since_look < self._look_after:
                return plan
            self._steps_since_look = 0
            self._look_after = min(2 * self._look_after, _LAST_LOOK_AFTER)
            self._looks_deep = not self._looks_deep or self.expected_gain > _CLEAR_GAIN
            if not self._looks_deep:
                return StepPlan(0, 0)
            return limits.fit(batch_size, limits.num_steps, max(1, 2 * plan.capacity_tokens))
        if self._steps_in_mode > _MIN_STEPS and self._allowance > 0:
            if self.expected_gain > _GAIN_TO_ENTER:
                self._change_mode()
                return plan
            # One that brings in what it costs is followed by another.
            depth = next((depth for depth in limits.depths if depth >= _PROBED_DEPTH), limits.num_steps)
            probe = limits.fit(batch_size, depth, batch_size)
            price = self._price(limits.shape_of(probe, batch_size, context_tokens))
            if self._allowance >= max(price, self._probe_price):
                return probe
        return StepPlan(0, 0)

    def _change_mode(self) -> None:
        self._speculates = not self._speculates
        self._steps_in_mode = 0
        if not self._speculates:
            self._allowance = min(self._allowance, _PLAIN_ALLOWANCE)

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
