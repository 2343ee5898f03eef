"""The automatic capacity against every fixed setting, on a simulated server whose true times and acceptances are known."""

from __future__ import annotations

import dataclasses
import functools
import itertools

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

    honesty: accepted drafts per expected one. has_luck: what is accepted is drawn, else what is expected is. catch_up_s: what
    the draft takes for each token that plain steps emitted, before it drafts again. paused_share: of the steps, those in which
    the process is stopped for seconds. slowness: of steps, against what was timed.
    """

    def __init__(
        self,
        draft_quality: float,
        honesty: float = 1.0,
        has_luck: bool = False,
        seed: int = 0,
        catch_up_s: float = 0.0,
        paused_share: float = 0.0,
        slowness: float = 1.25,
    ) -> None:
        self._catch_up_s, self._num_unread, self._paused_share = catch_up_s, 0, paused_share
        self._quality, self._honesty, self._has_luck = draft_quality, honesty, has_luck
        self._slowness, self._noise = slowness, 0.05
        self._random = np.random.default_rng(seed)

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
                if self._has_luck:
                    coins = self._random.random((batch_size, 1))
                    accepted = float(((torch.from_numpy(coins) < survival) & selected).sum())
                if isinstance(policy, AutoCapacity):
                    curves = measure(policy, survival)
                    expected = policy.curves.observe(curves, batch_size, plan.capacity_tokens)
                    policy.confirm(batch_size, expected, accepted)
            plans.append(plan)
            seconds = self.seconds(batch_size, plan)
            if plan.depth:
                seconds, self._num_unread = seconds + self._catch_up_s * self._num_unread, 0
            else:
                self._num_unread += batch_size
            tokens, total_s = tokens + batch_size + accepted, total_s + seconds
            if isinstance(policy, AutoCapacity):
                pause_s = 3.0 if self._paused_share and self._random.random() < self._paused_share else 0.0
                policy.observe_time(shape, seconds * np.exp(self._noise * self._random.normal()) + pause_s)
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


@pytest.mark.parametrize("batch_size", [1, 4, 16])
def test_a_process_that_is_stopped_now_and_then_goes_on_speculating(batch_size):
    """What a step takes that falls into a pause says nothing of speculation."""
    server, policy, best = Server(0.8, paused_share=0.06), make_auto(), best_fixed(0.8, batch_size)
    assert server.run(policy, [batch_size] * 600)[0] > 0.93 * best
    plain = speed_of(0.05, batch_size, StepPlan(0, 0))
    assert Server(0.05, paused_share=0.06).run(make_auto(), [batch_size] * 600)[0] > 0.98 * plain


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


def test_a_new_server_is_fast_whatever_its_first_texts_are():
    """One request at a time, and drafts that gain a third: a bad stretch at the beginning must not shut them out for long."""
    best, plain = best_fixed(0.5, 1), speed_of(0.5, 1, StepPlan(0, 0))
    assert best > 1.25 * plain
    speeds = [Server(0.5, has_luck=True, seed=seed).run(make_auto(), [1] * 350)[0] for seed in range(30)]
    assert np.mean(speeds) > 0.92 * best
    assert np.sort(speeds)[2] > plain


def test_bad_luck_does_not_shut_out_what_should_pay():
    """One request; where the whole allowance was lost, it is back within 30 steps, not 80."""
    server, policy = Server(0.5, has_luck=True), make_auto()
    server.run(policy, [1] * 100)
    policy._allowance = -0.5
    _, plans = server.run(policy, [1] * 30)
    assert plans[0].depth == 0 and policy.expected_gain > 1.1
    assert any(plan.depth for plan in plans)


def test_first_steps_without_luck_are_not_taken_for_the_draft():
    """Four of one request that drafted nothing likely, with a guess of 0.45 beside them: deep ones count for more."""
    shares = capacity_shares(NUM_STEPS)
    curves = AcceptCurves(NUM_STEPS, shares)
    for _ in range(4):
        curves.observe(np.zeros((NUM_STEPS + 1, len(shares))), 1, 1)
    first, deepest = curves.accepted(np.array([1, NUM_STEPS]), np.array([1.0, 6.0]))
    assert first == pytest.approx(0.45 * 8 / 12)
    guessed = sum(0.45**depth for depth in range(1, NUM_STEPS + 1))
    # What was guessed of the deepest counts as 8 / 6 steps alone, but no level has fewer than the one above.
    assert first <= deepest < 0.5 * guessed


def test_a_new_server_takes_no_lessons_from_a_draft_that_shows_its_uselessness():
    """Its first 200 tokens for one request, with a draft whose passes cost a tenth of the target's."""
    speeds = [Server(0.05, has_luck=True, seed=seed).run(make_auto(), [1] * 200)[0] for seed in range(20)]
    assert np.mean(speeds) > 0.98 * speed_of(0.05, 1, StepPlan(0, 0))


