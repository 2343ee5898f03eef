"""The automatic capacity against every fixed setting, on a simulated server whose true times and acceptances are known."""

from __future__ import annotations

import dataclasses
import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tetris_sglang.capacity import (
    AcceptCurves,
    AutoCapacity,
    DraftLimits,
    PassTimes,
    StepPlan,
    StepShape,
    StepTimeModel,
    capacity_shares,
    measure_curves,
)
from tetris_sglang.drafting import make_chains
from tetris_sglang.runtime.planning import pass_timing
from tetris_sglang.runtime.planning.planner import StepPlanner
from tetris_sglang.runtime.ranks import Ranks
from tetris_sglang.runtime.requests.weights import Wishes
from tetris_sglang.selection import select_prefixes

NUM_STEPS = 6
LIMITS = DraftLimits(range(1, NUM_STEPS + 1), lambda depth: depth)
# A target whose pass is bound by memory up to some 32 rows, and a draft of a tenth of its cost.
SEED = PassTimes(
    target_s={rows: 0.020 + 0.0005 * max(0, rows - 32) + 0.0001 * rows for rows in (1, 2, 4, 8, 16, 32, 64, 128, 256)},
    window_s=dict.fromkeys((1, 4, 16, 64), 0.0022),
    branch_s=dict.fromkeys((1, 4, 16, 64), 0.002),
)


class Server:
    """Steps with true times unlike the seeds, and drafts with the given mean probability per token.

    honesty: accepted drafts per expected one.
    """

    def __init__(self, draft_quality: float, honesty: float = 1.0) -> None:
        self._quality, self._honesty = draft_quality, honesty
        self._slowness, self._noise = 1.25, 0.05
        self._random = np.random.default_rng(0)

    def seconds(self, batch_size: int, plan: StepPlan) -> float:
        rows = batch_size + plan.capacity_tokens
        target = 0.020 + 0.0007 * max(0, rows - 24) + 0.0001 * rows
        draft = (plan.depth > 0) * 0.003 + max(0, plan.depth - 1) * 0.0026
        return self._slowness * (target + draft) + 0.0015

    def survival(self, batch_size: int, depth: int) -> torch.Tensor:
        spread = 2.0
        probs = self._random.beta(spread * self._quality, spread * (1 - self._quality), (batch_size, depth))
        return torch.from_numpy(probs.cumprod(axis=1)).float()

    def run(self, policy, batch_sizes) -> tuple[float, list[StepPlan]]:
        """Tokens per second over steps of the given batch sizes, and the plans."""
        tokens, total_s, plans = 0.0, 0.0, []
        for batch_size in batch_sizes:
            plan, accepted = policy.choose(batch_size, LIMITS), 0.0
            shape = StepShape(batch_size, plan.depth, batch_size + plan.capacity_tokens)
            if isinstance(policy, AutoCapacity):
                policy.begin_step(shape)
            if plan.depth:
                survival = self.survival(batch_size, plan.depth)
                lens = select_prefixes(survival, plan.capacity_tokens)
                selected = torch.arange(plan.depth) < lens[:, None]
                accepted = self._honesty * float((survival * selected).sum())
                if isinstance(policy, AutoCapacity):
                    curves = measure(policy, survival)
                    expected = policy.curves.observe(curves, batch_size, plan.capacity_tokens)
                    policy.confirm(plan.depth, batch_size, expected, accepted)
            plans.append(plan)
            seconds = self.seconds(batch_size, plan)
            tokens, total_s = tokens + batch_size + accepted, total_s + seconds
            if isinstance(policy, AutoCapacity):
                policy.step_times.observe(shape, seconds * np.exp(self._noise * self._random.normal()))
        return tokens / total_s, plans


def measure(policy: AutoCapacity, survival: torch.Tensor) -> np.ndarray:
    depth = survival.shape[1]
    shares = torch.tensor(policy.curves.shares, dtype=torch.float32)
    return measure_curves(survival, torch.arange(1, depth + 1), depth, shares).numpy()


