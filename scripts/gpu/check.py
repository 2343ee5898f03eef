"""Every check that needs a GPU, in stages: `make gpu-check`, or python scripts/gpu/check.py --stages c,d --resume.

Each stage is a process of its own with a time limit, so that one that fails, hangs or breaks the device stops no other. It
writes STAGE.json (findings and figures, as they are made) and STAGE.log into --out; --resume skips what passed. Where the
variable OUT names a folder, gpu-check.tar.gz there holds all of it at any time.
"""

from __future__ import annotations

import json
import os
import pkgutil
import signal
import subprocess
import sys
import tarfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "scripts" / "gpu"), str(REPOSITORY / "scripts")]

from stage_report import ON_HOST_CUDA, PATIENCE, Report, collect_provenance

DEFAULT_OUT = REPOSITORY / "build" / "gpu-check"
_ARCHIVE_EVERY_S = 20.0
_GRACE_S = 30.0  # for a stage to stop its servers

# -- stages --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stage:
    letter: str
    title: str
    run: str
    """The function that takes the report; imported in the stage's own process."""
    limit_s: float = 450.0
    resumes_from: str | None = None
    """A file by which the stage itself goes on where it was stopped."""


STAGES = (
    Stage("a", "versions, imports, one FlashInfer plan", "device_checks:check_environment"),
    Stage("c", "ragged attention against float64", "device_checks:check_attention"),
    Stage("d", "servers: greedy parity, sampling, metrics", "server_checks:check_server"),
    Stage("g", "servers: trees, heads, n-grams", "server_checks:check_drafts"),
    Stage("i", "servers: real text, and where a step's time goes", "server_checks:check_real_text"),
    Stage("h", "throughput on a real model", "server_checks:check_real_model", resumes_from="real.json"),
    Stage("e", "the same at a large model's cost", "server_checks:check_large_model", resumes_from="large.json"),
    Stage("b", "kernel parity and speed", "device_checks:check_kernels"),
    Stage("f", "memory and graph capture", "server_checks:check_graphs"),
)
"""In the order of what the first minutes should answer: does it start, is it right, is it faster, what does it take."""


def choose_stages(letters: str) -> list[Stage]:
    """Raises ValueError naming what there is none of."""
    by_letter = {stage.letter: stage for stage in STAGES}
    if unknown := [letter for letter in letters.split(",") if letter not in by_letter]:
        raise ValueError(f"--stages: no such stage {', '.join(unknown)}; there are {', '.join(by_letter)}")
    return [by_letter[letter] for letter in dict.fromkeys(letters.split(","))]


def has_passed(out: Path, stage: Stage) -> bool:
    """Whether an earlier run left a complete report without a failure."""
    try:
        return json.loads((out / f"{stage.letter}.json").read_text())["status"] == "passed"
    except (OSError, ValueError, KeyError):
        return False


def run_in_process(stage: Stage, out: Path) -> int:
    """The stage itself; 0 when everything held."""
    # Leaves `with` blocks, and so ends the servers.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if ON_HOST_CUDA:
        from host_cuda.plugin import install

        install()
    report = Report(out / f"{stage.letter}.json", stage.letter, stage.title, provenance=collect_provenance())
    report.write()
    started_at = time.monotonic()
    try:
        pkgutil.resolve_name(stage.run)(report)
    except KeyboardInterrupt:
        report.error = "interrupted, or out of time"
    except Exception as error:
        traceback.print_exc()
        report.error = f"{type(error).__name__}: {error}"
    report.seconds = round(time.monotonic() - started_at, 1)
    passed = report.error is None and all(finding["ok"] for finding in report.findings)
    report.status = "passed" if passed else "failed"
    report.write()
    return 0 if passed else 1


