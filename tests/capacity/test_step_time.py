"""The model of step times: seeds, corrections, outliers, what was never used."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tetris_sglang.capacity import PassTimes, StepShape, StepTimeModel
from tetris_sglang.capacity.step_time import interpolate

SEED = PassTimes(
    target_s={1: 0.010, 2: 0.0105, 4: 0.011, 8: 0.013, 16: 0.018, 32: 0.028, 64: 0.050},
    window_s={1: 0.0010, 4: 0.0012, 16: 0.0020},
    branch_s={1: 0.0008, 4: 0.0010, 16: 0.0016},
    context_s=1e-7,
)


def make_model() -> StepTimeModel:
    return StepTimeModel(SEED, max_rows=160, max_batch_size=16)


def true_seconds(shape: StepShape) -> float:
    """A machine unlike the seeds: slower by a third, with host time of its own and dearer drafts."""
    target = 1.3 * (0.009 + 0.0007 * shape.rows)
    drafts = (shape.depth > 0) * (0.0018 + 0.0001 * shape.batch_size) + max(0, shape.depth - 1) * (
        0.0014 + 0.00006 * shape.batch_size
    )
    return target + drafts + 0.001 + 0.0002 * shape.batch_size


def test_disturbed_passes_take_no_longer_than_larger_or_repeated_ones():
    """Two passes of 2 rows bound one of 4, one of 16 bounds one of 8; from the largest two on the slope goes on."""
    times = {1: 0.010, 2: 0.011, 4: 0.050, 8: 0.040, 16: 0.032, 32: 0.040}
    bounded = interpolate(np.array([1, 2, 4, 8, 16, 32, 48]), times)
    assert bounded == pytest.approx([0.010, 0.011, 0.022, 0.032, 0.032, 0.040, 0.048])


def test_starts_at_the_seeds():
    model = make_model()
    plain = model.predict_step(StepShape(4, 0, 4))
    assert plain == pytest.approx(0.011, rel=0.1)
    assert model.predict_step(StepShape(4, 3, 12)) == pytest.approx(0.0155 + 0.0012 + 2 * 0.0010, rel=0.1)
    # 160 rows were not timed: the last slope goes on.
    assert model.predict_step(StepShape(16, 0, 160)) == pytest.approx(0.116, rel=0.1)


def test_learns_a_machine_unlike_the_seeds():
    """Also where it was never used: other batch sizes, depths and capacities than those observed."""
    model, rng = make_model(), np.random.default_rng(0)
    seen = [StepShape(16, 3, 40 + 4 * i) for i in range(4)] + [StepShape(16, 0, 16), StepShape(2, 5, 8)]
    before = abs(model.predict_step(StepShape(8, 4, 30)) / true_seconds(StepShape(8, 4, 30)) - 1)
    for i in range(300):
        shape = seen[i % len(seen)]
        model.observe(shape, true_seconds(shape) * np.exp(0.08 * rng.normal()))
    for shape in seen:
        assert model.predict_step(shape) == pytest.approx(true_seconds(shape), rel=0.04)
    unseen = StepShape(8, 4, 30)
    assert before > 0.2
    assert model.predict_step(unseen) == pytest.approx(true_seconds(unseen), rel=0.08)
    assert model.relative_error < 0.15


@pytest.mark.parametrize("seed", [SEED, PassTimes(SEED.target_s)], ids=["model", "n-grams"])
def test_what_drafting_takes_beside_its_passes_is_not_taken_for_the_targets(seed):
    """As on two cores with a head: a tenth of a plain step, which is looked at once in a hundred steps."""
    model, rng = StepTimeModel(seed, max_rows=160, max_batch_size=16), np.random.default_rng(3)
    exact = StepTimeModel(seed, max_rows=160, max_batch_size=16)

    def seconds(shape: StepShape) -> float:
        plain = exact.predict_step(shape._replace(depth=0))
        return plain + (shape.depth > 0) * (0.0016 + 0.0012 * bool(seed.window_s))

    for i in range(600):
        batch_size = (4, 4, 4, 3, 2)[i % 5]
        plain = StepShape(batch_size, 0, batch_size)
        shape = plain if i % 100 == 50 else StepShape(batch_size, 1, 2 * batch_size + i % 3)
        model.observe(shape, seconds(shape) * np.exp(0.05 * rng.normal()))
    plain = StepShape(4, 0, 4)
    assert model.predict_step(plain) == pytest.approx(seconds(plain), rel=0.06)


@pytest.mark.parametrize("every", [40, 12])
def test_late_steps_that_stand_alone_do_not_count(every):
    """12: a server that is suspended every few seconds, as in the bench's turns."""
    disturbed, quiet = make_model(), make_model()
    rng = np.random.default_rng(1)
    shape = StepShape(8, 2, 24)
    for i in range(400):
        seconds = true_seconds(shape) * np.exp(0.05 * rng.normal())
        quiet.observe(shape, seconds)
        disturbed.observe(shape, 30 * seconds if i % every == 0 else seconds)
    assert disturbed.predict_step(shape) == pytest.approx(quiet.predict_step(shape), rel=0.01)
    assert disturbed.predict_step(shape) == pytest.approx(true_seconds(shape), rel=0.08)


def test_pauses_do_not_count_also_one_after_the_other():
    model, shape = make_model(), StepShape(8, 2, 24)
    for _ in range(100):
        model.observe(shape, true_seconds(shape))
    before = model.predict_step(shape)
    for _ in range(3):
        model.observe(shape, 50 * true_seconds(shape))
        assert model.predict_step(shape) == before
    # A machine that stays so slow is believed.
    model.observe(shape, 50 * true_seconds(shape))
    assert model.predict_step(shape) > before


def test_follows_a_machine_that_changes():
    model = make_model()
    shape = StepShape(8, 2, 24)
    for _ in range(3000):
        model.observe(shape, true_seconds(shape))
    for _ in range(150):
        model.observe(shape, 1.4 * true_seconds(shape))
    assert model.predict_step(shape) == pytest.approx(1.4 * true_seconds(shape), rel=0.05)


def test_context_costs_what_it_is_seen_to_cost():
    model = make_model()
    for i in range(300):
        shape = StepShape(8, 0, 8, context_tokens=1000.0 + 9000 * (i % 2))
        model.observe(shape, 0.013 + 3e-7 * shape.context_tokens)
    short, long = (model.predict_step(StepShape(8, 0, 8, context)) for context in (1000.0, 10000.0))
    assert long - short == pytest.approx(3e-7 * 9000, rel=0.15)


def test_many_plans_at_once_are_predicted_as_one_by_one():
    model = make_model()
    depths, rows = np.array([0, 1, 3, 5, 5]), np.array([4, 7, 12, 4, 24])
    together = model.predict(model.features(4, depths, rows), 200.0)
    single = [model.predict_step(StepShape(4, int(d), int(r), 200.0)) for d, r in zip(depths, rows, strict=True)]
    assert together == pytest.approx(single)


def test_no_draft_model_has_no_draft_passes():
    model = StepTimeModel(PassTimes({1: 0.01, 8: 0.02}), max_rows=48, max_batch_size=8)
    assert model.predict_step(StepShape(4, 5, 12)) == pytest.approx(model.predict_step(StepShape(4, 1, 12)))


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_refuses_what_is_no_time(seconds):
    with pytest.raises(ValueError, match="finite and above 0"):
        make_model().observe(StepShape(1, 0, 1), seconds)


def test_pass_times_survive_json():
    assert PassTimes.from_json(json.loads(json.dumps(SEED.to_json()))) == SEED