class Fixed:
    def __init__(self, depth: int, per_request: float) -> None:
        self._depth, self._per_request = depth, per_request

    def choose(self, batch_size: int, limits: DraftLimits) -> StepPlan:
        return StepPlan(self._depth, round(self._per_request * batch_size)) if self._depth else StepPlan(0, 0)


# As timed while another process was busy: rows and passes far too dear.
CONTENDED = PassTimes(
    target_s={rows: 0.020 + 0.003 * rows for rows in SEED.target_s},
    window_s=dict.fromkeys(SEED.window_s, 0.009),
    branch_s=dict.fromkeys(SEED.branch_s, 0.006),
)


def make_auto(seed: PassTimes = SEED) -> AutoCapacity:
    return AutoCapacity(
        StepTimeModel(seed, max_rows=256, max_batch_size=64),
        AcceptCurves(NUM_STEPS, capacity_shares(NUM_STEPS)),
    )


def speed_of(draft_quality: float, batch_size: int, plan: StepPlan) -> float:
    """Tokens per second with one fixed plan, many steps at once."""
    server, num_steps, accepted = Server(draft_quality), 4000 // batch_size + 200, 0.0
    if plan.depth:
        survival = server.survival(batch_size * num_steps, plan.depth).view(num_steps, -1)
        # The best are prefixes.
        accepted = float(survival.topk(plan.capacity_tokens, dim=1).values.sum(dim=1).mean())
    return (batch_size + accepted) / server.seconds(batch_size, plan)


def best_fixed(draft_quality: float, batch_size: int) -> float:
    plans = [StepPlan(0, 0)]
    for depth in range(1, NUM_STEPS + 1):
        plans += [StepPlan(depth, round(c * batch_size)) for c in (0.5, 1, 2, 3, 4, 5, 6) if c <= depth]
    return max(speed_of(draft_quality, batch_size, plan) for plan in plans if (plan.depth > 0) == (plan.capacity_tokens > 0))


@pytest.mark.parametrize("batch_size", [1, 4, 16, 64])
@pytest.mark.parametrize("draft_quality", [0.05, 0.5, 0.8, 0.98])
def test_is_about_as_fast_as_the_best_fixed_setting(draft_quality, batch_size):
    """The seeds say too little by a fifth, and at first nothing is known of the draft."""
    server, policy, best = Server(draft_quality), make_auto(), best_fixed(draft_quality, batch_size)
    assert server.run(policy, [batch_size] * 300)[0] > 0.9 * best
    assert server.run(policy, [batch_size] * 1200)[0] > 0.96 * best


# As timed while another process was busy from the third size on.
DISTURBED = dataclasses.replace(
    SEED, target_s={rows: (2 if rows > 2 else 1) * seconds for rows, seconds in SEED.target_s.items()}
)


@pytest.mark.parametrize(
    ("seed", "share"),
    [pytest.param(CONTENDED, 0.93, id="contended"), pytest.param(DISTURBED, 0.9, id="disturbed")],
)
@pytest.mark.parametrize("batch_size", [1, 4, 16])
@pytest.mark.parametrize("draft_quality", [0.5, 0.8])
def test_seeds_far_off_are_overcome(draft_quality, batch_size, seed, share):
    """Where the seeds say that larger plans do not pay, nothing but trying them shows that they do."""
    server, policy, best = Server(draft_quality), make_auto(seed), best_fixed(draft_quality, batch_size)
    server.run(policy, [batch_size] * 400)
    assert server.run(policy, [batch_size] * 1000)[0] > share * best


def test_a_useless_draft_is_left_alone():
    speed, plans = Server(0.02).run(make_auto(), [16] * 2000)
    plain, _ = Server(0.02).run(Fixed(0, 0.0), [16] * 100)
    assert speed > 0.985 * plain
    assert sum(plan.depth > 0 for plan in plans[100:]) < 0.02 * 1900
    # But it is looked at now and then.
    assert any(plan.depth > 0 for plan in plans[100:])


