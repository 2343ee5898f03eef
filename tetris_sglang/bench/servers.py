"""Servers of the arms: started, frozen between their runs, and measured."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from tetris_sglang.bench.arms import Arm
from tetris_sglang.bench.models import Models
from tetris_sglang.bench.results import Sample
from tetris_sglang.bench.settings import Settings
from tetris_sglang.bench.workloads import WARM_UP_PROMPTS, Load, Workload
from tetris_sglang.load import count_drafts, flush_cache, generate, read_step_counts
from tetris_sglang.server_process import ServerFailed, ServerProcess, start_all

SERVER_GIB = 4.0  # a server's three processes without an accelerator, its target of 100 M parameters included
START_TIMEOUT_S = 600.0
_RECORDS_TIMEOUT_S = 20.0


class RunFailed(RuntimeError):
    """A run of an arm did not complete; says why."""


@dataclass
class LiveServer:
    arm: Arm
    process: ServerProcess
    records_folder: Path
    """Where SGLang writes one JSON line of meta_info per finished request (--export-metrics-to-file)."""
    is_frozen_between_runs: bool

    def read_records(self) -> list[dict[str, Any]]:
        lines: list[str] = []
        for path in sorted(self.records_folder.glob("*.log")):
            lines += path.read_text().splitlines()
        return [json.loads(line) for line in lines]

    def wait_for_records(self, count: int) -> list[dict[str, Any]]:
        """SGLang writes a record shortly after the answer."""
        deadline = time.monotonic() + _RECORDS_TIMEOUT_S
        while len(records := self.read_records()) < count:
            if time.monotonic() > deadline:
                raise RunFailed(f"the server reported {len(records)} of {count} requests")
            time.sleep(0.05)
        return records


# -- starting ------------------------------------------------------------------------------------------------


def server_arguments(arm: Arm, models: Models, settings: Settings, records_folder: Path) -> list[str]:
    return [
        *("--model-path", models.target, "--max-running-requests", str(max(settings.concurrency))),
        *("--dtype", settings.dtype, "--random-seed", str(settings.seed)),
        *("--export-metrics-to-file", "--export-metrics-to-file-dir", str(records_folder)),
        *shlex.split(settings.server_flags),
        *arm.flags(models.drafts.get(arm.draft), settings.phase_times),
    ]


def prepare_server(
    arm: Arm, models: Models, settings: Settings, folder: Path, more_flags: Sequence[str] = ()
) -> LiveServer:
    """A server that is not started yet."""
    records_folder = Path(tempfile.mkdtemp(dir=folder))
    process = ServerProcess(
        [*server_arguments(arm, models, settings, records_folder), *more_flags],
        folder / f"{arm.name.replace(' ', '-')}.log",
        start_timeout_s=START_TIMEOUT_S,
    )
    return LiveServer(arm, process, records_folder, is_frozen_between_runs=not settings.one_by_one)


def start_servers(servers: Sequence[LiveServer]) -> dict[Arm, str]:
    """Start all, two at a time, and freeze each once it is warm, unless it stays alone.

    Returns:
        Why an arm is not running, for those that are not.
    """
    frozen = {server.process for server in servers if server.is_frozen_between_runs}

    def warm_up(process: ServerProcess) -> None:
        if refusal := find_refusal(process.log_path.read_text(errors="replace")):
            raise ServerFailed(refusal)
        generate(process.url, WARM_UP_PROMPTS, concurrency=len(WARM_UP_PROMPTS), max_new_tokens=16)
        if process in frozen:
            process.pause()

    # Automatic capacity times its passes while it starts: on a machine that does nothing else, as a user's does.
    alone = [[server] for server in servers if server.arm.family == "auto"]
    together = [server for server in servers if server.arm.family != "auto"]
    reasons = {}
    for batch in filter(None, (*alone, together)):
        failures = start_all([server.process for server in batch], warm_up)
        for server, failure in zip(batch, failures, strict=True):
            if failure is not None:
                reasons[server.arm] = last_words(str(failure))
    return reasons


def find_refusal(log: str) -> str | None:
    """SGLang starts without what --speculative-adaptive asks for where it cannot have it, and only warns."""
    found = re.search(r"speculative_adaptive disabled: (.*?)\. Falling back", log)
    return f"SGLang does without --speculative-adaptive: {found[1]}" if found else None


def last_words(message: str) -> str:
    """The line of a failed start that says most: the last error of the log, else its last line."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line or "error:" in line]
    words = (errors or lines or ["no output"])[-1]
    if re.fullmatch(r"[\w.]+Error", words):
        # No message: then the place where it was raised has to do.
        places = re.findall(
            r'File "(?:.*/)?([^/"]+)", line (\d+), in (\w+)', message[: message.rindex(words)]
        )
        words += "".join(f" in {function} ({file}:{line})" for file, line, function in places[-1:])
    return words[-300:]


