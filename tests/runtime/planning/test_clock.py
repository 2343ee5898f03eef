"""Which steps are timed."""

from __future__ import annotations

from tetris_sglang.capacity import StepShape
from tetris_sglang.runtime.planning import clock as step_clock
from tetris_sglang.runtime.planning.clock import StepClock, TimedStep


def test_only_steps_between_steps_are_timed(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(step_clock.time, "perf_counter", lambda: now[0])
    clock, shapes = StepClock(on_cuda=False), [StepShape(1, 0, rows) for rows in range(1, 8)]

    def step(shape: StepShape, seconds: float) -> list[TimedStep]:
        finished = clock.begin()
        clock.describe(shape)
        now[0] += seconds
        return finished

    assert step(shapes[0], 1.0) == []
    # The first one after something else is not counted.
    assert step(shapes[1], 2.0) == []
    assert step(shapes[2], 3.0) == [TimedStep(shapes[1], 2.0)]
    clock.interrupt()
    now[0] += 50.0
    assert step(shapes[3], 4.0) == []
    assert step(shapes[4], 5.0) == []
    assert step(shapes[5], 6.0) == [TimedStep(shapes[4], 5.0)]
