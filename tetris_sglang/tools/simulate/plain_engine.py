"""The engine once more, plainly: slow, short, and with nothing of the compiled one in it but its tables.

Tests hold the two against each other; `benchmarks/bench_simulate.py` says how much slower this is.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import torch

from tetris_sglang.selection import select_prefixes
from tetris_sglang.tools.simulate.costs import StepCosts, passes_s
from tetris_sglang.tools.simulate.engine import Counts, Setup, StepPlans, Times, check, make_times
from tetris_sglang.tools.simulate.traces import CODES
from tetris_sglang.tools.simulate.workload import Requests, RowTable


@dataclass
class _Running:
    request: int
    row: int
    remaining: int
    context: int


@dataclass
class _Replica:
    waiting: deque[int] = field(default_factory=deque)
    running: list[_Running] = field(default_factory=list)
    prefilled: int = 0
    kv_used: int = 0
    ends_at: float | None = None
    step: tuple = ()
    """(seconds, requests that join, None) or (seconds, tokens emitted by each, selected, accepted, whether it drafted)."""

    @property
    def load(self) -> int:
        return len(self.waiting) + len(self.running)


def simulate_fleet_reference(
    requests: Requests, table: RowTable, costs: StepCosts, plans: StepPlans, setup: Setup
) -> tuple[Counts, Times]:
    """As `engine.simulate_fleet`."""
    check(requests, table, plans, setup)
    num_requests = len(requests.output_lens)
    times = make_times(num_requests)
    replicas = [_Replica() for _ in range(setup.num_replicas)]
    counts = dict.fromkeys(Counts._fields, 0)
    arrived = finished = 0
    due = min(setup.users, num_requests)
    now = window_start = window_end = 0.0
    while finished < num_requests:
        busy = [replica for replica in replicas if replica.ends_at is not None]
        ending = min(busy, key=lambda replica: replica.ends_at, default=None)
        is_arrival = due > 0
        if not setup.users and arrived < num_requests:
            is_arrival = ending is None or requests.arrival_s[arrived] < ending.ends_at
        if is_arrival:
            now = now if setup.users else float(requests.arrival_s[arrived])
            due -= setup.users > 0
            window_start = now if arrived == setup.warm_up else window_start
            window_end = now
            number = _route(requests, arrived, replicas, setup)
            replicas[number].waiting.append(arrived)
            times.start_s[arrived], times.replica[arrived] = now, number
            arrived += 1
        else:
            now = ending.ends_at
            in_window = setup.warm_up < arrived < num_requests
            done = _end_step(ending, requests, table, times, now)
            finished += done
            due = min(done, num_requests - arrived) if setup.users else 0
            _count(counts, ending.step, in_window)
            ending.ends_at = None
        if due == 0:
            for replica in replicas:
                if replica.ends_at is None:
                    _begin_step(replica, requests, table, costs, plans, setup, now)
    return Counts(**counts | {"window_s": window_end - window_start, "end_s": now}), times


def _route(requests: Requests, number: int, replicas: list[_Replica], setup: Setup) -> int:
    size = len(replicas)
    if setup.router == 0:
        return number % size
    candidates = list(range(size))
    if setup.router == 2 and size > 1:
        first = int(requests.router_draws[number, 0] * size)
        candidates.remove(first)
        candidates = [first, candidates[int(requests.router_draws[number, 1] * (size - 1))]]
    return min(candidates, key=lambda candidate: replicas[candidate].load)


def _begin_step(replica, requests, table, costs, plans, setup, now) -> None:
    budget, joins = setup.chunk_tokens, []
    for request in replica.waiting:
        if budget == 0 or len(replica.running) + len(joins) == setup.max_running:
            break
        prompt_len = int(requests.prompt_lens[request])
        size = prompt_len + int(requests.output_lens[request])
        if replica.prefilled == 0:
            if replica.kv_used + size > setup.kv_tokens:
                break
            replica.kv_used += size
        taken = min(budget, prompt_len - replica.prefilled)
        budget -= taken
        replica.prefilled += taken
        if replica.prefilled < prompt_len:
            break
        joins.append(request)
        replica.prefilled = 0
    tokens = setup.chunk_tokens - budget
    if tokens:
        seconds = costs.target_s[tokens] + costs.host_s[1]
        seconds += costs.branch_s[tokens] if plans.has_draft else 0.0
        replica.step = (float(seconds), joins, None)
    elif replica.running:
        replica.step = _plan_decode(replica, table, costs, plans)
    else:
        return
    replica.ends_at = now + replica.step[0]


def _plan_decode(replica, table, costs, plans) -> tuple:
    batch = len(replica.running)
    depth, capacity = int(plans.depth[batch]), int(plans.capacity[batch])
    rows = [one.row for one in replica.running]
    lens = [0] * batch
    if capacity and plans.is_uniform:
        lens = [capacity // batch] * batch
    elif capacity:
        survival = torch.from_numpy(table.codes[rows, :depth].astype("float32") / (CODES - 1))
        lens = select_prefixes(survival, capacity).tolist()
    correct = [min(int(table.accepted[row]), chosen) for row, chosen in zip(rows, lens, strict=True)]
    emits = [min(n + 1, one.remaining) for n, one in zip(correct, replica.running, strict=True)]
    seconds = passes_s(costs, batch, batch + sum(lens), depth, plans.is_hidden)
    seconds += costs.context_s * sum(one.context for one in replica.running) + costs.host_s[batch]
    return (float(seconds), emits, sum(lens), sum(correct), capacity > 0)


def _end_step(replica, requests, table, times, now) -> int:
    """The number of requests that are finished."""
    finished = []
    if replica.step[2] is None:
        for request in replica.step[1]:
            assert replica.waiting.popleft() == request
            times.first_token_s[request] = now
            left = int(requests.output_lens[request]) - 1
            row, context = int(requests.first_rows[request]), int(requests.prompt_lens[request]) + 1
            replica.running.append(_Running(request, row, left, context))
            finished += [request] if left == 0 else []
    else:
        for one, emitted in zip(replica.running, replica.step[1], strict=True):
            kind = requests.class_ids[one.request]
            start, end = table.class_starts[kind : kind + 2]
            one.row = int(start + (one.row + emitted - start) % (end - start))
            one.remaining -= emitted
            one.context += emitted
            finished += [one.request] if one.remaining == 0 else []
    replica.running = [one for one in replica.running if one.remaining]
    for request in finished:
        times.finish_s[request] = now
        replica.kv_used -= int(requests.prompt_lens[request]) + int(requests.output_lens[request])
    return len(finished)


def _count(counts: dict, step: tuple, in_window: bool) -> None:
    counts["all_steps"] += 1
    if not in_window:
        return
    counts["num_steps"] += 1
    counts["busy_s"] += step[0]
    if step[2] is None:
        counts["tokens"] += len(step[1])
        return
    batch = len(step[1])
    counts["decode_steps"] += 1
    counts["decoded_requests"] += batch
    counts["rows"] += batch + step[2]
    counts["speculating_requests"] += batch if step[4] else 0
    counts["selected"] += step[2]
    counts["accepted"] += step[3]
    counts["tokens"] += sum(step[1])
