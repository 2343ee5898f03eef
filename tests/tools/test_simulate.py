"""The simulator: its engine against the plain one and against closed forms, its inputs, its command."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

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
from tetris_sglang.tools.cli import app
from tetris_sglang.tools.simulate.costs import (
    count_kv_tokens,
    fill_curve,
    load_pass_times,
    make_costs,
    model_passes,
    passes_s,
)
from tetris_sglang.tools.simulate.engine import ROUTERS, Setup, choose_prefixes, simulate_fleet
from tetris_sglang.tools.simulate.fleet import find_replicas, simulate_setting
from tetris_sglang.tools.simulate.plain_engine import simulate_fleet_reference
from tetris_sglang.tools.simulate.policies import make_plans
from tetris_sglang.tools.simulate.traces import CODES, DraftRows, encode, read_rows
from tetris_sglang.tools.simulate.traces import make_rows as convert
from tetris_sglang.tools.simulate.workload import (
    Lengths,
    RequestClass,
    draw_arrivals,
    draw_requests,
    join_rows,
    read_arrivals,
    read_classes,
)
from tetris_sglang.trace import open_for_writing, read_trace, row_type

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
        "num_replicas": 1,
        "router": 0,
        "max_running": 64,
        "chunk_tokens": 128,
        "kv_tokens": 10**9,
        "users": 0,
        "warm_up": 0,
    }
    return Setup(**defaults | options)


def costs_for(setup: Setup, passes: PassTimes = PASSES, **options):
    return make_costs(
        passes,
        max_running=setup.max_running,
        num_drafts=DEPTH,
        chunk_tokens=setup.chunk_tokens,
        **options,
    )


def serve(policy: str, setup: Setup, classes, requests, *, engine=simulate_fleet, **options):
    costs = costs_for(setup, **options)
    plans = make_plans(policy, costs, classes, max_running=setup.max_running)
    return engine(requests, join_rows(classes), costs, plans, setup)


# -- the engine ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["none", "sd2", "uniform1+2", "tetris1.5+1", "tetris4@6", "auto", "hidden:tetris1.5+1"])
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
        serve(policy, setup, classes, requests, engine=engine) for engine in (simulate_fleet, simulate_fleet_reference)
    )
    assert ours[0] == plain[0]
    for mine, other in zip(ours[1], plain[1], strict=True):
        assert np.array_equal(mine, other)


def test_auto_leaves_out_a_draft_that_costs_more_than_it_gives():
    slow = replace(PASSES, window_s={1: 1.0}, branch_s={1: 1.0})
    plans = make_plans("auto", costs_for(make_setup(), slow), [make_class(make_rows(0.9))], max_running=64)
    assert (plans.depth == 0).all() and (plans.capacity == 0).all()


@pytest.mark.parametrize(
    ("batch", "draft_s", "seconds"),
    [
        (40, 0.06, 0.12),  # rows cost by their number: halves of 40 ms are verified behind drafts of 60 ms
        (40, 0.03, 0.08),  # all drafting hidden
        (4, 0.001, 0.021),  # bound by memory: each half would cost as much as the whole
        (1, 0.03, 0.05),  # nothing to halve
    ],
)
def test_drafting_hides_behind_verification_where_that_is_sooner(batch, draft_s, seconds):
    passes = PassTimes({1: 0.02, 20: 0.02, 600: 0.6}, {1: draft_s}, {1: 0.0}, 0.0)
    costs = costs_for(make_setup(), passes)
    assert passes_s(costs, batch, 2 * batch, 1, is_hidden=True) == pytest.approx(seconds)
    assert passes_s(costs, batch, 2 * batch, 1, is_hidden=False) == pytest.approx(max(0.02, 0.002 * batch) + draft_s)


def test_the_choice_is_that_of_selection():
    """Few survivals, so that ties abound; capacities from nothing to more than there is."""
    random = np.random.default_rng(0)
    for trial in range(300):
        batch, num_levels = random.integers(1, 20), random.integers(1, 6)
        depth = random.integers(1, num_levels + 1)
        levels = np.array([0, 1, 5, 300, 301, CODES - 2, CODES - 1])
        codes = -np.sort(-random.choice(levels[: 2 + trial % 6], (30, num_levels)), axis=1)
        codes = codes.astype(np.uint16)
        at = random.integers(0, 30, batch)
        capacity = int(random.integers(0, batch * depth + 2))
        lens, histogram, tied = (np.zeros(size, np.int64) for size in (batch, CODES, batch))
        selected = choose_prefixes(codes, at, batch, depth, capacity, lens, histogram, tied)
        survival = torch.from_numpy(codes[at, :depth].astype(np.float32) / (CODES - 1))
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
    most = requests.output_lens[(times.finish_s >= times.start_s[30]) & (times.start_s <= times.start_s[99])].sum()
    assert least <= counts.tokens <= most
    assert counts.busy_s == pytest.approx(counts.window_s, rel=0.02)


# -- closed forms --------------------------------------------------------------------------------------------------

CONSTANT = PassTimes({1: 0.02, 64: 0.02}, {1: 0.001}, {1: 0.001})


def test_plain_decoding_at_constant_cost():
    """B tokens per step of t seconds; a prefill of all, as long as a step, comes once in 2000."""
    setup = make_setup(users=16, max_running=16, warm_up=16, chunk_tokens=10**5)
    one = make_class(prompt_len=Lengths.parse(1, ""), output_len=Lengths.parse("2000", ""))
    requests = draw_requests([one], 64, seed=0)
    counts, _ = serve("none", setup, [one], requests, passes=CONSTANT, host_s=0.0)
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
    costs = costs_for(setup, CONSTANT, host_s=0.0)
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

    costs = costs_for(setup)

    def speed(policy: str) -> float:
        # Its draft prefills every prompt, also where it is of no further use.
        plans = make_plans(policy, costs, [one], max_running=64)._replace(has_draft=True)
        counts, _ = simulate_fleet(requests, join_rows([one]), costs, plans, setup)
        return counts.tokens / counts.window_s

    policies = ["none", "sd1", "sd2", "sd4", "tetris0.5+1", "tetris1+1", "tetris2+2", "tetris3+1"]
    assert speed("auto") > 0.97 * max(map(speed, policies))


@pytest.mark.parametrize(("quality", "batch_size"), [(0.5, 1), (0.5, 32), (0.8, 8), (0.8, 48), (0.2, 24)])
def test_auto_is_what_automatic_capacity_converges_to(quality, batch_size):
    """The real policy, learning from steps that cost and accept what the simulator's do."""
    one = make_class(make_rows(quality, texts=60))
    rows, costs = one.rows, costs_for(make_setup())
    limits = DraftLimits(range(1, DEPTH + 1), int)
    real = AutoCapacity(
        StepTimeModel(PASSES, max_rows=64 * (DEPTH + 1), max_batch_size=64),
        AcceptCurves(DEPTH, capacity_shares(DEPTH)),
    )
    shares = torch.tensor(real.curves.shares, dtype=torch.float32)
    plans = make_plans("auto", costs, [one], max_running=64)
    table = StepPlan(int(plans.depth[batch_size]), int(plans.capacity[batch_size]))
    context_tokens = 100 * batch_size

    def run(choose, num_steps: int, learns: bool) -> float:
        at = np.random.default_rng(1).integers(0, len(rows.accepted), batch_size)
        tokens = total_s = 0.0
        for _ in range(num_steps):
            plan = choose()
            shape = StepShape(batch_size, plan.depth, batch_size + plan.capacity_tokens, context_tokens)
            if learns:
                real.begin_step(shape)
            accepted = np.zeros(batch_size, np.int64)
            seconds = costs.target_s[batch_size + plan.capacity_tokens] + costs.host_s[batch_size]
            seconds += costs.context_s * context_tokens
            if plan.depth:
                seconds += costs.window_s[batch_size] + (plan.depth - 1) * costs.branch_s[batch_size]
                survival = torch.from_numpy(rows.survival[at, : plan.depth])
                lens = select_prefixes(survival, plan.capacity_tokens).numpy()
                accepted = np.minimum(rows.accepted[at], lens)
                if learns:
                    curves = measure_curves(survival, torch.arange(1, plan.depth + 1), plan.depth, shares)
                    expected = real.curves.observe(curves.numpy(), batch_size, plan.capacity_tokens)
                    real.confirm(batch_size, expected, int(accepted.sum()))
            if learns:
                real.step_times.observe(shape, seconds)
            at = (at + accepted + 1) % len(rows.accepted)
            tokens, total_s = tokens + batch_size + accepted.sum(), total_s + seconds
        return tokens / total_s

    run(lambda: real.choose(batch_size, limits, context_tokens), 300, learns=True)
    learnt = run(lambda: real.choose(batch_size, limits, context_tokens), 500, learns=True)
    # Looks cost the real one something.
    assert run(lambda: table, 500, learns=False) == pytest.approx(learnt, rel=0.07)


