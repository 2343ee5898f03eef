"""How many steps a second `tetris-sglang simulate` simulates, beside the plain engine that it must equal.

    python benchmarks/bench_simulate.py

Closed loops with as many users as may run, so that nearly every batch is full; prompts of 16 tokens, 1000 to 3000 written.
Counted are decoding steps before the last request has arrived, in all of the time: prefill batches and emptying come free.
Wall clock, the median of some rounds: one engine on one core, then one per core in threads (several settings, or replicas
behind a router that keeps no queues in mind, run like that).
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated

import typer
from rich.progress import track
from timing import RESULTS, ROOT, Out, describe_run, make_table, open_console, write_results

from tetris_sglang.tools.simulate.costs import make_costs, model_passes
from tetris_sglang.tools.simulate.engine import Setup, simulate_fleet
from tetris_sglang.tools.simulate.plain_engine import simulate_fleet_reference
from tetris_sglang.tools.simulate.policies import make_plans
from tetris_sglang.tools.simulate.traces import read_rows
from tetris_sglang.tools.simulate.workload import Lengths, RequestClass, draw_requests, join_rows

TRACE = ROOT / "benchmarks" / "traces" / "eagle3.trace.gz"
BATCHES = (1, 16, 256, 1024, 4096)
POLICIES = ("none", "sd3", "tetris3+1", "auto")
REFERENCE_UP_TO = 256
"""The plain engine takes too long beyond."""
MILLION = 1e6


def main(
    out: Out = RESULTS / "simulate_speed.json",
    rounds: Annotated[int, typer.Option(min=1, help="timing rounds per cell")] = 3,
    round_s: Annotated[float, typer.Option(help="about so many seconds per round")] = 1.0,
) -> None:
    """Steps simulated per second at batch 1 to 4096."""
    console = open_console()
    rows = read_rows(TRACE)
    cells = [(batch, policy) for batch in BATCHES for policy in POLICIES]
    results = [
        measure(rows, batch, policy, rounds, round_s)
        for batch, policy in track(cells, description="simulating", console=console)
    ]
    cores = os.cpu_count()
    table = make_table(
        *(
            "batch",
            "policy",
            "steps/s, 1 core",
            f"{cores} cores",
            f"a million steps, {cores} cores",
            "plain engine",
        )
    )
    for result in results:
        plain = result["reference_steps_per_s"]
        table.add_row(
            str(result["batch"]),
            result["policy"],
            f"{result['steps_per_s']:,.0f}",
            f"{result['all_cores_steps_per_s']:,.0f}",
            f"{MILLION / result['all_cores_steps_per_s']:.1f} s",
            f"{plain:,.0f}" if plain else "",
        )
    console.print(table)
    write_results(out, console, provenance=describe_run(clock="wall clock"), results=results)


def measure(rows, batch: int, policy: str, rounds: int, round_s: float) -> dict:
    one = RequestClass("chat", rows, Lengths.parse(16, ""), Lengths.parse("1000-3000", ""))
    passes = model_passes("h100", model_b=8, draft_b=0.5, kv_kib_per_token=128)
    costs = make_costs(passes, max_running=batch, num_drafts=rows.survival.shape[1], chunk_tokens=8192)
    plans = make_plans(policy, costs, [one], max_running=batch)
    setup, table = Setup(1, 0, batch, 8192, 10**12, batch, 0), join_rows([one])

    def steps_per_s(engine: Callable, num_requests: int, threads: int = 1) -> tuple[float, float]:
        requests = draw_requests([one], num_requests, seed=0)
        started_at = time.perf_counter()
        with ThreadPoolExecutor(threads) as pool:
            runs = list(pool.map(lambda _: engine(requests, table, costs, plans, setup), range(threads)))
        elapsed_s = time.perf_counter() - started_at
        return sum(counts.decode_steps for counts, _ in runs) / elapsed_s, elapsed_s

    def calm(engine: Callable, num_requests: int, threads: int = 1) -> float:
        return statistics.median(steps_per_s(engine, num_requests, threads)[0] for _ in range(rounds))

    few = 3 * batch
    _, elapsed_s = min((steps_per_s(simulate_fleet, few) for _ in range(3)), key=lambda run: run[1])
    many = int(few * max(1.0, round_s / elapsed_s))
    return {
        "batch": batch,
        "policy": policy,
        "steps_per_s": calm(simulate_fleet, many),
        "all_cores_steps_per_s": calm(simulate_fleet, many, os.cpu_count()),
        "reference_steps_per_s": steps_per_s(simulate_fleet_reference, batch + 1)[0] if batch <= REFERENCE_UP_TO else None,
    }


if __name__ == "__main__":
    typer.run(main)