@pytest.mark.parametrize("honesty", [0.02, 0.3])
@pytest.mark.parametrize("batch_size", [1, 4, 16, 64])
def test_a_new_server_does_not_pay_for_a_draft_that_is_far_too_sure(batch_size, honesty):
    """Its first users' answers are hardly later than plain decoding's; calibration has learnt nothing yet."""
    speed, _ = Server(0.9, honesty).run(make_auto(), [batch_size] * 350)
    plain, _ = Server(0.9).run(Fixed(0, 0.0), [batch_size] * 10)
    assert speed > 0.98 * plain


@pytest.mark.parametrize("batch_size", [1, 16])
def test_a_draft_that_is_far_too_sure_is_found_out(batch_size):
    """Before calibration has learnt anything."""
    _, plans = Server(0.9, honesty=0.02).run(make_auto(), [batch_size] * 150)
    assert sum(plan.depth > 0 for plan in plans) < 40
    assert sum(plan.depth > 0 for plan in plans[-40:]) <= 2


def test_a_draft_that_becomes_useful_is_noticed():
    server, policy = Server(0.02), make_auto()
    server.run(policy, [8] * 200)
    useful = Server(0.9)
    _, plans = useful.run(policy, [8] * 300)
    assert all(plan.depth > 0 for plan in plans[-20:])


@pytest.mark.parametrize("batch_size", [1, 16])
def test_texts_that_repeat_themselves_do_without_a_useless_draft(batch_size):
    """The texts begin to repeat themselves when the draft has long been left alone."""
    limits = DraftLimits(range(NUM_STEPS + 1), lambda depth: min(NUM_STEPS + 4, depth + 4), num_extension=4)
    policy = AutoCapacity(
        StepTimeModel(SEED, max_rows=256, max_batch_size=64),
        AcceptCurves(NUM_STEPS, capacity_shares(limits.count_nodes(NUM_STEPS))),
    )
    server = Server(0.02)

    def run(quality: float, num_steps: int) -> list[StepPlan]:
        """`quality`: of the texts' own tokens."""
        plans = []
        for _ in range(num_steps):
            plan = policy.choose(batch_size, limits)
            plans.append(plan)
            shape = StepShape(batch_size, plan.depth, batch_size + plan.capacity_tokens)
            policy.begin_step(shape)
            if plan.capacity_tokens:
                # The texts' tokens, which any depth has; the draft's are behind them and worth nothing.
                places = np.arange(limits.count_nodes(plan.depth))
                survival = torch.tensor(np.where(places < 4, quality ** (places + 1), 0.0)).float()
                curves = measure_curves(
                    survival.expand(batch_size, -1),
                    torch.tensor(np.maximum(places - 3, 0)),
                    plan.depth,
                    torch.tensor(policy.curves.shares, dtype=torch.float32),
                )
                expected = policy.curves.observe(curves.numpy(), batch_size, plan.capacity_tokens)
                policy.confirm(plan.depth, batch_size, expected, round(expected))
            policy.step_times.observe(shape, server.seconds(batch_size, plan))
        return plans

    alone = run(0.02, 200)
    assert sum(plan == StepPlan(0, 0) for plan in alone[100:]) > 85
    assert sum(plan.depth == 0 and plan.capacity_tokens > 0 for plan in alone[100:]) >= 5
    repeating = run(0.9, 100)
    # Next to nothing is left plain, and next to no pass is spent.
    assert sum(plan.capacity_tokens < batch_size for plan in repeating[40:]) <= 2
    assert sum(plan.depth > 0 for plan in repeating[40:]) <= 5
    assert run(0.0, 200)[-50:].count(StepPlan(0, 0)) > 40


