"""How long real steps take, without waiting for the device."""

from __future__ import annotations

import time
from collections import Counter, deque
from typing import NamedTuple

import torch

from tetris_sglang.capacity import StepShape


class TimedStep(NamedTuple):
    shape: StepShape
    seconds: float


STEPS_THAT_COMPILE = 2
"""The first drafting steps of a kind that are not timed on CUDA: kernels are compiled in them, which takes hundreds of plain
steps."""


class StepClock:
    """Times steps from one's beginning to the next one's, with all that the scheduler does in between.

    A step counts if a step came directly before and directly after it: a prefill leaves work to both its neighbours. On
    CUDA the times are the device's between two events, read when both have passed.

    Args:
        on_cuda: whether a step runs on a CUDA stream.
        num_untimed: of the steps that draft, the first ones of each depth and of batches about as large, which do not count.
    """

    def __init__(self, on_cuda: bool, num_untimed: int = 0) -> None:
        self._on_cuda, self._num_untimed = on_cuda, num_untimed
        self._num_seen: Counter[tuple[int, int]] = Counter()
        self._last: tuple[StepShape, float | torch.cuda.Event] | None = None
        self._is_first = True
        self._pending: deque[tuple[StepShape, torch.cuda.Event, torch.cuda.Event]] = deque()

    def begin(self) -> list[TimedStep]:
        """A step begins. Returns steps whose times have become known."""
        self._began_at = self._now()
        finished = []
        if self._last is not None and not self._is_first and self._counts(self._last[0]):
            shape, began_at = self._last
            if self._on_cuda:
                self._pending.append((shape, began_at, self._began_at))
            else:
                finished.append(TimedStep(shape, self._began_at - began_at))
        self._is_first = self._last is None
        while self._pending and self._pending[0][2].query():
            shape, start, end = self._pending.popleft()
            finished.append(TimedStep(shape, start.elapsed_time(end) / 1e3))
        return finished

    def describe(self, shape: StepShape) -> None:
        """What the step is that has just begun."""
        self._last = (shape, self._began_at)

    def _counts(self, shape: StepShape) -> bool:
        if shape.depth == 0:
            return True
        kind = shape.depth, shape.batch_size.bit_length()
        self._num_seen[kind] += 1
        return self._num_seen[kind] > self._num_untimed

    def interrupt(self) -> None:
        """Something else runs before the next step."""
        self._last = None

    def _now(self) -> float | torch.cuda.Event:
        if not self._on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
