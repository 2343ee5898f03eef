"""What the planner learns from steps."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tetris_sglang.capacity import (
    AcceptCurves,
    AutoCapacity,
    DraftLimits,
    PassTimes,
    StepPlan,
    StepTimeModel,
    capacity_shares,
)
from tetris_sglang.drafting import make_chains
from tetris_sglang.runtime.planning.planner import StepPlanner
from tetris_sglang.runtime.ranks import Ranks
from tetris_sglang.runtime.requests.weights import Wishes

NUM_STEPS = 6


LIMITS = DraftLimits(range(1, NUM_STEPS + 1), lambda depth: depth)


# A target whose pass is bound by memory up to some 32 rows, and a draft of a tenth of its cost.
SEED = PassTimes(
    target_s={rows: 0.020 + 0.0005 * max(0, rows - 32) + 0.0001 * rows for rows in (1, 2, 4, 8, 16, 32, 64, 128, 256)},
    window_s=dict.fromkeys((1, 4, 16, 64), 0.0022),
    branch_s=dict.fromkeys((1, 4, 16, 64), 0.002),
)


def make_auto(seed: PassTimes = SEED) -> AutoCapacity:
    return AutoCapacity(
        StepTimeModel(seed, max_rows=256, max_batch_size=64),
        AcceptCurves(NUM_STEPS, capacity_shares(NUM_STEPS)),
    )


@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize("batch_size", [1, 8, 32])
def test_late_results_do_not_count_against_the_draft(batch_size, lag):
    """Under overlap scheduling a step's result comes after later steps began, plain ones among them."""
    policy = AutoCapacity(
        StepTimeModel(PassTimes({1: 1e-2}, {1: 1e-3}, {1: 1e-3}), max_rows=256, max_batch_size=32),
        AcceptCurves(4, capacity_shares(4)),
    )
    policy.choose = lambda *_: StepPlan(0, 0) if len(accepted) % 3 == 2 else StepPlan(4, 3 * batch_size)
    planner = StepPlanner(policy, LIMITS, SimpleNamespace(set=lambda *_: None), "cpu", Ranks())
    batch = SimpleNamespace(reqs=[None] * batch_size, seq_lens_sum=0)
    probs = torch.tensor([0.9, 0.8, 0.7, 0.6]).expand(batch_size, 4)
    proposal = make_chains(torch.zeros((batch_size, 4), dtype=torch.int64), probs, probs)
    expected = batch_size * (0.9 + 0.9 * 0.8 + 0.9 * 0.8 * 0.7)
    accepted = []
    for step in range(60):
        plan = planner.plan(batch)
        if plan.depth:
            planner.after_draft(proposal, plan)
        accepted.append(0.5 * expected if plan.depth else 0)
        if step >= lag:
            planner.after_result(accepted[step - lag])
    assert policy.curves.confidence == pytest.approx(0.5, rel=0.05 if batch_size > 1 else 0.1)


@pytest.mark.parametrize(("weights", "mean_weight"), [([1.0, 0.0], 1.0), ([4.0, 0.0], 4.0)])
def test_drafts_of_requests_that_opted_out_are_not_expected_to_be_accepted(weights, mean_weight):
    """They cannot be selected: were they expected, the draft would be blamed. A deadline class is not worth more tokens."""
    policy = make_auto()
    planner = StepPlanner(policy, LIMITS, SimpleNamespace(set=lambda *_: None), "cpu", Ranks())
    policy.choose = lambda *_: StepPlan(NUM_STEPS, NUM_STEPS)
    batch = SimpleNamespace(reqs=[None] * 2, seq_lens_sum=0)
    probs, taking = torch.full((2, NUM_STEPS), 0.7), sum(weight > 0 for weight in weights)
    wishes = Wishes(torch.tensor(weights), taking, mean_weight)
    for _ in range(60):
        planner.after_draft(
            make_chains(torch.zeros((2, NUM_STEPS), dtype=torch.int64), probs, probs),
            planner.plan(batch, wishes),
            wishes,
        )
        best = probs.cumprod(dim=1)[:taking].flatten().sort(descending=True).values[:NUM_STEPS]
        planner.after_result(float(best.sum()))
    assert policy.curves.confidence == pytest.approx(1.0, abs=0.1)


def test_a_result_still_to_come_stays_with_its_step_when_the_draft_is_replaced(monkeypatch):
    confirmed = []
    monkeypatch.setattr(AutoCapacity, "choose", lambda *_: StepPlan(2, 2))
    monkeypatch.setattr(AutoCapacity, "confirm", lambda _, *given: confirmed.append(given))
    planner = StepPlanner(make_auto(), LIMITS, SimpleNamespace(set=lambda *_: None), "cpu", Ranks())
    batch = SimpleNamespace(reqs=[None], seq_lens_sum=0)

    def draft(prob: float) -> None:
        probs = torch.full((1, 2), prob)
        planner.after_draft(make_chains(torch.zeros((1, 2), dtype=torch.int64), probs, probs), planner.plan(batch))

    draft(0.9)
    planner.forget()
    draft(0.5)
    planner.after_result(2)
    planner.after_result(1)
    # Of the old draft's step nothing is expected any more.
    assert confirmed == [(1, None, 2), (1, pytest.approx(0.75), 1)]


@pytest.mark.parametrize("known, lens, expected", [(700, None, 700), (None, [300, 400], 700), (None, None, 0)])
def test_context_is_counted_also_when_requests_have_just_left(known, lens, expected):
    """SGLang forgets the sum of the lengths whenever requests leave or join."""
    policy = AutoCapacity(
        StepTimeModel(PassTimes({1: 1e-2}, {1: 1e-3}, {1: 1e-3}), max_rows=256, max_batch_size=32),
        AcceptCurves(4, capacity_shares(4)),
    )
    seen = []
    policy.choose = lambda batch_size, limits, context_tokens: seen.append(context_tokens) or StepPlan(0, 0)
    planner = StepPlanner(policy, LIMITS, SimpleNamespace(set=lambda *_: None), "cpu", Ranks())
    lens = None if lens is None else torch.tensor(lens)
    planner.plan(SimpleNamespace(reqs=[None] * 2, seq_lens_sum=known, seq_lens_cpu=lens))
    assert seen == [expected]
