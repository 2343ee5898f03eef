"""The simulator: its engine against the plain one and against closed forms, its inputs, its command."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tetris_sglang.capacity import PassTimes
from tetris_sglang.selection import select_prefixes
from tetris_sglang.simulate.costs import Calibration, make_costs
from tetris_sglang.simulate.engine import (
    ROUTERS,
    Setup,
    choose_prefixes,
    simulate_fleet,
)
from tetris_sglang.simulate.fleet import find_replicas, simulate_setting
from tetris_sglang.simulate.policies import make_plans
from tetris_sglang.simulate.reference import simulate_fleet_reference
from tetris_sglang.simulate.traces import CODES, DraftRows, encode
from tetris_sglang.simulate.workload import (
    Lengths,
    RequestClass,
    draw_arrivals,
    draw_requests,
    join_rows,
)

DEPTH = 4
PASSES = PassTimes(
    {rows: 0.02 + 0.0004 * max(0, rows - 24) for rows in (1, 8, 24, 64, 512)},
    {1: 0.003, 64: 0.006},
    {1: 0.002, 64: 0.004},
    1e-7,
)


def make_rows(quality: float = 0.7, texts: int = 12, positions: int = 40, seed: int = 0) -> DraftRows:
    """Honest drafts: accepted as often as their survivals say."""
    random = np.random.default_rng(seed)
    probs = random.beta(3 * quality, 3 * (1 - quality), (texts * positions, DEPTH))
    accepted = (random.random(probs.shape) < probs).cumprod(axis=1).sum(axis=1)
    starts = np.arange(texts + 1) * positions
    return DraftRows(probs.cumprod(axis=1).astype(np.float32), accepted, starts)


def make_class(rows: DraftRows | None = None, **options) -> RequestClass:
    lengths = {
        "prompt_len": Lengths.parse("exp:60", "prompt"),
        "output_len": Lengths.parse("exp:40", "output"),
    }
    return RequestClass(**{"name": "test", "rows": rows or make_rows(), **lengths, **options})


def make_setup(**options) -> Setup:
    defaults = {
        **{"num_replicas": 1, "router": 0, "max_running": 64, "chunk_tokens": 128},
        **{"kv_tokens": 10**9, "users": 0, "warm_up": 0},
    }
    return Setup(**defaults | options)


def costs_for(setup: Setup, passes: PassTimes = PASSES, **options):
    return make_costs(
        passes, max_running=setup.max_running, depth=DEPTH, chunk_tokens=setup.chunk_tokens, **options
    )


def serve(policy: str, setup: Setup, classes, requests, *, engine=simulate_fleet, **options):
    costs = costs_for(setup, **options)
    plans = make_plans(policy, costs, classes, max_running=setup.max_running)
    return engine(requests, join_rows(classes), costs, plans, setup)


# -- the engine ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["none", "sd2", "uniform1+2", "tetris1.5+1", "tetris4@6", "auto"])
@pytest.mark.parametrize(
    ("setup", "rate"),
    [
        (make_setup(users=13, max_running=9, warm_up=10), 0),
        (make_setup(max_running=5, kv_tokens=1500), 4.0),
        (make_setup(num_replicas=3, router=1, max_running=4, chunk_tokens=50), 20.0),
        (make_setup(num_replicas=3, router=2, max_running=4, users=20, chunk_tokens=50, kv_tokens=1200), 0),
    ],
    ids=["closed", "open", "fleet-open", "fleet-closed"],
)
def test_equals_the_plain_engine(policy, setup, rate):
    classes = [make_class(), make_class(make_rows(0.3, seed=1), name="hard", share=2.0, weight=4.0)]
    arrivals = draw_arrivals("poisson", rate, 90) if rate else None
    requests = draw_requests(classes, 90, seed=5, arrival_s=arrivals)
    ours, plain = (
        serve(policy, setup, classes, requests, engine=engine)
        for engine in (simulate_fleet, simulate_fleet_reference)
    )
    assert ours[0] == plain[0]
    for mine, other in zip(ours[1], plain[1], strict=True):
        assert np.array_equal(mine, other)


def test_the_choice_is_that_of_selection():
    """Few survivals, so that ties abound; capacities from nothing to more than there is."""
    random = np.random.default_rng(0)
    for trial in range(300):
        batch, depth = random.integers(1, 20), random.integers(1, 6)
        levels = np.array([0, 1, 5, 300, 301, CODES - 2, CODES - 1])
        codes = -np.sort(-random.choice(levels[: 2 + trial % 6], (30, depth)), axis=1)
        codes = codes.astype(np.uint16)
        at = random.integers(0, 30, batch)
        capacity = int(random.integers(0, batch * depth + 2))
        lens = np.zeros(batch, np.int64)
        selected = choose_prefixes(codes, at, batch, depth, capacity, lens, np.zeros(CODES, np.int64))
        survival = torch.from_numpy(codes[at].astype(np.float32) / (CODES - 1))
        assert lens.tolist() == select_prefixes(survival, capacity).tolist()
        assert selected == lens.sum()


@pytest.mark.parametrize("policy", ["none", "tetris2+1"])
def test_every_request_gets_its_tokens_and_time_passes(policy):
    classes, setup = [make_class()], make_setup(num_replicas=2, max_running=6, users=11)
    requests = draw_requests(classes, 200, seed=1)
    counts, times = serve(policy, setup, classes, requests)
    assert np.isfinite(times.finish_s).all()
    assert (times.start_s < times.first_token_s).all()
    one = requests.output_lens == 1
    assert one.any() and (times.finish_s[one] == times.first_token_s[one]).all()
    assert (times.finish_s[~one] > times.first_token_s[~one]).all()
    assert counts.end_s == times.finish_s.max()
    # Never more than 11 at once.
    events = np.concatenate((times.start_s, times.finish_s))
    order = np.lexsort((np.repeat([1, 0], 200), events))
    assert np.repeat([1, -1], 200)[order].cumsum().max() == 11


def test_tokens_of_the_window_are_those_emitted_in_it():
    """Without speculation a request's tokens come one per step."""
    classes, setup = [make_class()], make_setup(users=8, warm_up=30)
    requests = draw_requests(classes, 100, seed=2)
    counts, times = serve("none", setup, classes, requests)
    assert counts.accepted == counts.selected == 0
    assert counts.rows == counts.decoded_requests
    # All of them but those of the first and last few seconds.
    inside = (times.start_s >= times.start_s[30]) & (times.finish_s <= times.start_s[99])
    least = requests.output_lens[inside].sum()
    most = requests.output_lens[
        (times.finish_s >= times.start_s[30]) & (times.start_s <= times.start_s[99])
    ].sum()
    assert least <= counts.tokens <= most
    assert counts.busy_s == pytest.approx(counts.window_s, rel=0.02)