@pytest.mark.parametrize("batch_size", [4, 16])
def test_a_draft_that_is_better_than_it_believes_is_found_beside_good_texts(batch_size):
    """Half of the requests have texts that are nearly always right, and know it; the draft is always right, and does not."""
    limits = DraftLimits(range(NUM_STEPS + 1), lambda depth: depth + 4, num_extension=4)
    policy = AutoCapacity(
        StepTimeModel(SEED, max_rows=256, max_batch_size=64),
        AcceptCurves(NUM_STEPS, capacity_shares(limits.count_nodes(NUM_STEPS))),
    )
    server, plans = Server(0.9), []
    shares = torch.tensor(policy.curves.shares, dtype=torch.float32)
    places = torch.arange(1, NUM_STEPS + 5)
    from_texts = (places - 4).clamp(min=0).expand(batch_size, -1)
    passes = torch.where(torch.arange(batch_size)[:, None] % 2 == 0, from_texts, places)
    believed = torch.where(passes == 0, 0.95, 0.6).cumprod(dim=1)
    for _ in range(200):
        plan = policy.choose(batch_size, limits)
        plans.append(plan)
        shape = StepShape(batch_size, plan.depth, batch_size + plan.capacity_tokens)
        policy.begin_step(shape)
        if plan.capacity_tokens:
            survival = believed * (passes <= plan.depth)
            curves = measure_curves(survival, passes, plan.depth, shares).numpy()
            expected = policy.curves.observe(curves, batch_size, plan.capacity_tokens)
            lens = select_prefixes(survival, plan.capacity_tokens)
            is_right = ((passes <= plan.depth) & (places <= lens[:, None])).float() * (0.95 if plan.depth == 0 else 1)
            policy.confirm(plan.depth, batch_size, expected, round(float(is_right.cumprod(dim=1).sum())))
        policy.step_times.observe(shape, server.seconds(batch_size, plan))
    # How deep is for calibration to find.
    assert sum(plan.depth > 0 for plan in plans[40:]) > 0.9 * 160


def test_load_up_and_down_without_flapping():
    """A sweep of the load up and down: plain where it pays, and few changes on the way."""
    sweep = [b for b in (1, 2, 4, 8, 16, 32, 64, 32, 16, 8, 4, 2, 1) for _ in range(150)]
    server = Server(0.45)
    server.run(policy := make_auto(), sweep)
    _, plans = server.run(policy, sweep)
    kinds = [plan.depth > 0 for plan in plans]
    changes = sum(a != b for a, b in itertools.pairwise(kinds))
    assert kinds[:50] == [True] * 50 and kinds[-50:] == [True] * 50
    assert sum(kinds[900:1050]) < 30, "64 requests leave no room for drafts of this quality"
    # Two, and two for every look and probe in between.
    assert changes <= 2 + 2 * 18
    # No cliff: at no load is it slower than plain decoding.
    for batch_size in (1, 8, 64):
        speed, _ = server.run(policy, [batch_size] * 200)
        plain, _ = server.run(Fixed(0, 0.0), [batch_size] * 20)
        assert speed > 0.98 * plain


def test_graph_tiers_are_filled():
    tiers = (8, 16, 32, 64, 96, 128)
    limits = DraftLimits(
        [NUM_STEPS],
        lambda depth: depth,
        lambda batch_size, rows: next((tier for tier in tiers if tier >= rows), None),
    )
    policy = make_auto()
    for batch_size in (3, 7, 16, 20):
        for _ in range(10):
            plan = policy.choose(batch_size, limits)
            rows = batch_size + plan.capacity_tokens
            assert plan.depth in (0, NUM_STEPS)
            assert plan.depth == 0 or rows in tiers or plan.capacity_tokens == batch_size * NUM_STEPS


# -- the curves ------------------------------------------------------------------------------------------------------


def test_curves_are_sums_of_the_best():
    survival = torch.tensor([[0.9, 0.8, 0.1], [0.6, 0.2, 0.19]])
    depths = torch.tensor([1, 2, 3])
    curves = measure_curves(survival, depths, 3, torch.tensor([0.0, 0.5, 1.0, 1.5, 3.0]))
    expected = [
        [0, 0, 0, 0, 0],
        [0, 0.9, 1.5, 1.5, 1.5],
        [0, 0.9, 1.7, 2.3, 2.5],
        [0, 0.9, 1.7, 2.3, 2.79],
    ]
    assert torch.allclose(curves * 2, torch.tensor(expected))