def test_a_heavier_class_is_served_faster():
    light, heavy = make_class(name="light"), make_class(name="heavy", weight=8.0)
    requests = draw_requests([light, heavy], 800, seed=0)
    _, times = serve("tetris1+3", make_setup(users=32), [light, heavy], requests)
    tpot = (times.finish_s - times.first_token_s) / np.maximum(requests.output_lens - 1, 1)
    long = requests.output_lens > 20
    light_s, heavy_s = (np.median(tpot[long & (requests.class_ids == kind)]) for kind in (0, 1))
    assert heavy_s < 0.8 * light_s


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("sd9", "policy sd9: drafts 9 tokens; the trace has 1 to 4"),
        ("sd0", "drafts 0"),
        ("tetris2", "there are none, sdK"),
        ("hidden:none", "and hidden:POLICY of each that drafts"),
        ("uniform1.5+1", "there are none, sdK"),
    ],
)
def test_policies_that_are_none(policy, message):
    with pytest.raises(ValueError, match=message):
        make_plans(policy, costs_for(make_setup()), [make_class()], max_running=64)


def test_plans_of_fixed_policies():
    def plan(policy: str, batch: int) -> tuple[int, int]:
        plans = make_plans(policy, costs_for(make_setup()), [make_class()], max_running=64)
        return int(plans.depth[batch]), int(plans.capacity[batch])

    assert plan("none", 5) == (0, 0)
    assert plan("sd3", 5) == plan("uniform3+0", 5) == (3, 15)
    assert plan("uniform2+1", 5) == (3, 10)
    assert plan("tetris1.5+1", 5) == (3, 7)
    assert plan("tetris4@6", 5) == (4, 6)
    # No more than is drafted, and no deeper than so few can reach.
    assert plan("tetris4@6", 1) == (4, 4)
    assert plan("tetris4@2", 5) == (2, 2)


