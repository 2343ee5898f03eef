"""`tetris-sglang simulate`: from options to tables, JSON and a plot."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from tqdm import tqdm

from tetris_sglang.tools.simulate import report
from tetris_sglang.tools.simulate.costs import (
    StepCosts,
    count_kv_tokens,
    load_pass_times,
    make_costs,
    model_passes,
)
from tetris_sglang.tools.simulate.engine import ROUTERS, Setup, StepPlans
from tetris_sglang.tools.simulate.fleet import Outcome, find_replicas, simulate_setting
from tetris_sglang.tools.simulate.policies import make_plans
from tetris_sglang.tools.simulate.traces import read_rows
from tetris_sglang.tools.simulate.workload import (
    Lengths,
    RequestClass,
    Requests,
    RowTable,
    draw_arrivals,
    draw_requests,
    join_rows,
    read_arrivals,
    read_classes,
)

REFERENCE = "none"
_WAVES = 4
"""Requests per user of a closed loop, the first one to warm up."""
_MIN_REQUESTS = 2000
_WARM_UP_SHARE = 0.1
_UNLIMITED = 2**62


@dataclass(frozen=True)
class Scenario:
    """All that the settings of one command have in common."""

    classes: Sequence[RequestClass]
    table: RowTable
    costs: StepCosts
    setup: Setup
    arrivals: str
    """closed, poisson, gamma or a file."""
    burstiness: float
    num_requests: int | None
    seed: int

    @property
    def is_closed(self) -> bool:
        return self.arrivals == "closed"

    def plans(self, policy: str) -> StepPlans:
        return make_plans(policy, self.costs, self.classes, max_running=self.setup.max_running, seed=self.seed)

    def load(self, load: float) -> tuple[Requests, Setup]:
        """The requests of so many users, or so many requests per second."""
        if self.is_closed:
            users = int(load)
            count = self.num_requests or max(_MIN_REQUESTS, _WAVES * users)
            if count <= users:
                raise ValueError(f"--requests {count}: {users} users send as many before any has finished")
            return (
                draw_requests(self.classes, count, seed=self.seed),
                self.setup._replace(users=users, warm_up=users),
            )
        if self.arrivals in ("poisson", "gamma"):
            count = self.num_requests or _MIN_REQUESTS
            arrival_s = draw_arrivals(self.arrivals, load, count, burstiness=self.burstiness, seed=self.seed)
        else:
            arrival_s = read_arrivals(Path(self.arrivals))[: self.num_requests]
        requests = draw_requests(self.classes, len(arrival_s), seed=self.seed, arrival_s=arrival_s)
        return requests, self.setup._replace(warm_up=int(_WARM_UP_SHARE * len(arrival_s)))


def simulate(
    trace: str = "",
    classes: Path | None = None,
    pass_times: Path | None = None,
    device: str = "",
    model_b: float = 8.0,
    draft_b: float = 0.5,
    kv_kib_per_token: float = 128.0,
    host_ms: float | None = None,
    arrivals: str = "closed",
    users: str = "1,4,16,64,256",
    rates: str = "1,2,4,8",
    burstiness: float = 2.0,
    requests: int | None = None,
    prompt_len: str = "exp:256",
    output_len: str = "exp:256",
    max_running: int = 256,
    chunk_tokens: int = 8192,
    kv_tokens: int | None = None,
    replicas: int = 1,
    router: str = "power_of_two",
    policies: str = "none,sd3,tetris3+1,auto",
    capacities: str = "",
    slo_e2e_ms: float | None = None,
    slo_tpot_ms: float | None = None,
    max_replicas: int = 64,
    threads: int | None = None,
    seed: int = 0,
    as_json: Path | None = None,
    plot: Path | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """Simulate every policy under every load, print tables, and return what they show.

    Options are those of the command line (cli.py); `capacities`, `slo_*_ms` ask for more tables.

    Raises:
        ValueError: naming the option.
    """
    if console is None:
        # Into a file or a pipe the tables go unbroken.
        console = Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else 140)
    options = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in locals().items()
        if name not in ("console", "as_json", "plot", "threads")
    }
    for name, value in (("max-running", max_running), ("replicas", replicas), ("chunk-tokens", chunk_tokens)):
        if value < 1:
            raise ValueError(f"--{name} {value}: give a number of at least 1")
    if requests is not None and requests < 2:
        raise ValueError(f"--requests {requests}: give at least 2")
    if router not in ROUTERS:
        raise ValueError(f"--router {router}: there are {', '.join(ROUTERS)}; cache-aware routing is not modelled")
    names = list(dict.fromkeys((REFERENCE, *policies.split(","))))
    kinds = _make_classes(trace, classes, prompt_len, output_len, seed)
    if (pass_times is None) == (not device):
        raise ValueError("give either --pass-times (timed by a server) or --device (a roofline)")
    model = {"model_b": model_b, "draft_b": draft_b, "kv_kib_per_token": kv_kib_per_token}
    passes = load_pass_times(pass_times) if pass_times else model_passes(device, **model)
    if kv_tokens is None:
        kv_tokens = count_kv_tokens(device, **model) if device else _UNLIMITED
    table = join_rows(kinds)
    costs = make_costs(
        passes,
        max_running=max_running,
        num_drafts=table.codes.shape[1],
        chunk_tokens=chunk_tokens,
        host_s=None if host_ms is None else host_ms / 1e3,
    )
    setup = Setup(replicas, ROUTERS.index(router), max_running, chunk_tokens, kv_tokens, 0, 0)
    scenario = Scenario(kinds, table, costs, setup, arrivals, burstiness, requests, seed)
    loads = _read_loads(arrivals, users, rates)
    source = "passes timed by a server" if pass_times else report.MODELLED.format(device=device)
    plans = {name: scenario.plans(name) for name in names}
    deepest = table.codes.shape[1]
    shares = _numbers(capacities, "--capacities") if capacities else []
    swept = {share: scenario.plans(f"tetris{share:g}+{deepest - math.ceil(share)}") for share in shares}

    outcomes = _simulate_all(scenario, {**plans, **swept}, loads, threads)
    results: dict[str, Any] = {
        "options": options,
        "step_times": source,
        "settings": [
            {"policy": name, "load": load, "gain": _gain(scenario, outcomes, name, load)} | outcomes[name, load].to_json()
            for name in names
            for load in loads
        ],
    }
    console.print(f"{source}; {_describe(scenario)}", highlight=False)
    report.print_settings(results["settings"], scenario.is_closed, console)
    report.print_where_it_pays(results["settings"], scenario.is_closed, console)
    if swept:
        results["capacities"] = [
            {
                "capacity_per_request": share,
                "load": load,
                "output_tokens_per_s": outcomes[share, load].output_tokens_per_s,
            }
            for share in shares
            for load in loads
        ]
        report.print_capacities(results["capacities"], results["settings"], console)
    if slo_e2e_ms or slo_tpot_ms:
        results["replicas"] = _find_fleets(scenario, plans, loads, slo_e2e_ms, slo_tpot_ms, max_replicas, threads)
        report.print_replicas(results["replicas"], slo_e2e_ms, slo_tpot_ms, max_replicas, console)
    if as_json:
        as_json.parent.mkdir(parents=True, exist_ok=True)
        as_json.write_text(json.dumps(results, indent=1) + "\n")
    if plot:
        report.plot(results, scenario.is_closed, plot)
    return results


def _make_classes(trace: str, classes: Path | None, prompt_len: str, output_len: str, seed: int) -> list[RequestClass]:
    if (classes is None) == (not trace):
        raise ValueError("give either --trace or --classes")
    if classes:
        return read_classes(classes, seed=seed)
    lengths = Lengths.parse(prompt_len, "--prompt-len"), Lengths.parse(output_len, "--output-len")
    found = []
    for path in map(Path, trace.split(",")):
        if not path.is_file():
            raise ValueError(f"--trace {path}: no such file")
        found.append(RequestClass(path.name.split(".")[0], read_rows(path, seed=seed), *lengths))
    return found


def _read_loads(arrivals: str, users: str, rates: str) -> list[float]:
    if arrivals == "closed":
        loads = _numbers(users, "--users")
        if any(load != int(load) for load in loads):
            raise ValueError(f"--users {users}: give whole numbers")
        return loads
    if arrivals in ("poisson", "gamma"):
        return _numbers(rates, "--rates")
    times = read_arrivals(Path(arrivals))
    return [len(times) / max(float(times[-1]), 1e-9)]


def _numbers(text: str, option: str) -> list[float]:
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{option} {text!r}: give numbers separated by commas") from None
    if not all(value > 0 and math.isfinite(value) for value in values):
        raise ValueError(f"{option} {text!r}: give numbers above 0")
    return sorted(set(values))


def _simulate_all(scenario: Scenario, plans: dict, loads: Sequence[float], threads: int | None) -> dict[tuple, Outcome]:
    """Every policy under every load; the largest loads first, since they take longest."""
    keys = [(name, load) for load in sorted(loads, reverse=True) for name in plans]
    loaded = {load: scenario.load(load) for load in loads}

    def run(key: tuple) -> Outcome:
        requests, setup = loaded[key[1]]
        return simulate_setting(requests, scenario.table, scenario.costs, plans[key[0]], setup)

    return dict(zip(keys, _in_threads(run, keys, threads, "simulating"), strict=True))


def _in_threads(run: Callable, keys: Sequence, threads: int | None, description: str) -> Iterable:
    """The compiled loop holds no lock, so threads use as many cores."""
    with ThreadPoolExecutor(threads or os.cpu_count()) as pool:
        return list(tqdm(pool.map(run, keys), total=len(keys), desc=description, unit="setting", leave=False))


def _gain(scenario: Scenario, outcomes: dict, name: str, load: float) -> float:
    """Against no speculation: throughput in a closed loop; elsewhere, where throughput is what arrives, the median latency."""
    mine, plain = outcomes[name, load], outcomes[REFERENCE, load]
    if scenario.is_closed:
        return mine.output_tokens_per_s / plain.output_tokens_per_s if plain.output_tokens_per_s else math.nan
    return plain.e2e_p50_ms / mine.e2e_p50_ms


def _find_fleets(scenario, plans, loads, slo_e2e_ms, slo_tpot_ms, most, threads) -> list[dict[str, Any]]:
    """Replicas per policy and load whose 99th percentiles keep to the targets."""
    keys = [(name, load) for name in plans for load in loads]

    def run(key: tuple) -> int | None:
        name, load = key
        requests, setup = scenario.load(load)

        def is_enough(replicas: int) -> bool:
            outcome = simulate_setting(
                requests, scenario.table, scenario.costs, plans[name], setup._replace(num_replicas=replicas)
            )
            return outcome.e2e_p99_ms <= (slo_e2e_ms or math.inf) and outcome.tpot_p99_ms <= (slo_tpot_ms or math.inf)

        return find_replicas(is_enough, most)

    found = _in_threads(run, keys, threads, "fleets")
    return [{"policy": name, "load": load, "replicas": replicas} for (name, load), replicas in zip(keys, found, strict=True)]


def _describe(scenario: Scenario) -> str:
    setup = scenario.setup
    fleet = f"{setup.num_replicas} replicas, {ROUTERS[setup.router]}" if setup.num_replicas > 1 else "1 replica"
    kv = "" if setup.kv_tokens == _UNLIMITED else f", {setup.kv_tokens} tokens of KV cache each"
    kinds = ", ".join(
        f"{kind.name} ({np.minimum(kind.rows.accepted, 3).mean():.2f} of 3 accepted)" for kind in scenario.classes
    )
    return f"{fleet}{kv}; at most {setup.max_running} running; drafts: {kinds}"
