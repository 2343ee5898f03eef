"""Automatic capacity on recorded steps."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / "benchmarks")]

import bench_auto as bench

from tetris_sglang.capacity import StepPlan, StepShape, StepTimeModel


def make_case(draft="eagle3, temperature 0", **others):
    return bench.Case(**({"draft": draft, "batch_size": 2, "num_steps": 40, "num_servers": 2, "noise": 0.1} | others))


def test_every_draft_has_its_trace():
    for trace, _ in bench.DRAFTS.values():
        depths, survival, accepted = bench.read_requests(trace)[0]
        assert depths.shape == survival.shape == accepted.shape
        assert depths.shape[1] == bench.LIMITS.count_nodes(bench.NUM_STEPS)


def test_plain_decoding_emits_a_token_per_request_and_step(monkeypatch):
    monkeypatch.setattr(bench, "CURVE_DEVIATION", 0.0)
    model = StepTimeModel(bench.TIMED, max_rows=26, max_batch_size=2)
    expected = 2 / model.predict_step(StepShape(2, 0, 2, 2.0 * bench.MEAN_CONTEXT_TOKENS))
    requests = bench.read_requests("eagle3_comb")
    assert bench.serve(make_case(), requests, 0, StepPlan(0, 0)) == pytest.approx(expected)


def test_every_arm_meets_the_same_steps():
    """With all nodes verified, what is accepted is what the trace has."""
    requests = bench.read_requests("eagle3_comb")
    walked = bench.walk(requests, 2, np.random.default_rng([0, 2]))
    accepted = sum(int(next(walked)[2].sum()) for _ in range(40))
    whole = StepPlan(bench.NUM_STEPS, 2 * bench.LIMITS.count_nodes(bench.NUM_STEPS))
    speeds = [bench.serve(make_case(draft), requests, 0, whole) for draft in ("eagle3, temperature 0", "useless")]
    assert speeds[0] / speeds[1] == pytest.approx((80 + accepted) / 80)


def test_automatic_capacity_leaves_a_useless_draft_alone():
    """And is held against the best fixed plan."""
    found = bench.measure(make_case("useless"))
    assert found["best_fixed_gain"] < 0.9 < found["gain_least"] <= found["gain"] < 1
