#!/usr/bin/env python
"""How near does automatic capacity come to the best fixed plan, on a new server of a noisy machine?

    python benchmarks/bench_auto.py

Requests walk through the steps of a recorded trace, one row a step: what a plan verifies of it is accepted where the recorded
target accepted it. Times are drawn around those that a server timed, with a machine that is faster and slower in stretches.
`AutoCapacity` learns as it does in a server, from noisy times and from what is accepted; fixed plans run through the same
steps. No model runs: thousands of servers in minutes, where a comparison of real ones has three.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from multiprocessing import Pool
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import torch
import typer
from rich.console import Console
from rich.progress import track

from tetris_sglang.capacity import (
    AcceptCurves,
    AutoCapacity,
    DraftLimits,
    PassTimes,
    StepPlan,
    StepTimeModel,
    capacity_shares,
    measure_curves,
)
from tetris_sglang.tools.bench.results import collect_provenance
from tetris_sglang.trace import read_trace

ROOT = Path(__file__).resolve().parent.parent
TRACES = ROOT / "benchmarks/traces"
RESULT = ROOT / "benchmarks/results/replay/auto.json"
NUM_STEPS = 6
LIMITS = DraftLimits(range(1, NUM_STEPS + 1), lambda depth: 2 * depth)
"""Chains with runners-up."""
FIXED = ((1, 0.5), (1, 1), (1, 2), (2, 1), (2, 2), (3, 2), (3, 3), (4, 4))
"""Depth, and drafts verified per request."""
DRAFTS = {
    "eagle3, temperature 0": ("eagle3_comb", True),
    "eagle3, temperature 1": ("eagle3_comb_sampled", True),
    "useless": ("eagle3_comb", False),
}
"""Trace, and whether anything of it is accepted."""
TIMED = PassTimes(
    target_s={1: 0.061, 2: 0.072, 4: 0.084, 8: 0.104, 16: 0.121, 32: 0.157, 64: 0.214},
    window_s={1: 0.0089, 4: 0.0096, 16: 0.0116, 32: 0.0196},
    branch_s={1: 0.0029, 4: 0.007, 16: 0.0064, 32: 0.0085},
    context_s=1.4e-5,
)
"""Of SmolLM2-135M-Instruct and its head, by a server on two cores (Intel Xeon, 2.8 GHz)."""
MEAN_CONTEXT_TOKENS = 100
SLOW_SHARE, SPEED_SHARE = 0.95, 0.3
"""Of a machine's speed that is left a step later (its stretches last some twenty steps), and of the noise that adds to it."""
CURVE_DEVIATION = 0.1
"""How far, relatively, a server's real times are from what it timed."""


class Case(NamedTuple):
    draft: str
    batch_size: int
    num_steps: int
    num_servers: int
    noise: float
    """Standard deviation of a step's time, relative; the machine's speed drifts by about as much."""


def read_requests(name: str) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Of each request of a trace: depths, survivals and acceptances [steps, num_nodes]."""
    trace = read_trace(TRACES / f"{name}.trace.gz")
    parts = trace.node_depths, trace.survival.astype(np.float32), trace.accepted.astype(bool)
    return [tuple(part[trace.requests == number] for part in parts) for number in np.unique(trace.requests)]


def walk(requests, batch_size: int, random: np.random.Generator) -> Iterator[list[np.ndarray]]:
    """Every step's depths, survivals and acceptances [batch_size, num_nodes]; who has ended makes room for another."""
    running = [[requests[random.integers(len(requests))], 0] for _ in range(batch_size)]
    while True:
        rows = [[part[at] for part in request] for request, at in running]
        yield [np.array(part) for part in zip(*rows, strict=True)]
        for slot in running:
            slot[1] += 1
            if slot[1] == len(slot[0][0]):
                slot[:] = [requests[random.integers(len(requests))], 0]


