"""Servers of the arms: started, and frozen while others are measured."""

from __future__ import annotations

import json
import os
import re
import shlex
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tetris_sglang.tools.bench.arms import Arm
from tetris_sglang.tools.bench.models import Models
from tetris_sglang.tools.bench.settings import Settings
from tetris_sglang.tools.bench.workloads import WARM_UP_PROMPTS
from tetris_sglang.tools.load import generate
from tetris_sglang.tools.server_process import ServerFailed, ServerProcess, start_all

SERVER_GIB = 4.0  # a server's three processes without an accelerator, its target of 135 M parameters included
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


def prepare_server(arm: Arm, models: Models, settings: Settings, folder: Path) -> LiveServer:
    """A server that is not started yet."""
    records_folder = Path(tempfile.mkdtemp(dir=folder))
    process = ServerProcess(
        server_arguments(arm, models, settings, records_folder),
        folder / f"{arm.name.replace(' ', '-')}.log",
        start_timeout_s=START_TIMEOUT_S,
    )
    return LiveServer(arm, process, records_folder, is_frozen_between_runs=not settings.one_by_one)


def start_servers(servers: Sequence[LiveServer], settings: Settings) -> dict[Arm, str]:
    """Start all, a few at a time, and freeze each once it is warm, unless it stays alone.

    Warm is a server that has met every load: kernels are compiled for the batches they first see.

    Returns:
        Why an arm is not running, for those that are not.
    """
    frozen = {server.process for server in servers if server.is_frozen_between_runs}

    def warm_up(process: ServerProcess) -> None:
        if refusal := find_refusal(process.log_path.read_text(errors="replace")):
            raise ServerFailed(refusal)
        for count in sorted({max(load.concurrency or 0, len(WARM_UP_PROMPTS)) for load in settings.loads}):
            prompts = [f"{number}: {WARM_UP_PROMPTS[number % len(WARM_UP_PROMPTS)]}" for number in range(count)]
            generate(process.url, prompts, concurrency=count, max_new_tokens=16)
        if process in frozen:
            process.pause()

    # Automatic capacity times its passes while it starts: on a machine that does nothing else, as a user's does.
    alone = [[server] for server in servers if server.arm.family == "auto"]
    together = [server for server in servers if server.arm.family != "auto"]
    reasons = {}
    for batch in filter(None, (*alone, together)):
        failures = start_all([server.process for server in batch], warm_up, at_once=max(2, (os.cpu_count() or 1) // 4))
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
        places = re.findall(r'File "(?:.*/)?([^/"]+)", line (\d+), in (\w+)', message[: message.rindex(words)])
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