# -- closed forms --------------------------------------------------------------------------------------------------

CONSTANT = PassTimes({1: 0.02, 64: 0.02}, {1: 0.001}, {1: 0.001})


def test_plain_decoding_at_constant_cost():
    """B tokens per step of t seconds, prefill apart."""
    setup = make_setup(users=16, max_running=16, warm_up=16, chunk_tokens=10**5)
    one = make_class(prompt_len=Lengths.parse(1, ""), output_len=Lengths.parse("2000", ""))
    requests = draw_requests([one], 64, seed=0)
    free = Calibration(host_s=0.0, prefill_scale=1e-9)
    counts, _ = serve("none", setup, [one], requests, passes=CONSTANT, calibration=free)
    assert counts.tokens / counts.window_s == pytest.approx(16 / 0.02, rel=1e-3)


@pytest.mark.parametrize("alpha", [0.3, 0.8])
@pytest.mark.parametrize("k", [1, 4])
def test_standard_speculation_accepts_the_geometric_sum(alpha, k):
    random = np.random.default_rng(3)
    hits = random.random((60000, DEPTH)) < alpha
    survival = np.tile(alpha ** np.arange(1, DEPTH + 1), (len(hits), 1)).astype(np.float32)
    rows = DraftRows(survival, hits.cumprod(axis=1).sum(axis=1), np.array([0, len(hits)]))
    one = make_class(rows, output_len=Lengths.parse("60000", ""))
    setup = make_setup(users=4, kv_tokens=10**9)
    outcome = simulate_setting(
        draw_requests([one], 6, seed=0),
        join_rows([one]),
        costs := costs_for(setup),
        make_plans(f"sd{k}", costs, [one], max_running=64),
        setup,
    )
    assert outcome.accept_length == pytest.approx((1 - alpha ** (k + 1)) / (1 - alpha), rel=0.01)
    assert outcome.success_rate == pytest.approx((outcome.accept_length - 1) / k)
    assert outcome.rows_per_step == pytest.approx(outcome.batch_size * (k + 1))