def serve(case: Case, requests, seed: int, plan: StepPlan | None) -> float:
    """Tokens per second of one server, for `requests` of `read_requests`; plan None: automatic."""
    _, is_useful = DRAFTS[case.draft]
    random, batch_size = np.random.default_rng([seed, 1]), case.batch_size
    shares = capacity_shares(2 * NUM_STEPS)
    sizes = {"max_rows": (2 * NUM_STEPS + 1) * batch_size, "max_batch_size": batch_size}
    factors = np.exp(CURVE_DEVIATION * random.standard_normal(3))
    curves = (TIMED.target_s, TIMED.window_s, TIMED.branch_s)
    real = [{size: factor * s for size, s in curve.items()} for factor, curve in zip(factors, curves, strict=True)]
    truth = StepTimeModel(PassTimes(*real, context_s=TIMED.context_s), **sizes)
    auto = None if plan else AutoCapacity(StepTimeModel(TIMED, **sizes), AcceptCurves(NUM_STEPS, shares))
    context_tokens = float(MEAN_CONTEXT_TOKENS * batch_size)
    speed, tokens, total_s = 0.0, 0, 0.0
    steps = walk(requests, batch_size, np.random.default_rng([seed, 2]))
    for _, (depths, survival, accepted) in zip(range(case.num_steps), steps, strict=False):
        chosen = plan or auto.choose(batch_size, LIMITS, context_tokens)
        shape = LIMITS.shape_of(chosen, batch_size, context_tokens)
        if auto:
            auto.begin_step(shape)
        num_accepted = 0
        if chosen.depth:
            value = np.where(depths <= chosen.depth, survival, -1.0).ravel()
            selected = np.argsort(-value, kind="stable")[: chosen.capacity_tokens]
            num_accepted = int(accepted.ravel()[selected].sum()) if is_useful else 0
            if auto:
                seen = [torch.from_numpy(survival), torch.from_numpy(depths), chosen.depth, torch.tensor(shares)]
                expected = auto.curves.observe(measure_curves(*seen).numpy(), batch_size, chosen.capacity_tokens)
                auto.confirm(batch_size, expected, num_accepted)
        seconds = truth.predict_step(shape)
        if auto:
            # What it is told; all arms are held to what a quiet machine takes.
            speed = SLOW_SHARE * speed + SPEED_SHARE * case.noise * random.standard_normal()
            auto.observe_time(shape, seconds * np.exp(speed + case.noise * random.standard_normal()))
        tokens, total_s = tokens + batch_size + num_accepted, total_s + seconds
    return tokens / total_s


def measure(case: Case) -> dict:
    """Gains over plain decoding of each new server, and of the fixed plan that is best on average."""
    torch.set_num_threads(1)
    requests = read_requests(DRAFTS[case.draft][0])

    def serve_all(plan: StepPlan | None) -> np.ndarray:
        return np.array([serve(case, requests, seed, plan) for seed in range(case.num_servers)])

    plain = serve_all(StepPlan(0, 0))
    plans = {share: StepPlan(share[0], max(1, round(share[1] * case.batch_size))) for share in FIXED}
    fixed = {share: float(np.mean(serve_all(plan) / plain)) for share, plan in plans.items()}
    best = max(fixed, key=fixed.get)
    auto = serve_all(None) / plain
    return case._asdict() | {
        "best_fixed": best,
        "best_fixed_gain": fixed[best],
        "gain": float(auto.mean()),
        "gain_deviation": float(auto.std()),
        "gain_least": float(auto.min()),
    }


def main(
    out: Annotated[Path, typer.Option(help="where to write the JSON")] = RESULT,
    batch_sizes: Annotated[str, typer.Option(help="running requests")] = "1,4,16",
    num_steps: Annotated[int, typer.Option(min=1, help="of one request; more have a third of it")] = 360,
    num_servers: Annotated[int, typer.Option(min=2, help="new servers per case")] = 32,
    noise: Annotated[float, typer.Option(min=0, help="standard deviation of a step's time, relative")] = 0.15,
    jobs: Annotated[int, typer.Option(min=1, help="processes")] = 2,
) -> None:
    """Hold automatic capacity against plain decoding and fixed plans, on recorded steps."""
    cases = [
        Case(draft, size, num_steps if size == 1 else num_steps // 3, num_servers, noise)
        for draft in DRAFTS
        for size in map(int, batch_sizes.split(","))
    ]
    with Pool(jobs) as pool:
        rows = list(track(pool.imap(measure, cases), total=len(cases), description="serving", console=Console()))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"provenance": collect_provenance(), "rows": rows}, indent=1) + "\n")
    for row in rows:
        print(f"{row['draft']}, {row['batch_size']}: {row['gain']:.3f}, best fixed {row['best_fixed_gain']:.3f}")
    print(f"written: {out}")


if __name__ == "__main__":
    typer.run(main)
