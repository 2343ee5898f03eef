"""The step loop of a fleet, compiled: what every replica does until the last request has its tokens.

A replica does one thing at a time, as SGLang's scheduler does. If requests wait and there is room, it prefills: first come,
first served, up to `chunk_tokens` tokens in a step of its own, while nobody decodes. Otherwise it decodes: all running requests
draft to the plan's depth, the plan's capacity is shared out, and each request emits what is accepted and one token more.

`simulate_fleet` reads everything random from its arguments, so that it and `plain_engine.py` agree to the last bit.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from tetris_sglang.tools.simulate.costs import StepCosts, passes_s
from tetris_sglang.tools.simulate.traces import CODES
from tetris_sglang.tools.simulate.workload import Requests, RowTable

ROUTERS = ("round_robin", "shortest_queue", "power_of_two")
_ROUND_ROBIN, _SHORTEST_QUEUE, _POWER_OF_TWO = range(3)
_IDLE, _PREFILL, _DECODE = range(3)


class StepPlans(NamedTuple):
    """A policy as the engine knows it: what a step of each batch size does."""

    depth: np.ndarray
    """[max_running + 1] int64, passes of the draft."""
    capacity: np.ndarray
    """[max_running + 1] int64, drafts verified over the batch; 0: plain decoding."""
    is_uniform: bool
    """Every request verifies capacity / batch of its own drafts, instead of the batch's best."""
    has_draft: bool
    """A draft is served, and prefills every prompt."""
    is_hidden: bool = False
    """The draft has a device of its own, see `passes_s`."""


class Setup(NamedTuple):
    """Of the servers and the load."""

    num_replicas: int
    router: int
    """Index into ROUTERS."""
    max_running: int
    chunk_tokens: int
    """Of a prefill batch."""
    kv_tokens: int
    """That a replica's KV cache holds; a request reserves its prompt and its output when it starts."""
    users: int
    """Requests in flight in a closed loop; 0: requests come at their arrival times."""
    warm_up: int
    """Requests before the measuring window begins; it ends when the last request arrives."""


_passes_s = njit(cache=True, nogil=True)(passes_s)


class Counts(NamedTuple):
    """Of a fleet, in the measuring window. Seconds are summed over replicas."""

    num_steps: int
    decode_steps: int
    decoded_requests: int
    """Summed over decoding steps."""
    rows: int
    """Of target passes of decoding steps."""
    speculating_requests: int
    """Summed over decoding steps that drafted."""
    selected: int
    accepted: int
    tokens: int
    """Emitted, that of a prefill included."""
    busy_s: float
    window_s: float
    all_steps: int
    """Of the whole simulation."""
    end_s: float
    """When the last request had its tokens."""


class Times(NamedTuple):
    """Of each request [M] float64, seconds of the simulated clock."""

    start_s: np.ndarray
    """Arrival."""
    first_token_s: np.ndarray
    finish_s: np.ndarray
    replica: np.ndarray
    """[M] int32."""


@njit(cache=True, nogil=True)
def choose_prefixes(codes, at, batch, depth, capacity, lens, histogram, tied):
    """TETRIS's choice by counting sort: `selection.select_prefixes` on whole-number survivals, ties included.

    Args:
        codes: [P, D] uint16 below CODES, non-increasing. at: [batch] rows. depth: levels drafted. lens: [batch], written.
        histogram: [CODES] int64, tied: [batch] int64, scratch.
    Returns:
        The number of drafts selected.
    """
    histogram[:] = 0
    for i in range(batch):
        row = at[i]
        for level in range(depth):
            histogram[codes[row, level]] += 1
    threshold, left = CODES - 1, capacity
    while threshold > 0 and histogram[threshold] <= left:
        left -= histogram[threshold]
        threshold -= 1
    # All above the threshold are in; they are prefixes. Without branches: which it will be, nobody can predict.
    num_tied = selected = 0
    for i in range(batch):
        row, above, reached = at[i], 0, 0
        for level in range(depth):
            above += codes[row, level] > threshold
            reached += codes[row, level] >= threshold
        lens[i] = above
        selected += above
        if reached > above and threshold > 0:
            tied[num_tied] = i
            num_tied += 1
    # Of those at the threshold as many as are left, level by level and request by request.
    for level in range(depth):
        for number in range(num_tied):
            i = tied[number]
            if left > 0 and lens[i] == level and codes[at[i], level] == threshold:
                lens[i] += 1
                selected += 1
                left -= 1
    return selected


