"""What a step of each batch size does, per policy, as tables.

`none`, `sdK` (standard speculation: K drafts, all verified), `uniformK+E` (K + E drafted, the first K verified),
`tetrisK+E` (K + E drafted, K per request on average chosen batch-wide), `tetrisD@C` (D drafted, C chosen of the whole batch),
`auto` (depth and capacity by batch size). `hidden:POLICY`: the draft has a device of its own (`costs.passes_s`).

`auto` is the policy that AutoCapacity converges to: it maximises the same objective, with the mean acceptances of the traces
and the true step times in place of learnt ones. Learning, probes, hysteresis and the uncertainty of step times are not in it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import numpy as np

from tetris_sglang.capacity import DraftLimits, FixedCapacity, StepPlan, capacity_shares
from tetris_sglang.tools.simulate.costs import StepCosts, passes_s
from tetris_sglang.tools.simulate.engine import StepPlans
from tetris_sglang.tools.simulate.traces import encode
from tetris_sglang.tools.simulate.workload import RequestClass

GRAMMAR = "none, sdK, uniformK+E, tetrisK+E, tetrisD@C, auto, and hidden:POLICY of each that drafts"
_HIDDEN = "hidden:"
_CURVE_REQUESTS = 16384
"""Requests' steps behind each curve of acceptance."""


def make_plans(policy: str, costs: StepCosts, classes: Sequence[RequestClass], *, max_running: int, seed: int = 0) -> StepPlans:
    """The table of a policy.

    Args:
        policy: see the module.
    Raises:
        ValueError: no such policy, or drafts deeper than the traces.
    """
    depth = min(one.rows.depth for one in classes)
    drafting = policy.removeprefix(_HIDDEN)
    is_hidden = drafting != policy
    if policy == "none":
        return _tabulate(lambda batch: StepPlan(0, 0), max_running, is_uniform=False, has_draft=False)
    if drafting == "auto":
        return choose_plans(costs, classes, max_running=max_running, seed=seed, is_hidden=is_hidden)
    if match := re.fullmatch(r"sd(\d+)", drafting):
        k, extra, is_uniform = int(match[1]), 0, True
    elif match := re.fullmatch(r"uniform(\d+)\+(\d+)", drafting):
        k, extra, is_uniform = int(match[1]), int(match[2]), True
    elif match := re.fullmatch(r"tetris(\d+(?:\.\d+)?)\+(\d+)", drafting):
        k, extra, is_uniform = float(match[1]), int(match[2]), False
    elif match := re.fullmatch(r"tetris(\d+)@(\d+)", drafting):
        k, extra, is_uniform = int(match[1]), 0, False
    else:
        raise ValueError(f"policy {policy!r}: there are {GRAMMAR}")
    drafted = math.ceil(k) + extra
    if not 1 <= drafted <= depth or k <= 0:
        raise ValueError(f"policy {policy}: drafts {drafted} tokens; the trace has 1 to {depth}")
    if is_uniform:
        return _tabulate(lambda batch: StepPlan(drafted, k * batch), max_running, is_uniform=True, is_hidden=is_hidden)
    capacity = FixedCapacity(absolute=int(match[2])) if "@" in policy else FixedCapacity(per_request=k)
    limits = DraftLimits(range(1, drafted + 1), int)
    return _tabulate(lambda batch: capacity.choose(batch, limits), max_running, is_uniform=False, is_hidden=is_hidden)


def _tabulate(plan, max_running: int, *, is_uniform: bool, has_draft: bool = True, is_hidden: bool = False) -> StepPlans:
    plans = [StepPlan(0, 0), *(plan(batch) for batch in range(1, max_running + 1))]
    depths, capacities = np.array(plans, dtype=np.int64).T
    return StepPlans(depths.copy(), capacities.copy(), is_uniform, has_draft, is_hidden)