# -- traces --------------------------------------------------------------------------------------------------------


def record(rows: DraftRows, verify: int, path: Path) -> None:
    """Write what a run records that verifies `verify` of each chain."""
    depth, lines = rows.depth, []
    for request, (start, end) in enumerate(itertools.pairwise(rows.starts.tolist())):
        at = start
        while at < end:
            accepted = min(int(rows.accepted[at]), verify)
            lines.append((at - start, request, at, accepted))
            at += accepted + 1
    # Requests take turns, as in a batch.
    lines.sort()
    table = np.zeros(len(lines), row_type(depth))
    for step, (row, (_, request, at, accepted)) in enumerate(zip(table, lines, strict=True)):
        row["step"], row["request"], row["depth"], row["selected"] = step, request, depth, verify
        row["raw"] = row["survival"] = rows.survival[at]
        row["node_depths"] = np.arange(1, depth + 1)
        row["accepted"] = np.packbits(np.arange(depth) < accepted, bitorder="little")
    with open_for_writing(path, depth) as file:
        file.write(table.tobytes())


def make_text_rows() -> DraftRows:
    """Texts whose drafts are right or wrong wherever a step begins, as a deterministic draft's are."""
    hits = np.random.default_rng(0).random((6, 400)) < 0.7
    probs = np.where(hits, 0.8, 0.4)
    positions = range(400 - 2 * DEPTH)
    survival = [chance[at : at + DEPTH].cumprod() for chance in probs for at in positions]
    accepted = [line[at : at + DEPTH].cumprod().sum() for line in hits for at in positions]
    return DraftRows(np.array(survival, np.float32), np.array(accepted), np.arange(7) * len(positions))