def test_what_no_pass_has_to_draft_is_there_at_depth_0():
    survival = torch.tensor([[0.9, 0.8], [0.6, 0.2]])
    depths = torch.tensor([[0, 0], [1, 2]])
    curves = measure_curves(survival, depths, 1, torch.tensor([0.5, 1.0, 1.5]))
    assert torch.allclose(curves * 2, torch.tensor([[0.9, 1.7, 1.7], [0.9, 1.7, 2.3]]))


def test_curves_of_trees_count_nodes_by_their_own_depth():
    survival = torch.tensor([[0.7, 0.5, 0.2, 0.1]])
    depths = torch.tensor([[1, 2, 1, 3]])
    curves = measure_curves(survival, depths, 3, torch.tensor([1.0, 2.0, 4.0]))
    assert torch.allclose(curves, torch.tensor([[0, 0, 0], [0.7, 0.9, 0.9], [0.7, 1.2, 1.4], [0.7, 1.2, 1.5]]))


def test_a_shallow_step_says_little_about_deep_ones():
    curves = AcceptCurves(4, capacity_shares(4))
    full = np.array([[min(c, d) * 0.5 for c in curves.shares] for d in range(5)])
    for _ in range(200):
        curves.confirm(4, curves.observe(full, 64, 64), 64 * 0.5)
    gain = curves.accepted(np.array([4]), np.array([4.0])) - curves.accepted(np.array([2]), np.array([4.0]))
    for _ in range(50):
        curves.confirm(2, curves.observe(full[:3] * 1.5, 64, 64), 64 * 0.75)
    at_two, at_four = (float(curves.accepted(np.array([d]), np.array([4.0]))[0]) for d in (2, 4))
    assert at_two == pytest.approx(1.5, rel=0.01)
    assert at_four - at_two == pytest.approx(float(gain[0]), rel=0.05)


def test_what_the_texts_hold_says_nothing_about_a_draft_that_is_better():
    curves = AcceptCurves(4, capacity_shares(4))
    full = np.array([[min(c, d) * 0.5 for c in curves.shares] for d in range(5)])
    for _ in range(200):
        curves.confirm(4, curves.observe(full, 64, 64), 64 * 0.5)
    before = curves.accepted(np.array([1, 4]), np.array([4.0, 4.0]))
    for _ in range(50):
        curves.confirm(0, curves.observe(full[1:2], 64, 64), 64 * 0.5)
    at = curves.accepted(np.array([0, 1, 4]), np.array([4.0, 4.0, 4.0]))
    assert at[0] == pytest.approx(0.5, rel=0.01)
    assert at[1:] == pytest.approx(before, rel=0.01)


# -- times of passes -------------------------------------------------------------------------------------------------


def test_times_that_cannot_be_kept_are_taken_anew(monkeypatch, tmp_path, caplog):
    """A read-only file system, or another user's folder, is no reason not to serve."""
    timed, no_folder = PassTimes({1: 1e-2}, {1: 1e-3}, {1: 1e-3}), tmp_path / "file"
    no_folder.write_text("")
    monkeypatch.setattr(pass_timing, "_cache_path", lambda *_: no_folder / "times.json")
    monkeypatch.setattr(pass_timing, "time_passes", lambda *_, **__: timed)
    assert pass_timing.load_or_time_passes(None, None, num_draft_tokens=3, max_rows=8, ranks=Ranks()) is timed
    assert "cannot be kept" in caplog.text and "SGLANG_TETRIS_CACHE" in caplog.text