def choose_plans(
    costs: StepCosts, classes: Sequence[RequestClass], *, max_running: int, seed: int = 0, is_hidden: bool = False
) -> StepPlans:
    """For each batch size the depth and capacity with most expected tokens per second; plain decoding where none pays."""
    depth = min(one.rows.depth for one in classes)
    shares = np.array(capacity_shares(depth))
    sizes = [2**i for i in range(max_running.bit_length())]
    curves = measure_accepted(classes, sizes, shares, seed=seed)
    # A request is among those running as long as it writes.
    presence = np.array([one.share * one.output_len.mean for one in classes])
    lengths = np.array([one.prompt_len.mean + one.output_len.mean / 2 for one in classes])
    context_tokens = float(presence @ lengths / presence.sum())
    levels = np.repeat(np.arange(1, depth + 1), len(shares) - 1)
    per_request = np.tile(shares[1:], depth)
    depths, capacities = np.zeros((2, max_running + 1), np.int64)
    for batch in range(1, max_running + 1):
        position = math.log2(batch)
        low = min(int(position), len(sizes) - 1)
        high = min(low + 1, len(sizes) - 1)
        curve = (1 + low - position) * curves[low] + (position - low) * curves[high] if high > low else curves[low]
        tokens = np.rint(per_request * batch).astype(np.int64)
        is_plan = (tokens > 0) & (tokens <= levels * batch)
        d, c = levels[is_plan], tokens[is_plan]
        at = np.minimum(c / batch, shares[-1])
        right = np.clip(np.searchsorted(shares, at, side="right"), 1, len(shares) - 1)
        part = (at - shares[right - 1]) / (shares[right] - shares[right - 1])
        accepted = (1 - part) * curve[d - 1, right - 1] + part * curve[d - 1, right]
        fixed_s = costs.host_s[batch] + costs.context_s * context_tokens * batch
        seconds = fixed_s + passes_s(costs, batch, batch + c, d, is_hidden)
        value = (1 + accepted) / seconds
        best = int(value.argmax())
        if value[best] > 1 / (fixed_s + costs.target_s[batch]):
            depths[batch], capacities[batch] = d[best], c[best]
    return StepPlans(depths, capacities, False, True, is_hidden)


def measure_accepted(classes: Sequence[RequestClass], sizes: Sequence[int], shares: np.ndarray, *, seed: int) -> np.ndarray:
    """Drafts accepted per request when the best of a batch are verified.

    The counterpart of `capacity.measure_curves`, with what the target accepted in place of survivals.

    Args:
        sizes: of batches. shares: [s], capacities per request.
    Returns:
        [sizes, depth, s] float64, drafted to 1..depth; batches drawn from the positions that such steps visit.
    """
    depth = min(one.rows.depth for one in classes)
    heaviest = max(one.weight for one in classes)
    presence = np.array([one.share * one.output_len.mean for one in classes])
    random = np.random.default_rng([seed, 2])
    curves = np.empty((len(sizes), depth, len(shares)))
    for num_levels in range(1, depth + 1):
        codes, accepted, chance = [], [], []
        for one, present in zip(classes, presence, strict=True):
            visited = one.rows.visit(num_levels)
            codes.append(encode(one.rows.survival[visited, :num_levels], one.weight / heaviest))
            accepted.append(one.rows.accepted[visited])
            chance.append(np.full(len(visited), present / len(visited)))
        codes, accepted, chance = (np.concatenate(parts) for parts in (codes, accepted, chance))
        for number, batch in enumerate(sizes):
            rounds = max(2, _CURVE_REQUESTS // batch)
            drawn = random.choice(len(chance), (rounds, batch), p=chance / chance.sum())
            # Depth-major and stable, as selection ranks.
            ranked = codes[drawn].transpose(0, 2, 1).reshape(rounds, -1)
            order = np.argsort(-ranked.astype(np.int32), axis=1, kind="stable")
            is_accepted = accepted[drawn][:, None, :] > np.arange(num_levels)[:, None]
            best = np.take_along_axis(is_accepted.reshape(rounds, -1), order, axis=1)
            total = np.concatenate(([0.0], best.mean(axis=0).cumsum()))
            at = np.minimum(shares * batch, num_levels * batch)
            curves[number, num_levels - 1] = np.interp(at, np.arange(len(total)), total) / batch
    return curves