def test_positions_between_recorded_steps_are_found(tmp_path):
    truth = make_text_rows()
    record(truth, DEPTH, tmp_path / "run.trace.gz")
    found = read_rows(tmp_path / "run.trace.gz")
    assert len(found.starts) == 7
    num_exact = 0
    for mine, at, end in zip(found.starts, truth.starts[:-1], truth.starts[1:], strict=False):
        while at < end:
            accepted = int(truth.accepted[at])
            for offset in range(min(accepted, end - 1 - at) + 1):
                got, expected = found.accepted[mine + offset], truth.accepted[at + offset]
                # Known if the step saw a rejection; a lower bound if it accepted everything.
                assert got == expected if accepted < DEPTH else got >= DEPTH - offset
                num_exact += accepted < DEPTH
                levels = slice(DEPTH - offset)
                want = truth.survival[at + offset, levels]
                assert found.survival[mine + offset, levels] == pytest.approx(want, abs=2e-3)
            at, mine = at + accepted + 1, mine + accepted + 1
    assert num_exact > 1000
    assert found.accepted.mean() == pytest.approx(truth.accepted.mean(), rel=0.05)
    assert found.survival.mean(axis=0) == pytest.approx(truth.survival.mean(axis=0), rel=0.05)


def test_drafts_that_were_not_verified_are_drawn(tmp_path):
    truth = make_text_rows()
    record(truth, 2, tmp_path / "run.trace")
    found = read_rows(tmp_path / "run.trace")
    shares = [np.bincount(rows.accepted, minlength=DEPTH + 1) / len(rows.accepted) for rows in (found, truth)]
    assert shares[0][:2] == pytest.approx(shares[1][:2], abs=0.03)
    assert shares[0][DEPTH] > 0.05
    assert (np.diff(found.survival, axis=1) <= 0).all()
    assert np.array_equal(read_rows(tmp_path / "run.trace").accepted, found.accepted)


def test_where_each_step_emits_one_token_its_rows_are_all_there_is(tmp_path):
    truth = make_rows()
    truth = truth._replace(accepted=np.zeros_like(truth.accepted))
    record(truth, DEPTH, tmp_path / "all.trace")
    found = read_rows(tmp_path / "all.trace")
    assert np.allclose(found.survival, truth.survival, atol=1e-3)
    assert np.array_equal(found.starts, truth.starts)


def test_traces_that_cannot_be_used(tmp_path):
    path = tmp_path / "one.trace"
    record(make_rows(texts=1, positions=2), DEPTH, path)
    with pytest.raises(ValueError, match="positions; more than its 4 levels"):
        read_rows(path)
    trace = read_trace(path)
    with pytest.raises(ValueError, match="draft trees"):
        convert(trace._replace(node_depths=np.ones_like(trace.node_depths)))
    with pytest.raises(ValueError, match="no drafts"):
        convert(trace._replace(node_depths=np.zeros_like(trace.node_depths)))


# -- costs ---------------------------------------------------------------------------------------------------------


def test_curves_go_on_with_their_last_slope():
    curve = fill_curve({2: 1.0, 4: 3.0, 5: 2.0, 8: 6.0}, 10)
    # 4 rows took longer than 5, and 8 rows longer than 5 and 5: they were disturbed, and count as those.
    assert curve == pytest.approx([1, 1, 1, 1.5, 2, 2, 8 / 3, 10 / 3, 4, 14 / 3, 16 / 3])


def test_roofline():
    passes = model_passes("h100", model_b=8, draft_b=0.5, kv_kib_per_token=128)
    small = passes.target_s[1]
    assert 16e9 / 3.35e12 < small < 2 * 16e9 / 3.35e12
    assert passes.target_s[64] == small
    largest = max(passes.target_s)
    assert passes.target_s[largest] > 2 * 8e9 * largest / 989e12
    assert passes.window_s[1] < small / 5
    with pytest.raises(ValueError, match="--device tpu: there are a100"):
        model_passes("tpu", model_b=8, draft_b=0.5, kv_kib_per_token=128)
    with pytest.raises(ValueError, match="does not fit"):
        count_kv_tokens("h100", model_b=70, draft_b=1, kv_kib_per_token=320)


def test_pass_times_of_a_server(tmp_path):
    path = tmp_path / "passes.json"
    path.write_text(json.dumps(PASSES.to_json()))
    assert load_pass_times(path) == PASSES
    path.write_text("[]")
    with pytest.raises(ValueError, match="no pass times of a server"):
        load_pass_times(path)
    with pytest.raises(ValueError, match="No such file"):
        load_pass_times(tmp_path / "none.json")


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


def test_arrivals_from_a_file(tmp_path):
    path = tmp_path / "arrivals.txt"
    path.write_text("12.5\n10\n11\n")
    assert read_arrivals(path).tolist() == [0.0, 1.0, 2.5]
    path.write_text("now\n")
    with pytest.raises(ValueError, match="--arrivals"):
        read_arrivals(path)


