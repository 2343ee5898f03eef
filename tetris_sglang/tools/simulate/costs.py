"""What a step costs, as tables over rows and batch sizes.

    decode  = target(rows) + [depth > 0] (window(batch) + (depth - 1) branch(batch)) + context(KV tokens) + host(batch)
    prefill = target(tokens) + [a draft is served] branch(tokens) + host(1)

as docs/capacity.md has it. The passes' times were timed by a server (`load_pass_times`) or come from a roofline
(`model_passes`), which nobody has measured.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tetris_sglang.capacity import PassTimes
from tetris_sglang.capacity.step_time import HOST_SHARE, interpolate

BYTES_PER_WEIGHT = 2


class StepCosts(NamedTuple):
    """Seconds by size, from 0; arrays so that compiled code can read them."""

    target_s: np.ndarray
    """By rows, of a verified batch or a prefill."""
    window_s: np.ndarray
    """[max_running + 1], a draft's first pass by batch size."""
    branch_s: np.ndarray
    """Each further pass by batch size, and the draft's own prefill by tokens."""
    host_s: np.ndarray
    """[max_running + 1], the scheduler's work per decoding step."""
    context_s: float
    """Per token in the KV cache of the batch."""


def passes_s(costs: StepCosts, batch: int, rows, depth, is_hidden: bool):
    """Seconds of a decoding step's passes. Compiled for the engine; policies call it with arrays.

    Args:
        rows, depth: of the target's pass; passes of the draft, 0 for none.
        is_hidden: the draft has a device of its own and drafts for one half of the batch while the target verifies the other
            (CoSine, arXiv:2503.10325), where that is sooner.
    """
    draft_s = (costs.window_s[batch] + (depth - 1) * costs.branch_s[batch]) * (depth > 0)
    in_turn_s = costs.target_s[rows] + draft_s
    if not is_hidden or batch == 1:
        return in_turn_s
    half = (batch + 1) // 2
    draft_s = (costs.window_s[half] + (depth - 1) * costs.branch_s[half]) * (depth > 0)
    return np.minimum(in_turn_s, 2 * np.maximum(costs.target_s[(rows + 1) // 2], draft_s))


def make_costs(
    passes: PassTimes, *, max_running: int, num_drafts: int, chunk_tokens: int, host_s: float | None = None
) -> StepCosts:
    """Tables for batches up to `max_running`, up to `num_drafts` of each request verified.

    Args:
        host_s: of a decoding step. None: HOST_SHARE of the target's pass.
    """
    if not passes.target_s:
        raise ValueError("the pass times hold no target pass")
    target_s = fill_curve(passes.target_s, max(max_running * (num_drafts + 1), chunk_tokens))
    return StepCosts(
        target_s=target_s,
        window_s=fill_curve(passes.window_s, max_running),
        branch_s=fill_curve(passes.branch_s, max(max_running, chunk_tokens)),
        host_s=HOST_SHARE * target_s[: max_running + 1] if host_s is None else np.full(max_running + 1, host_s),
        context_s=float(passes.context_s),
    )


def fill_curve(times: Mapping[int, float], largest: int) -> np.ndarray:
    """Seconds [largest + 1] at every size, as servers read the timed ones; 0 where none were."""
    return interpolate(np.arange(largest + 1.0), times) if times else np.zeros(largest + 1)


def load_pass_times(path: Path) -> PassTimes:
    """What a server timed at start-up: a file of its cache, <SGLANG_TETRIS_CACHE>/pass_times/*.json.

    Raises:
        ValueError: the file is missing or something else.
    """
    try:
        return PassTimes.from_json(json.loads(Path(path).read_text()))
    except OSError as error:
        raise ValueError(f"--pass-times {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"--pass-times {path}: no pass times of a server ({error!r})") from None


# -- a roofline, nobody's measurement ----------------------------------------------------------------------------


class Device(NamedTuple):
    """A data sheet: bytes per second, dense 16-bit floating-point operations per second, bytes."""

    bandwidth: float
    peak_flops: float
    memory: float


DEVICES = {
    "a100": Device(2.04e12, 312e12, 80e9),
    "h100": Device(3.35e12, 989e12, 80e9),
    "h200": Device(4.8e12, 989e12, 141e9),
    "l40s": Device(0.864e12, 362e12, 48e9),
}
_BANDWIDTH_REACHED, _FLOPS_REACHED, _MEMORY_USED = 0.75, 0.6, 0.88
"""Shares of the data sheet: illustrative."""
_TARGET_OVERHEAD_S, _DRAFT_OVERHEAD_S = 3e-4, 1.5e-4
"""Launches, norms, sampling per pass: illustrative."""


def model_passes(device: str, *, model_b: float, draft_b: float, kv_kib_per_token: float) -> PassTimes:
    """Passes of a roofline: max(weights / bandwidth, rows * operations / peak) and an overhead.

    Args:
        model_b, draft_b: parameters in 1e9, 2 bytes each. kv_kib_per_token: of the target's KV cache.
    Raises:
        ValueError: an unknown device, or a model that does not fit.
    """
    sheet = _find_device(device)
    if model_b <= 0 or draft_b <= 0:
        raise ValueError(f"--model-b {model_b:g}, --draft-b {draft_b:g}: give sizes above 0, in 1e9 parameters")

    def pass_s(parameters: float, rows: int, overhead_s: float) -> float:
        memory_s = parameters * BYTES_PER_WEIGHT / (_BANDWIDTH_REACHED * sheet.bandwidth)
        return max(memory_s, rows * 2 * parameters / (_FLOPS_REACHED * sheet.peak_flops)) + overhead_s

    sizes = sorted({round(2 ** (i / 4)) for i in range(4 * 17)})
    draft_s = {size: pass_s(draft_b * 1e9, size, _DRAFT_OVERHEAD_S) for size in sizes}
    return PassTimes(
        {size: pass_s(model_b * 1e9, size, _TARGET_OVERHEAD_S) for size in sizes},
        draft_s,
        draft_s,
        kv_kib_per_token * 1024 / (_BANDWIDTH_REACHED * sheet.bandwidth),
    )


def count_kv_tokens(device: str, *, model_b: float, draft_b: float, kv_kib_per_token: float) -> int:
    """Tokens whose KV entries fit beside the weights."""
    free = _MEMORY_USED * _find_device(device).memory - (model_b + draft_b) * 1e9 * BYTES_PER_WEIGHT
    if free <= 0:
        raise ValueError(f"--model-b {model_b:g} does not fit into one {device}; tensor parallelism is not modelled")
    return int(free / (kv_kib_per_token * 1024))


def _find_device(name: str) -> Device:
    if name not in DEVICES:
        raise ValueError(f"--device {name}: there are {', '.join(DEVICES)}")
    return DEVICES[name]