def run_stage(stage: Stage, out: Path, limit_s: float, command: Sequence[str] | None = None) -> str:
    """Run a stage in a process of its own, copying what it prints to the terminal and to its log; its status."""
    command = command or [sys.executable, "-u", __file__, "--in-process", stage.letter, "--out", str(out)]
    report = out / f"{stage.letter}.json"
    report.unlink(missing_ok=True)
    with (out / f"{stage.letter}.log").open("wb") as log_file:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        os.set_blocking(process.stdout.fileno(), False)
        deadline, archived_at = time.monotonic() + limit_s, time.monotonic()
        is_late = False
        while process.poll() is None:
            _copy_output(process, log_file)
            now = time.monotonic()
            if now > deadline:
                # First as an interruption, which lets it stop its servers.
                process.kill() if is_late else process.terminate()
                is_late, deadline = True, now + _GRACE_S
            if now - archived_at > _ARCHIVE_EVERY_S:
                archive(out)
                archived_at = now
            time.sleep(0.1)
        _copy_output(process, log_file)
    described = json.loads(report.read_text()) if report.exists() else {"stage": stage.letter, "findings": []}
    if described.get("status") not in ("passed", "failed"):
        described |= {
            "status": "failed",
            "error": described.get("error") or f"ended with {process.returncode}",
        }
    if is_late:
        described |= {"status": "failed", "error": f"stopped after {limit_s:.0f} s"}
    report.write_text(json.dumps(described, indent=1) + "\n")
    archive(out)
    return described["status"]


def _copy_output(process: subprocess.Popen, log_file) -> None:
    while octets := process.stdout.read():
        log_file.write(octets)
        log_file.flush()
        sys.stdout.buffer.write(octets)
        sys.stdout.buffer.flush()


def archive(out: Path) -> None:
    """Everything so far as one file in $OUT, where that is set and another folder."""
    folder = os.environ.get("OUT")
    if not folder or Path(folder).resolve() == out.resolve():
        return
    partial = Path(folder) / ".partial.tar.gz"
    with tarfile.open(partial, "w:gz", compresslevel=3) as tar:
        for path in sorted(out.iterdir()):
            if path.suffix in (".json", ".log", ".md"):
                tar.add(path, path.name)
    partial.replace(Path(folder) / "gpu-check.tar.gz")


def print_summary(out: Path, stages: Sequence[Stage], console: Console) -> bool:
    """A table of the stages; True when all passed."""
    table = Table(title=f"gpu-check: {out}", title_justify="left", box=None, pad_edge=False)
    for column in ("stage", "status", "s", "held", "what failed"):
        table.add_column(column, overflow="fold")
    all_passed = True
    for stage in stages:
        path = out / f"{stage.letter}.json"
        report = json.loads(path.read_text()) if path.exists() else {"status": "not run", "findings": []}
        failed = [f"{f['what']} ({f['detail']})" for f in report["findings"] if not f["ok"]]
        failed += [report["error"]] if report.get("error") else []
        held = f"{sum(f['ok'] for f in report['findings'])} of {len(report['findings'])}"
        table.add_row(
            f"{stage.letter}: {stage.title}",
            report["status"],
            str(report.get("seconds", "")),
            held,
            "; ".join(failed),
        )
        all_passed &= report["status"] == "passed"
    console.print(table)
    return all_passed


def main(
    stages: Annotated[str, typer.Option(help="; ".join(f"{stage.letter}: {stage.title}" for stage in STAGES))] = ",".join(
        stage.letter for stage in STAGES
    ),
    out: Annotated[Path, typer.Option(help="STAGE.json, STAGE.log and the servers' logs.")] = DEFAULT_OUT,
    resume: Annotated[bool, typer.Option("--resume", help="Skip stages that passed before.")] = False,
    minutes: Annotated[float, typer.Option(help="Start nothing, and let nothing run, after so many.")] = 600.0,
    in_process: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Run every check that needs a GPU."""
    out.mkdir(parents=True, exist_ok=True)
    if in_process is not None:
        raise typer.Exit(run_in_process(choose_stages(in_process)[0], out))
    try:
        chosen = choose_stages(stages)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    console = Console(width=None if sys.stdout.isatty() else 160)
    ends_at = time.monotonic() + 60 * minutes
    for stage in chosen:
        if resume and has_passed(out, stage):
            console.print(f"{stage.letter}: passed before", highlight=False)
            continue
        if stage.resumes_from and not resume:
            (out / stage.resumes_from).unlink(missing_ok=True)
        limit_s = min(stage.limit_s * PATIENCE, ends_at - time.monotonic() - _GRACE_S)
        if limit_s < 10:
            console.print(f"{stage.letter}: no time left; go on with --resume", highlight=False)
            continue
        console.rule(f"{stage.letter}: {stage.title} (at most {limit_s:.0f} s)")
        run_stage(stage, out, limit_s)
    all_passed = print_summary(out, chosen, console)
    archive(out)
    raise typer.Exit(not all_passed)


if __name__ == "__main__":
    typer.run(main)