# -- the command ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trace(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("traces") / "some.trace.gz"
    record(make_rows(0.8, texts=30), DEPTH, path)
    return path


def call(*arguments: object):
    return CliRunner().invoke(app, ["simulate", *map(str, arguments)], env={"COLUMNS": "200"})


def test_command(trace, tmp_path):
    out, picture = tmp_path / "out.json", tmp_path / "out.png"
    arguments = (
        *("--trace", trace, "--device", "h100", "--users", "1,32", "--requests", "150"),
        *("--policies", "sd2,auto", "--output-len", "20-60", "--capacities", "0.5,2"),
        *("--slo-tpot-ms", "5", "--max-replicas", "8", "--json", out, "--plot", picture),
    )
    result = call(*arguments)
    assert result.exit_code == 0, result.output
    assert "modelled, not measured" in result.output
    assert "Where speculation pays" in result.output
    first = json.loads(out.read_text())
    settings = {(one["policy"], one["load"]): one for one in first["settings"]}
    assert settings.keys() == {(policy, load) for policy in ("none", "sd2", "auto") for load in (1.0, 32.0)}
    assert settings["none", 32.0]["gain"] == 1.0
    assert settings["auto", 1.0]["gain"] > 1.3
    speeds = settings["auto", 1.0]["output_tokens_per_s"], settings["none", 1.0]["output_tokens_per_s"]
    assert speeds[0] / speeds[1] == pytest.approx(settings["auto", 1.0]["gain"])
    assert len(first["capacities"]) == 4
    replicas = {(one["policy"], one["load"]): one["replicas"] for one in first["replicas"]}
    # A plain step takes longer than that, with however few requests.
    assert replicas["none", 1.0] is None
    assert replicas["auto", 1.0] == 1
    assert picture.stat().st_size > 1000
    assert call(*arguments).exit_code == 0
    assert json.loads(out.read_text()) == first
    assert call(*arguments, "--seed", "1").exit_code == 0
    assert json.loads(out.read_text())["settings"] != first["settings"]


def test_command_with_classes_and_a_fleet(trace, tmp_path):
    classes = [
        {"trace": trace.name, "share": 3},
        {"trace": trace.name, "name": "b", "output_len": 9, "weight": 2},
    ]
    path, out = trace.parent / "classes.json", tmp_path / "out.json"
    path.write_text(json.dumps(classes))
    result = call(
        *("--classes", path, "--device", "h100", "--arrivals", "gamma", "--rates", "2,20", "--replicas", "2"),
        *("--requests", "200", "--policies", "tetris1+1", "--json", out),
    )
    assert result.exit_code == 0, result.output
    assert "2 replicas, power_of_two" in result.output
    for one in json.loads(out.read_text())["settings"]:
        assert 0 < one["utilisation"] <= 1
        assert one["gain"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "either --trace or --classes"),
        (["--trace", "TRACE"], "either --pass-times"),
        (["--trace", "no.trace", "--device", "h100"], "no such file"),
        (["--trace", "TRACE", "--device", "h100", "--router", "cache_aware"], "is not modelled"),
        (["--trace", "TRACE", "--device", "h100", "--users", "1,x"], "--users"),
        (["--trace", "TRACE", "--device", "h100", "--users", "1.5"], "whole numbers"),
        (["--trace", "TRACE", "--device", "h100", "--users", "50", "--requests", "50"], "--requests 50"),
        (["--trace", "TRACE", "--device", "h100", "--kv-tokens", "5"], "does not fit into a KV cache of 5"),
        (["--trace", "TRACE", "--device", "h100", "--arrivals", "weekly"], "closed, poisson, gamma"),
        (["--trace", "TRACE", "--device", "h100", "--max-running", "0"], "--max-running 0"),
        (["--trace", "TRACE", "--device", "h100", "--policies", "best"], "there are none, sdK"),
    ],
)
def test_bad_input_is_named(arguments, message, trace):
    result = call(*(str(trace) if argument == "TRACE" else argument for argument in arguments))
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())


def test_classes_that_are_none(tmp_path):
    path = tmp_path / "classes.json"
    for text, message in (
        ("{", "Expecting"),
        ("[]", "list of objects"),
        ('[{"name": "a"}]', "needs a trace"),
        ('[{"trace": "a", "speed": 1}]', "unknown speed"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            read_classes(path)
