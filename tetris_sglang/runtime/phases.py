"""Where a step's time goes."""

from __future__ import annotations

import time
from collections import defaultdict
from contextlib import contextmanager, nullcontext

_IDLE_SECONDS = 0.5  # a longer pause between two steps is waiting for requests, not host work


class PhaseTimer:
    """Sums the wall time of a step's phases; does nothing unless enabled.

    `host` is the time between two steps: the scheduler's own work, and on a host without a GPU also prefill batches.
    On an asynchronous device the phases show launch time, not device time.
    """

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._num_steps = 0
        self._step_ended_at: float | None = None

    def __call__(self, phase: str):
        return self._measure(phase) if self._enabled else nullcontext()

    @contextmanager
    def _measure(self, phase: str):
        started_at = time.perf_counter()
        yield
        self._seconds[phase] += time.perf_counter() - started_at

    def begin_step(self) -> None:
        if self._enabled and self._step_ended_at is not None:
            pause = time.perf_counter() - self._step_ended_at
            if pause < _IDLE_SECONDS:
                self._seconds["host"] += pause

    def end_step(self) -> None:
        if self._enabled:
            self._num_steps += 1
            self._step_ended_at = time.perf_counter()

    def summarise(self) -> dict[str, float]:
        """Milliseconds per step of each phase; empty when not enabled or before the first step."""
        return {
            f"{phase}_ms": 1e3 * s / self._num_steps for phase, s in self._seconds.items() if self._num_steps
        }
