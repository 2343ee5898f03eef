"""One run of an arm: sglang.bench_serving as the load, and what it and the server say afterwards.

Runs may take turns of seconds: all but one server are frozen, and their load generators with them, whose clocks stand
still meanwhile. A machine whose speed drifts within a run then drifts for every arm alike.
"""

from __future__ import annotations

import contextlib
import heapq
import io
import json
import multiprocessing
import os
import shlex
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

from tetris_sglang.tools.bench.results import Sample, hash_output
from tetris_sglang.tools.bench.servers import LiveServer, RunFailed
from tetris_sglang.tools.bench.settings import Settings
from tetris_sglang.tools.bench.workloads import EQUAL, WARM_UP_PROMPTS, Load, Workload
from tetris_sglang.tools.load import count_drafts, flush_cache, generate, read_step_counts

# Importing bench_serving takes longer than a run, so load generators are forked from a process that has.
_FORK = multiprocessing.get_context("fork")


def bench_serving_arguments(
    url: str,
    dataset: Sequence[str],
    settings: Settings,
    load: Load,
    temperature: float,
    repeat: int,
    output_file: Path,
) -> list[str]:
    """The arguments of `python -m sglang.bench_serving`; its seed chooses every arm's prompts alike.

    Sampled answers would end at unlike places in every arm. So they go on to the lengths drawn, but for those of a user's own
    prompts.
    """
    goes_on = settings.lengths == EQUAL or (temperature > 0 and not settings.dataset_name)
    return [
        *("--backend", "sglang", "--base-url", url, *dataset, "--seed", str(settings.seed + repeat)),
        *(() if goes_on else ("--disable-ignore-eos",)),
        *("--num-prompts", str(load.num_prompts(settings.min_prompts, settings.waves)), *load.arguments()),
        *("--temperature", str(temperature), *shlex.split(settings.load_flags)),
        *("--warmup-requests", "0", "--disable-tqdm", "--output-details", "--output-file", str(output_file)),
    ]


def _find_output_file(arguments: Sequence[str]) -> Path:
    return Path(arguments[arguments.index("--output-file") + 1])


def _import_serving():
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        from sglang.benchmark import serving  # warns, across the progress bar
    return serving


def run_bench_serving(arguments: Sequence[str]) -> dict[str, Any]:
    """SGLang's command-line entry point in this process: importing it takes longer than a run.

    Raises:
        RunFailed: with the end of what it printed.
    """
    output_file = _find_output_file(arguments)
    output_file.unlink(missing_ok=True)
    printed = io.StringIO()
    argv, sys.argv = sys.argv, ["sglang.bench_serving", *arguments]
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            _import_serving().cli_main()
    except (Exception, SystemExit) as error:
        raise RunFailed(f"sglang.bench_serving ended with {error!r} after: {printed.getvalue()[-200:]}") from error
    finally:
        sys.argv = argv
    return json.loads(output_file.read_text())