@njit(cache=True, nogil=True)
def _simulate(requests, table, costs, plans, setup, times):
    num_requests, num_replicas = len(requests.output_lens), setup.num_replicas
    max_running = setup.max_running
    arrival_s, class_starts = requests.arrival_s, table.class_starts
    codes, accepted_of = table.codes, table.accepted

    # Running requests of each replica, in the order in which they joined.
    running = np.zeros((num_replicas, max_running), np.int32)
    at = np.zeros((num_replicas, max_running), np.int32)
    remaining = np.zeros((num_replicas, max_running), np.int32)
    kinds = np.zeros((num_replicas, max_running), np.int32)
    num_running = np.zeros(num_replicas, np.int64)
    context = np.zeros(num_replicas, np.int64)
    kv_used = np.zeros(num_replicas, np.int64)
    # Waiting requests: linked lists.
    behind = np.full(num_requests, -1, np.int64)
    head, tail = np.full(num_replicas, -1, np.int64), np.full(num_replicas, -1, np.int64)
    load = np.zeros(num_replicas, np.int64)
    head_prefilled = np.zeros(num_replicas, np.int64)
    # The step that each replica is in.
    doing = np.full(num_replicas, _IDLE, np.int64)
    step_end = np.full(num_replicas, np.inf)
    step_s = np.zeros(num_replicas)
    joining = np.zeros(num_replicas, np.int64)
    emits = np.zeros((num_replicas, max_running), np.int32)
    step_counts = np.zeros((num_replicas, 4), np.int64)

    lens = np.zeros(max_running, np.int32)
    tied = np.zeros(max_running, np.int64)
    histogram = np.zeros(CODES, np.int64)
    arrived = finished = 0
    due = 0  # requests of a closed loop that may be sent
    if setup.users:
        due = min(setup.users, num_requests)
    turn = 0
    now = window_start = window_end = 0.0
    num_steps = decode_steps = decoded = rows_sum = speculating = 0
    selected_sum = accepted_sum = tokens = all_steps = 0
    busy_s = 0.0

    while finished < num_requests:
        # -- what happens next: a step ends, or a request arrives
        replica, next_end = -1, np.inf
        for r in range(num_replicas):
            if step_end[r] < next_end:
                replica, next_end = r, step_end[r]
        touched = -1
        if due == 0 and not (setup.users == 0 and arrived < num_requests and arrival_s[arrived] < next_end):
            # -- a step has ended
            r, now = replica, next_end
            in_window = setup.warm_up < arrived < num_requests
            num_tokens = 0
            if doing[r] == _PREFILL:
                for _ in range(joining[r]):
                    request = head[r]
                    head[r] = behind[request]
                    times.first_token_s[request] = now
                    left = requests.output_lens[request] - 1
                    num_tokens += 1
                    if left == 0:
                        times.finish_s[request] = now
                        kv_used[r] -= requests.prompt_lens[request] + requests.output_lens[request]
                        finished += 1
                        load[r] -= 1
                        due += setup.users > 0
                        continue
                    slot = num_running[r]
                    running[r, slot], remaining[r, slot] = request, left
                    at[r, slot] = requests.first_rows[request]
                    kinds[r, slot] = requests.class_ids[request]
                    context[r] += requests.prompt_lens[request] + 1
                    num_running[r] += 1
                if head[r] < 0:
                    tail[r] = -1
            else:
                kept = 0
                for i in range(num_running[r]):
                    request, emitted = running[r, i], emits[r, i]
                    num_tokens += emitted
                    left = remaining[r, i] - emitted
                    if left == 0:
                        times.finish_s[request] = now
                        size = requests.prompt_lens[request] + requests.output_lens[request]
                        context[r] -= size - emitted
                        kv_used[r] -= size
                        finished += 1
                        load[r] -= 1
                        due += setup.users > 0
                        continue
                    row, kind = at[r, i] + emitted, kinds[r, i]
                    if row >= class_starts[kind + 1]:
                        row -= class_starts[kind + 1] - class_starts[kind]
                    running[r, kept], at[r, kept], remaining[r, kept] = request, row, left
                    kinds[r, kept] = kind
                    context[r] += emitted
                    kept += 1
                num_running[r] = kept
            all_steps += 1
            if in_window:
                num_steps += 1
                tokens += num_tokens
                busy_s += step_s[r]
                if doing[r] == _DECODE:
                    decode_steps += 1
                    decoded += step_counts[r, 0]
                    rows_sum += step_counts[r, 0] + step_counts[r, 2]
                    speculating += step_counts[r, 1]
                    selected_sum += step_counts[r, 2]
                    accepted_sum += step_counts[r, 3]
            doing[r], step_end[r] = _IDLE, np.inf
            touched = r
            due = min(due, num_requests - arrived)
        else:
            # -- a request arrives
            if setup.users:
                due -= 1
            else:
                now = arrival_s[arrived]
            request = arrived
            arrived += 1
            if arrived == setup.warm_up + 1:
                window_start = now
            if arrived == num_requests:
                window_end = now
            times.start_s[request] = now
            r = 0
            if num_replicas > 1:
                if setup.router == _ROUND_ROBIN:
                    r = turn
                    turn = (turn + 1) % num_replicas
                elif setup.router == _SHORTEST_QUEUE:
                    for other in range(1, num_replicas):
                        if load[other] < load[r]:
                            r = other
                else:
                    r = int(requests.router_draws[request, 0] * num_replicas)
                    other = int(requests.router_draws[request, 1] * (num_replicas - 1))
                    other += other >= r
                    if load[other] < load[r]:
                        r = other
            times.replica[request] = r
            load[r] += 1
            if tail[r] < 0:
                head[r] = request
            else:
                behind[tail[r]] = request
            tail[r] = request
            touched = r

        # -- idle replicas begin their next step, once all that happens now has happened
        if due > 0:
            continue
        for r in range(num_replicas) if setup.users else range(touched, touched + 1):
            if doing[r] != _IDLE:
                continue
            budget, room, joins = setup.chunk_tokens, max_running - num_running[r], 0
            request = head[r]
            while request >= 0 and budget > 0 and joins < room:
                prompt_len = requests.prompt_lens[request]
                done = head_prefilled[r] if joins == 0 else 0
                if done == 0:
                    size = prompt_len + requests.output_lens[request]
                    if kv_used[r] + size > setup.kv_tokens:
                        break
                    kv_used[r] += size
                taken = min(budget, prompt_len - done)
                budget -= taken
                if done + taken < prompt_len:
                    # The last one that fits: the rest of it comes first in the next batch.
                    head_prefilled[r] = done + taken
                    break
                if joins == 0:
                    head_prefilled[r] = 0
                joins += 1
                request = behind[request]
            size = setup.chunk_tokens - budget
            if size > 0:
                seconds = costs.target_s[size] + costs.host_s[1]
                if plans.has_draft:
                    seconds += costs.branch_s[size]
                doing[r], joining[r] = _PREFILL, joins
            elif num_running[r] > 0:
                batch = num_running[r]
                depth, capacity = plans.depth[batch], plans.capacity[batch]
                selected = accepted = 0
                if capacity == 0:
                    for i in range(batch):
                        emits[r, i] = 1
                else:
                    if plans.is_uniform:
                        selected = capacity
                        lens[:batch] = capacity // batch
                    else:
                        selected = choose_prefixes(codes, at[r], batch, depth, capacity, lens, histogram, tied)
                    for i in range(batch):
                        correct = min(np.int32(accepted_of[at[r, i]]), lens[i])
                        accepted += correct
                        emits[r, i] = min(correct + 1, remaining[r, i])
                seconds = _passes_s(costs, batch, batch + selected, depth, plans.is_hidden)
                seconds += costs.context_s * context[r] + costs.host_s[batch]
                step_counts[r, 0] = batch
                step_counts[r, 1] = batch if capacity > 0 else 0
                step_counts[r, 2] = selected
                step_counts[r, 3] = accepted
                doing[r] = _DECODE
            else:
                continue
            step_s[r], step_end[r] = seconds, now + seconds

    return (
        num_steps,
        decode_steps,
        decoded,
        rows_sum,
        speculating,
        selected_sum,
        accepted_sum,
        tokens,
        busy_s,
        window_end - window_start,
        all_steps,
        now,
    )