# -- the planner -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize("batch_size", [1, 8, 32])
def test_late_results_do_not_count_against_the_draft(batch_size, lag):
    """Under overlap scheduling a step's result comes after later steps began, plain ones among them."""
    policy = AutoCapacity(
        StepTimeModel(PassTimes({1: 1e-2}, {1: 1e-3}, {1: 1e-3}), max_rows=256, max_batch_size=32),
        AcceptCurves(4, capacity_shares(4)),
    )
    policy.choose = lambda *_: StepPlan(0, 0) if len(accepted) % 3 == 2 else StepPlan(4, 3 * batch_size)
    planner = StepPlanner(policy, LIMITS, SimpleNamespace(observe_step_time=lambda *_: None), "cpu", Ranks())
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
    assert policy.curves.confidence(4) == pytest.approx(0.5, rel=0.05 if batch_size > 1 else 0.1)


@pytest.mark.parametrize(("weights", "mean_weight"), [([1.0, 0.0], 1.0), ([4.0, 0.0], 4.0)])
def test_drafts_of_requests_that_opted_out_are_not_expected_to_be_accepted(weights, mean_weight):
    """They cannot be selected: were they expected, the draft would be blamed. A deadline class is not worth more tokens."""
    policy = make_auto()
    planner = StepPlanner(policy, LIMITS, SimpleNamespace(observe_step_time=lambda *_: None), "cpu", Ranks())
    policy.choose = lambda *_: StepPlan(NUM_STEPS, NUM_STEPS)
    batch = SimpleNamespace(reqs=[None] * 2, seq_lens_sum=0)
    probs, taking = torch.full((2, NUM_STEPS), 0.7), sum(weight > 0 for weight in weights)
    wishes = Wishes(torch.tensor(weights), taking, mean_weight)
    for _ in range(60):
        planner.after_draft(
            make_chains(torch.zeros((2, NUM_STEPS), dtype=torch.int64), probs, probs),
            planner.plan(batch, wishes),
            wishes.weights,
            wishes,
        )
        best = probs.cumprod(dim=1)[:taking].flatten().sort(descending=True).values[:NUM_STEPS]
        planner.after_result(float(best.sum()))
    assert policy.curves.confidence(NUM_STEPS) == pytest.approx(1.0, abs=0.1)


def test_fair_capacity_follows_the_tokens_that_count():
    """Where a token counts more, so does a row that may accept it; weights of 1 are as none."""
    batch = SimpleNamespace(reqs=[None] * 2, seq_lens_sum=0)
    probs = torch.full((2, NUM_STEPS), 0.7)
    proposal = make_chains(torch.zeros((2, NUM_STEPS), dtype=torch.int64), probs, probs)
    counted = []
    for weights in (torch.tensor([0.25, 0.25]), None, torch.tensor([1.0, 1.0])):
        policy = make_auto()
        planner = StepPlanner(policy, LIMITS, SimpleNamespace(observe_step_time=lambda *_: None), "cpu", Ranks())
        planner.after_draft(proposal, planner.plan(batch), weights)
        planner.plan(batch)
        counted.append(policy.curves.accepted(np.array([NUM_STEPS]), np.array([1.0])).item())
    assert counted[0] < counted[1] == counted[2]
    assert counted[0] == pytest.approx(counted[1] / 4)


@pytest.mark.parametrize("known, lens, expected", [(700, None, 700), (None, [300, 400], 700), (None, None, 0)])
def test_context_is_counted_also_when_requests_have_just_left(known, lens, expected):
    """SGLang forgets the sum of the lengths whenever requests leave or join."""
    policy = AutoCapacity(
        StepTimeModel(PassTimes({1: 1e-2}, {1: 1e-3}, {1: 1e-3}), max_rows=256, max_batch_size=32),
        AcceptCurves(4, capacity_shares(4)),
    )
    seen = []
    policy.choose = lambda batch_size, limits, context_tokens: seen.append(context_tokens) or StepPlan(0, 0)
    planner = StepPlanner(policy, LIMITS, SimpleNamespace(observe_step_time=lambda *_: None), "cpu", Ranks())
    lens = None if lens is None else torch.tensor(lens)
    planner.plan(SimpleNamespace(reqs=[None] * 2, seq_lens_sum=known, seq_lens_cpu=lens))
    assert seen == [expected]