class LoadGenerator:
    """sglang.bench_serving in a process of its own, which can be frozen: its clock stands still then."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self._output_file = _find_output_file(arguments)
        self._frozen_s = _FORK.RawValue("d", 0.0)
        self._frozen_at: float | None = None
        self._process = _FORK.Process(target=self._generate, args=(list(arguments),), daemon=True)

    @property
    def _reason_file(self) -> Path:
        return self._output_file.with_suffix(".failure")

    def start(self) -> None:
        _import_serving()
        self._reason_file.unlink(missing_ok=True)
        self._process.start()

    def wait(self, seconds: float | None) -> bool:
        """Whether it ended within so many seconds (None: however long that takes)."""
        self._process.join(seconds)
        return self._process.exitcode is not None

    def freeze(self) -> None:
        os.kill(self._process.pid, signal.SIGSTOP)
        self._frozen_at = time.perf_counter()

    def thaw(self) -> None:
        self._frozen_s.value += time.perf_counter() - self._frozen_at
        os.kill(self._process.pid, signal.SIGCONT)

    def read_result(self) -> dict[str, Any]:
        """Of a generator that has ended.

        Raises:
            RunFailed: with the end of what it printed.
        """
        if self._process.exitcode:
            reason = self._reason_file
            raise RunFailed(
                reason.read_text() if reason.exists() else f"sglang.bench_serving ended with code {self._process.exitcode}"
            )
        return json.loads(self._output_file.read_text())

    def stop(self) -> None:
        """End it, frozen or not; does nothing to one that has ended or never began."""
        if self._process.pid is not None:
            self._process.kill()
            self._process.join()

    def _generate(self, arguments: list[str]) -> None:
        """In the new process."""
        running = time.perf_counter
        time.perf_counter = lambda: running() - self._frozen_s.value
        try:
            run_bench_serving(arguments)
        except RunFailed as failure:
            self._reason_file.write_text(str(failure))
            sys.exit(1)


class Run:
    """One run of one arm.

    Args:
        server: frozen, unless it stays alone.
        repeat: decides the order of the prompts.
    """

    def __init__(
        self,
        server: LiveServer,
        workload: Workload,
        settings: Settings,
        load: Load,
        temperature: float,
        repeat: int,
    ) -> None:
        self.server, self._workload, self._load, self._temperature = server, workload, load, temperature
        num_prompts = load.num_prompts(settings.min_prompts, settings.waves)
        folder = server.records_folder
        self._generator = LoadGenerator(
            bench_serving_arguments(
                server.process.url,
                workload.arguments(num_prompts, repeat, temperature, folder),
                settings,
                load,
                temperature,
                repeat,
                folder / "result.jsonl",
            )
        )
        self._has_begun = False

    def work(self, seconds: float | None) -> bool:
        """Let the run go on for so long (None: to its end). Returns whether it has ended; its server then still runs.

        Raises:
            RunFailed: the server went away.
        """
        process = self.server.process
        process.resume()
        if self._has_begun:
            self._generator.thaw()
        else:
            with self._naming_the_log():
                self._begin()
        if self._generator.wait(seconds):
            return True
        process.pause()
        self._generator.freeze()
        return False

    def _begin(self) -> None:
        url = self.server.process.url
        # Wakes the server and brings its weights back into the caches.
        generate(url, WARM_UP_PROMPTS[:1], concurrency=1, max_new_tokens=8)
        flush_cache(url)
        self._steps_before = read_step_counts(url)
        self._num_records_before = len(self.server.read_records())
        self._generator.start()
        self._has_begun = True

    def read_sample(self) -> Sample:
        """Of a run that has ended.

        Raises:
            RunFailed: a request failed, or the server went away.
        """
        with self._naming_the_log():
            result = self._generator.read_result()
            steps = read_step_counts(self.server.process.url).since(self._steps_before)
        completed, sent = result["completed"], len(result["errors"])
        if completed != sent or not sent:
            reason = next((error for error in result["errors"] if error), "no reason given")
            raise RunFailed(f"{completed} of {sent} requests completed: {reason[-300:]}")
        before = self._num_records_before
        records = self.server.wait_for_records(before + completed)[before:]
        counts = count_drafts(records)
        return {
            "arm": self.server.arm.name,
            "concurrency": self._load.concurrency,
            "request_rate": self._load.request_rate,
            "temperature": self._temperature,
            "output_tokens_per_s": result["output_throughput"],
            "steady_tokens_per_s": measure_steady(result, self._load.concurrency),
            "per_user_tokens_per_s": measure_per_user(result),
            **{
                f"{short}_{quantile}_ms": result[f"{'median' if quantile == 'p50' else quantile}_{name}_ms"]
                for short, name in (
                    ("ttft", "ttft"),
                    ("tpot", "tpot"),
                    ("itl", "itl"),
                    ("e2e", "e2e_latency"),
                )
                for quantile in ("p50", "p99")
            },
            "num_prompts": completed,
            "output_tokens": result["total_output_tokens"],
            "duration_s": result["duration"],
            "prompt_tokens": sum(record.get("prompt_tokens", 0) for record in records),
            "cached_tokens": sum(record.get("cached_tokens", 0) for record in records),
            "verify_steps": counts.verify_steps,
            "selected": counts.selected,
            "accepted": counts.accepted,
            "num_steps": steps.num_steps,
            "verified_rows": steps.verified_rows,
            "phase_ms": dict(steps.phase_ms),
            "output_hashes": [hash_output(text) for text in self._comparable(result["generated_texts"])],
            # The machine's other work shows here: a frozen server adds nothing.
            "load_average": os.getloadavg()[0],
        }

    def _comparable(self, texts: Sequence[str]) -> list[str]:
        """Without those of requests that are sampled whatever the run's temperature is: nobody expects equal ones."""
        own = self._workload.temperatures(len(texts))
        return [text for text, temperature in zip(texts, own, strict=True) if not temperature]

    def end(self) -> None:
        """Freeze the server again; end what has not ended."""
        self._generator.stop()
        if self.server.process.is_running and self.server.is_frozen_between_runs:
            self.server.process.pause()

    @contextlib.contextmanager
    def _naming_the_log(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            tail = self.server.process.log_tail(5)
            raise RunFailed(f"{error!r}; the server's log ends with\n{tail}") from error


def take_turns(
    runs: Sequence[Run], turn_s: float | None, after_turn: Callable[[], object] = lambda: None
) -> Iterator[tuple[Run, Sample | RunFailed]]:
    """Take runs, in turns of so many seconds (None: one after the other), each as it ends."""
    waiting = deque(runs)
    try:
        while waiting:
            run = waiting[0]
            try:
                if not run.work(turn_s):
                    after_turn()
                    waiting.rotate(-1)
                    continue
                outcome = run.read_sample()
            except RunFailed as failure:
                outcome = failure
            run.end()
            waiting.popleft()
            yield run, outcome
    finally:
        for run in waiting:
            run.end()


def measure_per_user(result: dict[str, Any]) -> float:
    """Tokens per second as one user sees them: a request's output over its whole latency, the median request's.

    An answer without text was never seen to come.
    """
    requests = zip(result["output_lens"], result["ttfts"], result["itls"], strict=True)
    return median(tokens / (ttft + sum(itl)) for tokens, ttft, itl in requests if ttft)


def measure_steady(result: dict[str, Any], concurrency: int | None) -> float | None:
    """Tokens per second while so many requests were in flight: without a run's end, where there are fewer and fewer.

    SGLang's own measure (benchmark/steady_state.py). Its results lack when each request began; in a closed loop, that is when
    an earlier one ended, in order.

    Returns:
        None for arrivals at random times.
    """
    if concurrency is None:
        return None
    from sglang.benchmark.steady_state import steady_state_output_throughput

    ends: list[float] = []
    outputs = []
    for ttft, itl in zip(result["ttfts"], result["itls"], strict=True):
        start = heapq.heappop(ends) if len(ends) == concurrency else 0.0
        latency = ttft + sum(itl)
        outputs.append(SimpleNamespace(success=True, start_time=start, latency=latency, ttft=ttft, itl=itl))
        heapq.heappush(ends, start + latency)
    lens = result["output_lens"]
    return steady_state_output_throughput(outputs, lens, lens, concurrency_ratio=1.0)[0]