def check_memory(num_servers: int, meminfo: Path = Path("/proc/meminfo")) -> None:
    """Raise ValueError when the servers would not fit into what is available."""
    if not meminfo.exists():
        return
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
    available_gib = int(fields["MemAvailable"].split()[0]) / 2**20
    if available_gib < num_servers * SERVER_GIB:
        raise ValueError(
            f"--live-servers {num_servers}: {num_servers} servers take {num_servers * SERVER_GIB:.1f} GiB, "
            f"{available_gib:.1f} GiB are available. Lower it (1: one server after the other)."
        )


# -- measuring -----------------------------------------------------------------------------------------------


def bench_serving_arguments(
    url: str,
    dataset: Sequence[str],
    settings: Settings,
    load: Load,
    temperature: float,
    repeat: int,
    output_file: Path,
) -> list[str]:
    """The arguments of `python -m sglang.bench_serving`; its seed shuffles every arm's prompts alike."""
    return [
        *("--backend", "sglang", "--base-url", url, *dataset, "--seed", str(settings.seed + repeat)),
        *("--num-prompts", str(load.num_prompts(settings.min_prompts)), *load.arguments()),
        *("--sharegpt-output-len", str(settings.output_len), "--random-output-len", str(settings.output_len)),
        *("--temperature", str(temperature), *shlex.split(settings.load_flags)),
        *("--warmup-requests", "0", "--disable-tqdm", "--output-details", "--output-file", str(output_file)),
    ]


def run_bench_serving(arguments: Sequence[str]) -> dict[str, Any]:
    """SGLang's command-line entry point in this process: importing it takes longer than a run.

    Raises:
        RunFailed: with the end of what it printed.
    """
    output_file = Path(arguments[arguments.index("--output-file") + 1])
    output_file.unlink(missing_ok=True)
    printed = io.StringIO()
    argv, sys.argv = sys.argv, ["sglang.bench_serving", *arguments]
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            from sglang.benchmark import serving  # warns, across the progress bar

            serving.cli_main()
    except (Exception, SystemExit) as error:
        raise RunFailed(
            f"sglang.bench_serving ended with {error!r} after: {printed.getvalue()[-200:]}"
        ) from error
    finally:
        sys.argv = argv
    return json.loads(output_file.read_text())


def measure(
    server: LiveServer, workload: Workload, settings: Settings, load: Load, temperature: float, repeat: int
) -> Sample:
    """One run of one arm, alone on the machine but for the frozen servers.

    Raises:
        RunFailed: a request failed, or the server went away.
    """
    process, folder = server.process, server.records_folder
    process.resume()
    try:
        try:
            # Wakes the server and brings its weights back into the caches.
            generate(process.url, WARM_UP_PROMPTS[:1], concurrency=1, max_new_tokens=8)
            flush_cache(process.url)
            before, num_records = read_step_counts(process.url), len(server.read_records())
            dataset = workload.arguments(load.num_prompts(settings.min_prompts), repeat, folder)
            arguments = bench_serving_arguments(
                process.url, dataset, settings, load, temperature, repeat, folder / "result.jsonl"
            )
            result = run_bench_serving(arguments)
            steps = read_step_counts(process.url).since(before)
        except OSError as error:
            raise RunFailed(f"{error!r}; the server's log ends with\n{process.log_tail(5)}") from error
        completed, sent = result["completed"], len(result["errors"])
        if completed != sent or not sent:
            reason = next((error for error in result["errors"] if error), "no reason given")
            raise RunFailed(f"{completed} of {sent} requests completed: {reason[-300:]}")
        records = server.wait_for_records(num_records + completed)[num_records:]
    finally:
        if process.is_running and server.is_frozen_between_runs:
            process.pause()
    counts = count_drafts(records)
    return {
        "arm": server.arm.name,
        "concurrency": load.concurrency,
        "request_rate": load.request_rate,
        "temperature": temperature,
        "output_tokens_per_s": result["output_throughput"],
        "per_user_tokens_per_s": measure_per_user(result),
        **{
            f"{short}_{quantile}_ms": result[f"{'median' if quantile == 'p50' else quantile}_{name}_ms"]
            for short, name in (("ttft", "ttft"), ("tpot", "tpot"), ("itl", "itl"), ("e2e", "e2e_latency"))
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
        "output_hashes": [hashlib.sha256(t.encode()).hexdigest()[:8] for t in result["generated_texts"]],
        # The machine's other work shows here: a frozen server adds nothing.
        "load_average": os.getloadavg()[0],
    }


def measure_per_user(result: dict[str, Any]) -> float:
    """Tokens per second as one user sees them: a request's output over its whole latency, the median request's."""
    requests = zip(result["output_lens"], result["ttfts"], result["itls"], strict=True)
    return median(tokens / (ttft + sum(itl)) for tokens, ttft, itl in requests)