def simulate_fleet(
    requests: Requests, table: RowTable, costs: StepCosts, plans: StepPlans, setup: Setup
) -> tuple[Counts, Times]:
    """Serve all requests.

    Holds no lock while it runs, so threads simulate side by side.

    Raises:
        ValueError: a request that no replica could ever serve, or settings that fit together in no way.
    """
    check(requests, table, plans, setup)
    times = make_times(len(requests.output_lens))
    return Counts(*_simulate(requests, table, costs, plans, setup, times)), times


def make_times(num_requests: int) -> Times:
    return Times(*(np.full(num_requests, np.nan) for _ in range(3)), np.zeros(num_requests, np.int32))


def check(requests: Requests, table: RowTable, plans: StepPlans, setup: Setup) -> None:
    """Compiled code looks at no bounds."""
    largest = int((requests.prompt_lens.astype(np.int64) + requests.output_lens).max(initial=0))
    if largest > setup.kv_tokens:
        raise ValueError(f"a request of {largest} tokens does not fit into a KV cache of {setup.kv_tokens}")
    if min(setup.num_replicas, setup.max_running, setup.chunk_tokens) < 1 or setup.users < 0:
        raise ValueError(f"replicas, running requests and chunk must be at least 1, users 0: got {setup}")
    if len(plans.depth) <= setup.max_running:
        raise ValueError(f"plans for {len(plans.depth) - 1} requests, up to {setup.max_running} may run")
    if plans.depth.max() > table.codes.shape[1]:
        raise ValueError(f"depth {plans.depth.max()}: the trace recorded {table.codes.shape[1]} passes")
    if not 0 <= setup.warm_up < len(requests.output_lens):
        raise ValueError(f"{setup.warm_up} requests to warm up, of {len(requests.output_lens)}")
