"""What a stage of check.py reports, and what several stages share."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import subprocess
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tetris_sglang.tools.bench.results import describe_commit

REPOSITORY = Path(__file__).resolve().parents[2]
PAIR = REPOSITORY / "tests" / "pair"
# Slow, and without any speed to measure: a stage takes less there.
ON_HOST_CUDA = os.environ.get("HOST_CUDA") == "1"
PATIENCE = 10 if ON_HOST_CUDA else 1
"""Times as long may a stage and the start of a server take."""
_STOP_TIMEOUT_S = 20.0


@dataclass
class Report:
    """What one stage found, kept on disk while it runs."""

    path: Path
    stage: str
    title: str
    status: str = "running"
    seconds: float = 0.0
    error: str | None = None
    """The exception that ended the stage."""
    exceptions: list[str] = field(default_factory=list)
    """Those that it went on after."""
    provenance: dict[str, Any] = field(default_factory=dict)
    findings: list[dict[str, Any]] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)

    def expect(self, what: str, holds: bool, detail: object = "") -> bool:
        """Record whether something holds; one that does not fails the stage and lets it go on."""
        self.findings.append({"what": what, "ok": bool(holds), "detail": str(detail)})
        print(f"{'ok  ' if holds else 'FAIL'} {what}" + (f": {detail}" if detail != "" else ""), flush=True)
        self.write()
        return bool(holds)

    def record(self, name: str, value: Any) -> None:
        self.data[name] = value
        self.write()

    def write(self) -> None:
        described = {key: value for key, value in asdict(self).items() if key != "path"}
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(described, indent=1) + "\n")
        partial.replace(self.path)


@contextlib.contextmanager
def recorded(report: Report, what: str) -> Iterator[None]:
    """Turn an exception into a finding, so that the rest of the stage still runs."""
    try:
        yield
    except Exception as error:
        traceback.print_exc()
        report.exceptions.append(f"{what}: {type(error).__name__}: {error}")
        report.expect(what, False, f"{type(error).__name__}: {error}")
    else:
        report.expect(what, True)


def run_child(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess:
    """As subprocess.run, but a child of an interrupted stage is asked to end, and so can stop its servers."""
    process = subprocess.Popen(command, **options)
    try:
        output, _ = process.communicate()
    except KeyboardInterrupt:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_TIMEOUT_S)
        raise
    return subprocess.CompletedProcess(command, process.returncode, output)


def log(text: str) -> None:
    print(text, flush=True)


def version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def collect_provenance() -> dict[str, Any]:
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        device = subprocess.run(query, check=False, capture_output=True, text=True).stdout.strip()
    except OSError:
        device = "a CUDA that computes on the host" if ON_HOST_CUDA else "unknown"
    return {
        "device": device,
        "python": platform.python_version(),
        "torch": version("torch"),
        "sglang": version("sglang"),
        "commit": describe_commit(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