def test_a_useless_draft_is_left_alone():
    speed, plans = Server(0.02).run(make_auto(), [16] * 2000)
    plain, _ = Server(0.02).run(Fixed(0, 0.0), [16] * 100)
    assert speed > 0.985 * plain
    assert sum(plan.depth > 0 for plan in plans[100:]) < 0.02 * 1900
    # But it is looked at now and then.
    assert any(plan.depth > 0 for plan in plans[100:])


@pytest.mark.parametrize("batch_size", [1, 16])
def test_what_the_draft_must_read_first_is_paid_for(batch_size):
    """A useless one that is asked after a hundred plain steps takes as long as another plain step to read what they emitted."""
    speed, plans = Server(0.02, catch_up_s=0.03 / (100 * batch_size)).run(make_auto(), [batch_size] * 4000)
    plain, _ = Server(0.02).run(Fixed(0, 0.0), [batch_size] * 100)
    assert speed > 0.988 * plain
    assert any(plan.depth > 0 for plan in plans[2000:])


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


def test_a_plain_step_whose_graph_has_more_rows_costs_nothing():
    """It would be charged as speculation, and the draft never looked at again."""
    limits = dataclasses.replace(LIMITS, fit_rows=lambda _, rows: 16 * -(-rows // 16))
    policy, shape = make_auto(), StepShape(9, 0, 16)
    policy.choose(9, limits)
    for _ in range(400):
        policy.begin_step(shape)
        policy.observe_time(shape, 0.03)
    assert policy._allowance == pytest.approx(0.5 + 400 * 0.003) and policy._lessons == 2
    # A speculative one in the same graph costs its draft alone.
    in_graph = policy._price(StepShape(9, 1, 16))
    assert in_graph == pytest.approx(policy._price(StepShape(16, 1, 16)), rel=0.3) and 0 < in_graph < 0.2


def test_a_device_that_is_slower_than_was_timed_goes_on_speculating():
    """All of it is, plain steps included. Charged to those that draft, the difference would end speculation: 1.00 to 1.03."""
    gains = []
    for seed in range(4):
        make = functools.partial(Server, 0.45, has_luck=True, seed=seed, paused_share=0.05, slowness=2.0)
        speed, _ = make().run(make_auto(), [16] * 350)
        plain, _ = make().run(Fixed(0, 0.0), [16] * 50)
        gains.append(speed / plain)
    assert np.mean(gains) > 1.07 and min(gains) > 1.03


def test_what_the_draft_must_read_first_is_not_taken_for_its_passes():
    policy, plain, drafted = make_auto(), StepShape(16, 0, 16), StepShape(16, 1, 32)
    policy.choose(16, LIMITS)
    before = policy.step_times.predict_step(drafted)
    for _ in range(20):
        policy.observe_time(plain, policy.step_times.predict_step(plain))
        policy.observe_time(drafted, 1.5 * before)
    assert policy.step_times.predict_step(drafted) == pytest.approx(before, rel=0.02)
    for _ in range(20):
        policy.observe_time(drafted, 1.5 * before)
    assert policy.step_times.predict_step(drafted) > 1.3 * before


def test_a_debt_is_of_the_load_it_was_made_under():
    policy = make_auto()
    policy.choose(64, LIMITS)
    policy._charge(20.0, 64)
    assert policy._allowance == -2
    policy.choose(16, LIMITS)
    assert policy._allowance == 0.5
    policy.choose(64, LIMITS)
    assert policy._allowance == -2
    # What was saved up is there for a load that is new.
    policy = make_auto()
    policy.choose(64, LIMITS)
    policy._allowance = 5.0
    policy.choose(4, LIMITS)
    assert policy._allowance == 5


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
