"""One simulated setting, what it measures, and how many replicas a load needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np

from tetris_sglang.tools.simulate.costs import StepCosts
from tetris_sglang.tools.simulate.engine import Counts, Setup, StepPlans, Times, simulate_fleet
from tetris_sglang.tools.simulate.workload import Requests, RowTable


@dataclass(frozen=True)
class Outcome:
    """Throughput and counts of the measuring window; latencies of the requests that arrived after warming up.

    Latencies in milliseconds; tpot: per token after the first.
    """

    output_tokens_per_s: float
    requests_per_s: float
    """Finished per second from the first arrival to the last token; nothing is left out."""
    total_tokens_per_s: float
    """Likewise tokens."""
    ttft_p50_ms: float
    ttft_p99_ms: float
    tpot_p50_ms: float
    tpot_p99_ms: float
    e2e_p50_ms: float
    e2e_p99_ms: float
    accept_length: float | None
    """Tokens per request and speculating step, the bonus token included; None where nothing was drafted."""
    success_rate: float | None
    """Accepted of verified drafts."""
    rows_per_step: float
    batch_size: float
    """Mean of the decoding steps."""
    utilisation: float
    """Share of the replicas' time in steps."""
    steps: int
    """Simulated, the whole run."""

    def to_json(self) -> dict:
        return asdict(self)


def simulate_setting(requests: Requests, table: RowTable, costs: StepCosts, plans: StepPlans, setup: Setup) -> Outcome:
    """Simulate and summarise; arguments as `simulate_fleet`'s."""
    return summarise(*simulate_fleet(requests, table, costs, plans, setup), requests, setup)


def summarise(counts: Counts, times: Times, requests: Requests, setup: Setup) -> Outcome:
    measured = slice(setup.warm_up, None)
    ttft = (times.first_token_s - times.start_s)[measured] * 1e3
    e2e = (times.finish_s - times.start_s)[measured] * 1e3
    further = requests.output_lens[measured] - 1
    tpot = ((e2e - ttft) / np.maximum(further, 1))[further > 0]
    lasted_s = counts.end_s - float(times.start_s[0])
    decode_steps = max(counts.decode_steps, 1)

    def quantiles(values: np.ndarray) -> tuple[float, float]:
        return tuple(np.percentile(values, (50, 99)).tolist()) if len(values) else (0.0, 0.0)

    ttft_ms, tpot_ms, e2e_ms = quantiles(ttft), quantiles(tpot), quantiles(e2e)
    speculating = counts.speculating_requests
    return Outcome(
        output_tokens_per_s=counts.tokens / counts.window_s if counts.window_s > 0 else 0.0,
        requests_per_s=len(requests.output_lens) / lasted_s,
        total_tokens_per_s=float(requests.output_lens.sum(dtype=np.int64)) / lasted_s,
        ttft_p50_ms=ttft_ms[0],
        ttft_p99_ms=ttft_ms[1],
        tpot_p50_ms=tpot_ms[0],
        tpot_p99_ms=tpot_ms[1],
        e2e_p50_ms=e2e_ms[0],
        e2e_p99_ms=e2e_ms[1],
        accept_length=1 + counts.accepted / speculating if speculating else None,
        success_rate=counts.accepted / counts.selected if counts.selected else None,
        rows_per_step=counts.rows / decode_steps,
        batch_size=counts.decoded_requests / decode_steps,
        utilisation=counts.busy_s / (counts.window_s * setup.num_replicas) if counts.window_s > 0 else 0.0,
        steps=counts.all_steps,
    )


def find_replicas(is_enough: Callable[[int], bool], most: int) -> int | None:
    """The smallest number of replicas that is enough, at most `most`, by doubling and bisection; None: not even those."""
    low, high = 0, 1
    while not is_enough(high):
        if high >= most:
            return None
        low, high = high, min(2 * high, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high
