"""Which steps are timed."""

from __future__ import annotations

import pytest

from tetris_sglang.capacity import StepShape
from tetris_sglang.runtime.planning import clock as step_clock
from tetris_sglang.runtime.planning.clock import StepClock, TimedStep


@pytest.fixture
def now(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(step_clock.time, "perf_counter", lambda: now[0])
    return now


def take(clock: StepClock, now: list[float], shape: StepShape, seconds: float) -> list[TimedStep]:
    finished = clock.begin()
    clock.describe(shape)
    now[0] += seconds
    return finished


def test_the_first_steps_of_a_kind_are_not_timed(now):
    clock, plain, deep, larger = StepClock(False, 2), StepShape(2, 0, 2), StepShape(3, 2, 9), StepShape(4, 0, 4)
    timed = [step for shape in [plain] * 5 + [deep] * 4 + [larger] * 3 for step in take(clock, now, shape, 1.0)]
    # Of the plain ones the first, as nothing came before it.
    assert [step.shape for step in timed] == [plain] * 4 + [deep] * 2 + [larger] * 2


def test_only_steps_between_steps_are_timed(now):
    clock, shapes = StepClock(on_cuda=False), [StepShape(1, 0, rows) for rows in range(1, 8)]

    def step(shape: StepShape, seconds: float) -> list[TimedStep]:
        return take(clock, now, shape, seconds)

    assert step(shapes[0], 1.0) == []
    # The first one after something else is not counted.
    assert step(shapes[1], 2.0) == []
    assert step(shapes[2], 3.0) == [TimedStep(shapes[1], 2.0)]
    clock.interrupt()
    now[0] += 50.0
    assert step(shapes[3], 4.0) == []
    assert step(shapes[4], 5.0) == []
    assert step(shapes[5], 6.0) == [TimedStep(shapes[4], 5.0)]