def test_prefill_holds_decoding_up():
    """Two requests: the second one's prefill, in two chunks, is a pause for the first."""
    one = make_class(prompt_len=Lengths.parse(150, ""), output_len=Lengths.parse(10, ""))
    setup = make_setup(chunk_tokens=100)
    requests = draw_requests([one], 2, seed=0, arrival_s=np.array([0.0, 0.075]))
    costs = costs_for(setup, CONSTANT, calibration=Calibration(host_s=0.0))
    plans = make_plans("none", costs, [one], max_running=64)
    _, times = simulate_fleet(requests, join_rows([one]), costs, plans, setup)
    # Prefills end at 40 ms; a step ends at 60 and 80; then two chunks until 120; eight more steps.
    assert times.first_token_s == pytest.approx([0.04, 0.12])
    # Of its nine further tokens two came before.
    assert times.finish_s == pytest.approx([0.12 + 7 * 0.02, 0.12 + 9 * 0.02])


# -- fleets --------------------------------------------------------------------------------------------------------


def test_routers():
    one = make_class()
    requests = draw_requests([one], 3000, seed=0, arrival_s=draw_arrivals("poisson", 24.0, 3000))
    waits = {}
    for router, name in enumerate(ROUTERS):
        setup = make_setup(num_replicas=4, router=router, max_running=6)
        _, times = serve("none", setup, [one], requests)
        share = np.bincount(times.replica, minlength=4) / 3000
        assert share == pytest.approx([0.25] * 4, abs=0.0 if name == "round_robin" else 0.04)
        waits[name] = float(np.percentile(times.first_token_s - times.start_s, 99))
    assert waits["shortest_queue"] < waits["power_of_two"] < waits["round_robin"]


def test_replicas_that_a_load_needs():
    asked = []
    assert find_replicas(lambda r: asked.append(r) or r >= 11, 64) == 11
    assert len(asked) <= 9
    assert find_replicas(lambda r: True, 64) == 1
    assert find_replicas(lambda r: r > 64, 64) is None
    assert find_replicas(lambda r: r == 50, 50) == 50


# -- policies ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quality", [0.3, 0.7, 0.9])
@pytest.mark.parametrize("users", [1, 12, 48])
def test_auto_is_about_as_fast_as_the_best_fixed_policy(quality, users):
    one = make_class(make_rows(quality, texts=60), output_len=Lengths.parse("20-200", ""))
    requests = draw_requests([one], 6 * users + 60, seed=0)
    setup = make_setup(users=users, warm_up=users)

    def speed(policy: str) -> float:
        counts, _ = serve(policy, setup, [one], requests)
        return counts.tokens / counts.window_s

    policies = ["none", "sd1", "sd2", "sd4", "tetris0.5+1", "tetris1+1", "tetris2+2", "tetris3+1"]
    assert speed("auto") > 0.97 * max(map(speed, policies))


# -- inputs --------------------------------------------------------------------------------------------------------


def test_arrivals():
    poisson = np.diff(draw_arrivals("poisson", 5.0, 20000, seed=1))
    assert poisson.mean() == pytest.approx(0.2, rel=0.03)
    assert poisson.std() == pytest.approx(0.2, rel=0.05)
    bursty = np.diff(draw_arrivals("gamma", 5.0, 40000, burstiness=3.0, seed=1))
    assert bursty.mean() == pytest.approx(0.2, rel=0.06)
    assert bursty.std() == pytest.approx(0.6, rel=0.08)


def test_lengths():
    random = np.random.default_rng(0)
    assert set(Lengths.parse("7", "").draw(50, random)) == {7}
    assert set(Lengths.parse("2-4", "").draw(200, random)) == {2, 3, 4}
    drawn = Lengths.parse("exp:30", "").draw(20000, random)
    assert drawn.min() == 1 and drawn.mean() == pytest.approx(30, rel=0.03)
    for bad in ("0", "4-2", "x", "exp:", "1-2-3", "-3", "exp:4-5"):
        with pytest.raises(ValueError, match="--output-len"):
            Lengths.parse(bad, "--output-len")


def test_codes_keep_order_and_weights():
    survival = np.array([[1.0, 0.5, 1e-6, 0.0]], np.float32)
    assert encode(survival).tolist() == [[1023, 512, 1, 0]]
    assert encode(survival, 0.25).tolist() == [[256, 128, 1, 0]]
