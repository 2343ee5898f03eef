"""Samples on disk, with where they come from: one sample is one run of one arm."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tetris_sglang.tools.bench.arms import Arm
from tetris_sglang.tools.bench.settings import Settings
from tetris_sglang.tools.bench.workloads import Load
from tetris_sglang.tools.real_model import REPOSITORY

Sample = dict[str, Any]
Results = dict[str, Any]

_COMPARABLE = ("gpu", "cpu", "cores", "torch", "sglang")
"""What samples of one file have in common: tables compare arms that different rounds measured."""


def hash_output(text: str) -> str:
    """What samples keep of a request's output."""
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def round_key(sample: Sample) -> tuple:
    """Runs with equal keys were taken together and may be divided by each other."""
    return sample["group"], sample["temperature"], Load.of(sample), sample["repeat"]


class ResultsFile:
    """Samples are written as they are taken; only complete rounds survive a resumption."""

    def __init__(self, path: Path, settings: Settings, arms: Sequence[Arm], *, resume: bool) -> None:
        self.path = path
        self.results: Results = {
            "provenance": collect_provenance(),
            "settings": _as_json(asdict(settings)),
            "arms": {arm.name: asdict(arm) for arm in arms},
            "unavailable": {},
            "samples": [],
        }
        if resume and path.exists():
            self._take_over(json.loads(path.read_text()))

    def _take_over(self, earlier: Results) -> None:
        before = earlier["settings"]
        changed = [name for name, value in self.results["settings"].items() if before.get(name) != value]
        if changed:
            details = ", ".join(f"{name}={before.get(name)!r}" for name in changed)
            raise ValueError(f"--resume: {self.path} was measured with {details}. Give the same options, or another --out.")
        here, there = self.results["provenance"], earlier["provenance"]
        elsewhere = [f"{name}={there[name]!r}" for name in _COMPARABLE if there[name] != here[name]]
        if elsewhere:
            raise ValueError(
                f"--resume: {self.path} was measured with {', '.join(elsewhere)}, which is not so here: ratios of "
                "different machines do not belong into one table. Give another --out."
            )
        self.results["unavailable"] = earlier["unavailable"]
        self.results["samples"] = earlier["samples"]
        self.results["provenance"]["resumed_from"] = earlier["provenance"]

    def drop_incomplete(self, groups: Sequence[Sequence[Arm]]) -> None:
        """Forget rounds that some arm of the group is missing from: their runs were not taken together."""
        kept = []
        for sample in self.results["samples"]:
            names = {arm.name for arm in groups[sample["group"]]} - self.results["unavailable"].keys()
            taken = {s["arm"] for s in self.results["samples"] if round_key(s) == round_key(sample)}
            if names <= taken:
                kept.append(sample)
        self.results["samples"] = kept

    def has_round(self, key: tuple) -> bool:
        return any(round_key(sample) == key for sample in self.results["samples"])

    def has_sample(self, arm: Arm, key: tuple) -> bool:
        return any((s["arm"], round_key(s)) == (arm.name, key) for s in self.results["samples"])

    def is_unavailable(self, arm: Arm) -> bool:
        return arm.name in self.results["unavailable"]

    def add(self, sample: Sample) -> None:
        self.results["samples"].append(sample)
        self.write()

    def mark_unavailable(self, arm: Arm, reason: str) -> None:
        self.results["unavailable"][arm.name] = reason
        self.write()

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(self.results, indent=1) + "\n")
        partial.replace(self.path)


def _as_json(value: Any) -> Any:
    """As it will be read back."""
    return json.loads(json.dumps(value))


def collect_provenance() -> dict[str, Any]:
    """Where and how the figures were taken."""
    return {
        "gpu": read_gpu_model(),
        "cpu": read_cpu_model(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
        "sglang": importlib.metadata.version("sglang"),
        "tetris_sglang": importlib.metadata.version("tetris-sglang"),
        "commit": describe_commit(),
        "command": describe_command(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def describe_command() -> str:
    """What runs, without this machine's paths: one of the clone's scripts, or `tetris-sglang`."""
    program = Path(sys.argv[0]).resolve()
    is_script = program.suffix == ".py" and program.name != "__main__.py" and program.is_relative_to(REPOSITORY)
    called = ["python", str(program.relative_to(REPOSITORY))] if is_script else ["tetris-sglang"]
    return shlex.join([*called, *sys.argv[1:]])


def read_cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    if not cpuinfo.exists():
        return platform.processor() or platform.machine()
    for line in cpuinfo.read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "Model"):
            return value.strip()
    return platform.machine()


def read_gpu_model() -> str | None:
    try:
        command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip() or None
    except (OSError, subprocess.CalledProcessError):
        return None


def describe_commit(repository: Path = REPOSITORY) -> str:
    """The commit of the clone that runs; of a copy that is no clone, or an old one, what the variable TETRIS_COMMIT says."""
    if (named := os.environ.get("TETRIS_COMMIT")) or not (repository / ".git").exists():
        return named or "no clone"
    git = ["git", "-C", str(repository)]
    try:
        commit = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], check=True, capture_output=True, text=True)
        watched = ["tetris_sglang", "benchmarks/*.py"]
        changes = subprocess.run([*git, "status", "--porcelain", "--", *watched], check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit.stdout.strip() + (" with uncommitted changes" if changes.stdout.strip() else "")
