"""Where a step's time goes."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch

_IDLE_SECONDS = 0.5  # a longer pause between two steps is waiting for requests, not host work


class PhaseTimer:
    """Sums the time of a step's phases; does nothing unless enabled.

    On a CPU a phase is the wall time of its code. On CUDA it is the device's time between two events, read when both have
    passed: no sync. `host` is the time between two steps: the scheduler's own work and, on a CPU, prefill batches of other
    requests; on CUDA it is measured on the host, where it may run beside the device's work.

    Args:
        report: told of every phase's name and seconds.
    """

    def __init__(self, enabled: bool, report: Callable[[str, float], None], on_cuda: bool = False) -> None:
        self._enabled, self._report, self._on_cuda = enabled, report, on_cuda
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._pending: deque[tuple[str, torch.cuda.Event, torch.cuda.Event]] = deque()
        self._num_steps = 0
        self._step_ended_at: float | None = None

    def __call__(self, phase: str):
        if not self._enabled:
            return nullcontext()
        return self._measure_on_device(phase) if self._on_cuda else self._measure(phase)

    @contextmanager
    def _measure(self, phase: str) -> Iterator[None]:
        started_at = time.perf_counter()
        yield
        self._add(phase, time.perf_counter() - started_at)

    @contextmanager
    def _measure_on_device(self, phase: str) -> Iterator[None]:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        yield
        end.record()
        self._pending.append((phase, start, end))

    def begin_step(self) -> None:
        if self._enabled and self._step_ended_at is not None:
            pause = time.perf_counter() - self._step_ended_at
            if pause < _IDLE_SECONDS:
                self._add("host", pause)

    def end_step(self) -> None:
        if self._enabled:
            self._num_steps += 1
            self._step_ended_at = time.perf_counter()
            self._collect()

    def _collect(self) -> None:
        while self._pending and self._pending[0][2].query():
            phase, start, end = self._pending.popleft()
            self._add(phase, start.elapsed_time(end) / 1e3)

    def _add(self, phase: str, seconds: float) -> None:
        self._seconds[phase] += seconds
        self._report(phase, seconds)

    def summarise(self) -> dict[str, float]:
        """Milliseconds per step of each phase; empty when not enabled or before the first step."""
        self._collect()
        return {f"{phase}_ms": 1e3 * s / self._num_steps for phase, s in self._seconds.items() if self._num_steps}
