"""Timing the models' passes before serving: where the model of step times starts from."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode
from tqdm import tqdm

from tetris_sglang import __version__
from tetris_sglang.cache import cache_folder
from tetris_sglang.capacity import PassTimes
from tetris_sglang.drafting import Grid
from tetris_sglang.packing import pack_rows_reference
from tetris_sglang.runtime.drafts.windows import Window, make_draft_input
from tetris_sglang.runtime.ranks import Ranks
from tetris_sglang.runtime.verify import forward_target, graph_tier

logger = logging.getLogger(__name__)

_ROUNDS = 4
_CONTEXT_TOKENS = 64
_LONG_CONTEXT_TOKENS = 512
_BUDGET_S = 10.0
"""A round ends when its share is used up: larger sizes are left to the next one, to extrapolation and to real steps."""
_HEAD_START_CYCLES = 20_000_000
"""Of the device's clock, some ten milliseconds: longer than the host takes to launch a step's passes."""
_ROWS_TO_CHECK = 16
_FASTER = 0.85
"""Cached times are taken anew where a pass of so many rows takes less than this share of them."""
_EMITTED = 3
"""Tokens per request that the timed windows hold, where a window has room: what the request of a batch that had most accepted
emits. On a CPU windows are no wider (`narrow_window`)."""
_DRAFT_DEPTH = 3
"""Passes timed together, or a few more, to tell the first from the others."""


def load_or_time_passes(target_worker, draft, *, num_draft_tokens: int, max_rows: int, ranks: Ranks) -> PassTimes:
    """The passes' times on this device, from a cache if these models were timed here before.

    Args:
        draft: a `ModelDraft`, or None where no model drafts.
        num_draft_tokens: columns of the grid. max_rows: of a target's pass.
        ranks: that run the passes together, and get the first one's times.
    """
    path = _cache_path(target_worker, draft, num_draft_tokens, ranks)
    cached = ranks.agree(_read_cache(path))
    if cached is not None:
        if not ranks.agree(_is_faster_now(cached, target_worker, draft, num_draft_tokens)):
            return cached
        logger.info("TETRIS: this device is faster than when %s was written; timing again", path)
    times = time_passes(target_worker, draft, num_draft_tokens=num_draft_tokens, max_rows=max_rows, ranks=ranks)
    times = ranks.agree(times)
    if ranks.is_first:
        _write_cache(path, times)
    return times


def _read_cache(path: Path) -> PassTimes | None:
    try:
        return PassTimes.from_json(json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("TETRIS: %s cannot be read (%s); timing again", path, error)
        return None


def _write_cache(path: Path, times: PassTimes) -> None:
    # Another server may write the same file at the same time.
    temporary = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(times.to_json()))
        temporary.replace(path)
        logger.info("TETRIS: the passes' times are kept in %s", path)
    except OSError as error:
        logger.warning(
            "TETRIS: the passes' times cannot be kept (%s); every start takes them anew. SGLANG_TETRIS_CACHE chooses a "
            "folder that can be written",
            error,
        )


def _is_faster_now(cached: PassTimes, target_worker, draft, num_draft_tokens: int) -> bool:
    """Whether the cached times were taken beside other work. Slower ones stay: real steps show when a device is busy."""
    rows = max(size for size in cached.target_s if size <= _ROWS_TO_CHECK)
    runner = target_worker.model_runner
    run = _target_pass(target_worker, draft, rows, num_draft_tokens, _short_context(runner))
    run()
    fastest = min(_time(run, runner.device) for _ in range(_ROUNDS))
    return fastest < _FASTER * cached.target_s[rows]


def time_passes(target_worker, draft, *, num_draft_tokens: int, max_rows: int, ranks: Ranks) -> PassTimes:
    """Time the target's pass by rows and the draft's by batch size, over made-up requests.

    Everything is timed in turns, so that a burst of other work does not fall on one size alone, and the fastest counts.
    """
    runner = target_worker.model_runner
    max_batch_size = runner.req_to_token_pool.size
    context = _short_context(runner)
    long_context = min(_LONG_CONTEXT_TOKENS, runner.model_config.context_len // 2)
    shortest = further = 0
    if draft is not None:
        shortest = draft.depths[0]
        further = next((depth for depth in draft.depths if depth >= _DRAFT_DEPTH), draft.depths[-1]) - shortest

    def target_pass(rows: int, context_tokens: int) -> Callable[[], None]:
        return _target_pass(target_worker, draft, rows, num_draft_tokens, context_tokens)

    passes: dict[tuple[str, int], Callable[[], None]] = {}
    for rows in _powers_of_two(min(max_rows, runner.max_total_num_tokens)):
        passes["target", rows] = target_pass(rows, context)
    for batch_size in [] if draft is None else _powers_of_two(max_batch_size):
        passes["window", batch_size] = _drafting(draft, batch_size, shortest, context)
        if further:
            passes["draft", batch_size] = _drafting(draft, batch_size, shortest + further, context)
    rows_of_context = min(16, max_rows)
    passes["context", rows_of_context] = target_pass(rows_of_context, long_context)

    best = _time_in_turns(passes, runner.device, ranks)
    # Of the last pass, which no request will be in: the first prefill would take it for the batch's before it.
    runner.shared_read_done_event = None

    def times(kind: str) -> dict[int, float]:
        return {size: seconds for (name, size), seconds in best.items() if name == kind}

    window_s, target_s = times("window"), times("target")
    branch_s = {n: max(s - window_s[n], 0.0) / further for n, s in times("draft").items() if n in window_s}
    context_s = 0.0
    if long_context > context:
        for rows, seconds in times("context").items():
            short = target_s.get(rows, seconds)
            context_s = max(seconds - short, 0.0) / (_count_requests(runner, rows) * (long_context - context))
    return PassTimes(target_s, window_s, branch_s or dict.fromkeys(window_s, 0.0), context_s)


def _time_in_turns(
    passes: dict[tuple[str, int], Callable[[], None]], device: str, ranks: Ranks
) -> dict[tuple[str, int], float]:
    """The fastest time of each pass (kind, size), small ones first: every step needs those.

    Sizes that no round comes to are left out.
    """
    between = passes["target", 1]
    ascending = sorted(passes.items(), key=lambda item: item[0][1])
    best: dict[tuple[str, int], float] = {}
    started_at = time.perf_counter()
    with tqdm(desc="TETRIS: timing passes", total=_ROUNDS * len(passes), leave=False) as progress:
        for number in range(_ROUNDS):
            for key, run in ascending:
                progress.update()
                is_late = ranks.agree(time.perf_counter() - started_at > _BUDGET_S * (number + 1) / _ROUNDS)
                if is_late and (number or key[1] > 1):
                    continue
                if key[0] in ("window", "draft"):
                    # While serving, the target's weights have just gone through the caches.
                    between()
                if key not in best:
                    run()
                best[key] = min(best.get(key, math.inf), _time(run, device))
    logger.info("TETRIS: timed passes in %.1f s", time.perf_counter() - started_at)
    return best


def _time(run: Callable[[], None], device: str) -> float:
    """Seconds. On CUDA the device's alone: while serving, the host is a step ahead of it, as here while the device sleeps."""
    if device != "cuda":
        started_at = time.perf_counter()
        run()
        return time.perf_counter() - started_at
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(_HEAD_START_CYCLES)
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def _count_requests(runner, rows: int) -> int:
    """Of a timed pass: every one has a draft."""
    return min(runner.req_to_token_pool.size, -(-rows // 2))


def _short_context(runner) -> int:
    return min(_CONTEXT_TOKENS, runner.model_config.context_len // 4)


def _target_pass(target_worker, draft, rows: int, num_draft_tokens: int, context_tokens: int) -> Callable[[], None]:
    runner = target_worker.model_runner
    requests = _count_requests(runner, rows)
    batch = _made_up_batch(runner, requests, context_tokens)
    device = batch.seq_lens.device
    hidden_mode = CaptureHiddenMode.NULL if draft is None else draft.spec.target_hidden_mode
    drafts = torch.full((requests,), (rows - requests) // requests, dtype=torch.int32, device=device)
    drafts[: (rows - requests) % requests] += 1
    width = max(num_draft_tokens, int(drafts.max()) + 1)
    grid = Grid(torch.zeros((requests, width), dtype=torch.int64, device=device), max_depth=1)
    tier = graph_tier(target_worker, requests, rows)
    packed = pack_rows_reference(
        drafts,
        grid.tokens,
        batch.seq_lens,
        runner.req_to_token_pool.req_to_token,
        batch.req_pool_indices,
        tier or rows,
    )
    max_drafts = int(drafts.max()) if tier is None else None

    def run() -> None:
        forward_target(batch, target_worker, packed, grid, hidden_mode, max_drafts)

    return run


def _drafting(draft, batch_size: int, depth: int, context_tokens: int) -> Callable[[], None]:
    batch = _made_up_batch(draft.runner, batch_size, context_tokens)
    device = batch.seq_lens.device
    tokens = torch.zeros((batch_size, draft.spec.window_width), dtype=torch.int64, device=device)
    counts = torch.full((batch_size,), min(_EMITTED, draft.spec.window_width), dtype=torch.int64, device=device)
    draft_input = make_draft_input(Window(tokens, counts), tokens[:, -1])

    def run() -> None:
        batch.spec_info = draft_input
        draft.propose(batch, depth)

    return run


class _NobodysRequest:
    """Wants nothing special: whatever is asked of it is None."""

    def __getattr__(self, name: str) -> None:
        return None


def _made_up_batch(runner, batch_size: int, context_tokens: int) -> ScheduleBatch:
    """Requests that all live in the table's row 0, whose slots are the padding slot 0."""
    pool = runner.req_to_token_pool
    device = pool.req_to_token.device
    lens = torch.full((batch_size,), context_tokens, dtype=torch.int64)
    return ScheduleBatch(
        reqs=[_NobodysRequest()] * batch_size,
        req_to_token_pool=pool,
        model_config=runner.model_config,
        device=str(device),
        forward_mode=ForwardMode.DECODE,
        req_pool_indices=torch.zeros(batch_size, dtype=torch.int64, device=device),
        seq_lens=lens.to(device),
        seq_lens_cpu=lens,
        seq_lens_sum=int(lens.sum()),
        spec_algorithm=runner.spec_algorithm,
        sampling_info=SimpleNamespace(
            sampling_seed=None,
            grammars=None,
            has_watermark_candidates=False,
        ),
    )


def _powers_of_two(largest: int) -> list[int]:
    return [2**i for i in range(max(1, largest).bit_length())]


def _cache_path(target_worker, draft, num_draft_tokens: int, ranks: Ranks) -> Path:
    runners = [target_worker.model_runner] + ([] if draft is None else [draft.runner])
    described = [
        __version__,
        torch.__version__,
        [(r.model_config.model_path, str(r.dtype), r.model_config.hf_config.to_json_string()) for r in runners],
        (runners[0].server_args.attention_backend, num_draft_tokens, runners[0].req_to_token_pool.size),
        [getattr(runners[0].server_args, name) for name in ("quantization", "kv_cache_dtype")],
        runners[0].decode_cuda_graph_runner is None,
        (0, 0) if draft is None else (draft.spec.num_children, draft.spec.window_width, _EMITTED),
        torch.cuda.get_device_name() if runners[0].device == "cuda" else (platform.processor(), torch.get_num_threads()),
        (os.cpu_count(), ranks.count),
    ]
    digest = hashlib.sha256(json.dumps(described).encode()).hexdigest()[:16]
    return cache_folder() / "pass_times" / f"{digest}.json"
