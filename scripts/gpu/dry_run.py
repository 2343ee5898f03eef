"""The CUDA path of real servers on a machine without a GPU: `make gpu-dry-run`.

A CUDA that computes on the host (host_cuda/) looks like two H100s. Servers take the path that they take on a GPU: SGLang's
graph runners, FlashInfer's plans, Triton's kernels, captured graphs that are replayed. What they write is held against the
target in float32, what they accept against the CPU platform, what a step asks of the host against nothing to wait for.

Not shown: what the real kernels compute and round on a device, streams that run side by side, memory that graphs take, speed.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import ledger
import requests
import typer
from cases import GREEDY, TIMEOUT_S, Answer
from check import STAGES
from dry_arms import ARMS, PAIR, QUICK, REPOSITORY, TARGET, Arm, on_cpu, prepare
from forked_server import COMMAND as FORKED
from host_cuda.environment import build, environment
from mutations import MUTATIONS
from proof import Reference
from rich.console import Console
from rich.table import Table

from tetris_sglang.tools.load import count_drafts
from tetris_sglang.tools.server_process import ServerFailed, ServerProcess

BUILD = REPOSITORY / "build"
CHECKS = {f"check-{stage.letter}": stage.letter for stage in STAGES if stage.letter not in "heb"}
"""Stages of check.py, rehearsed: the others measure speed. (The tests of b are pytest's.)"""
SHAPE = "hidden=648,layers=31,heads=12,intermediate=1600"
"""Of the inflated model: no weights of 8B on the host."""
NUM_PROMPTS, NUM_QUICK = 12, 6
START_TIMEOUT_S = 900.0
MAX_LOST = 0.05
"""Of the drafts accepted per step on the CPU platform, those that rounding may cost, beside two standard errors."""


def end_on_sigterm() -> None:
    """As Ctrl-C does: `with` blocks are left, and so servers end."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def run_arms(arms: Mapping[str, Arm | None], folder: Path, prompts: list[str], num_jobs: int) -> Iterator[dict]:
    """Some arms side by side. Yields their rows as they end.

    Args:
        arms: None are stages of check.py.
    """
    with multiprocessing.get_context("spawn").Pool(num_jobs, end_on_sigterm) as pool:
        yield from pool.imap_unordered(partial(run_one, folder=folder, prompts=prompts), arms.items())
        pool.close()  # else they would be ended by a signal
        pool.join()


def run_one(named: tuple[str, Arm | None], folder: Path, prompts: list[str]) -> dict:
    name, arm = named
    return run_arm(name, arm, folder, prompts) if arm else run_check(name, folder)


def run_arm(name: str, arm: Arm, folder: Path, prompts: list[str]) -> dict:
    """Start a server, ask it all of the arm's cases, and judge what it wrote."""
    stem, started_at = name.replace(" ", "-"), time.monotonic()
    log, reference = folder / f"{stem}.log", Reference(TARGET)
    row: dict = {"arm": name, "error": None, "cases": [], "lost": None, "lost_error": 0.0}
    try:
        flags, variables = prepare(arm, folder, folder / "plugins" / stem)
        computing = environment(BUILD / "host-cuda") | {"HOST_CUDA_LEDGER": str(folder / "ledger" / stem)}
        if arm.has_streams_checked:
            computing["HOST_CUDA_STREAMS"] = "1"
        if "PYTHONPATH" in variables:
            computing["PYTHONPATH"] += os.pathsep + variables["PYTHONPATH"]
        shutil.rmtree(folder / "ledger" / stem, ignore_errors=True)
        with ServerProcess(flags, log, environment=computing, start_timeout_s=START_TIMEOUT_S) as server:
            row["start_s"] = round(server.start_seconds, 1)
            asked, answers, alone = prompts, [], []
            for case in arm.cases:
                if case.goes_on:
                    asked = [prompt + answer.text for prompt, answer in zip(asked, answers, strict=True)]
                else:
                    asked = prompts
                    requests.post(f"{server.url}/flush_cache", params={"timeout": 60}, timeout=TIMEOUT_S).raise_for_status()
                answers = case.ask(server.url, asked)
                alone = alone or answers
                drafts = count_drafts(answer.meta_info for answer in answers)
                row["cases"].append({
                    "case": case.name, "temperature": case.sampling.get("temperature", 0),
                    **case.judge(reference, asked, answers)._asdict(),
                    "steps": drafts.verify_steps, "selected": drafts.selected, "accepted": drafts.accepted,
                })  # fmt: skip
                if case.is_counted and "ledger" not in row and (costs := ledger.read(folder / "ledger" / stem)) is not None:
                    row["ledger"] = costs._asdict()
            row["padding"] = measure_padding(server.url)
        if arm.has_twin:
            row["lost"], row["lost_error"] = measure_lost(on_cpu(flags), folder / f"{stem}-cpu.log", prompts, alone)
        row["races"] = json.loads((folder / "ledger" / stem / "races.json").read_text())
    except (ServerFailed, OSError, ValueError, requests.RequestException) as error:
        row["error"] = f"{type(error).__name__}: {str(error)[-300:]} (see {log})"
    text = log.read_text(errors="replace") if log.exists() else ""
    row["tracebacks"] = text.count("Traceback (most recent call last)")
    row["not computed"] = text.count("host CUDA: nobody computes")
    row["not tested"] = bool(arm.must_log) and arm.must_log not in text
    row["seconds"] = round(time.monotonic() - started_at, 1)
    return row


def measure_lost(flags: list[str], log: Path, prompts: list[str], here: Sequence[Answer]) -> tuple[float, float]:
    """Of the drafts accepted per step on the CPU platform, one request at a time, the share that is not accepted here.

    Where rounding has parted two texts, other drafts are accepted: pairs that are the same count.

    Args:
        here: what was answered to `GREEDY[0]`.
    Returns:
        It, and its standard error: a dozen texts say little (jackknife over them).
    """
    options = {"environment": {"OMP_NUM_THREADS": "1"}, "entry_point": FORKED, "start_timeout_s": START_TIMEOUT_S}
    with ServerProcess(flags, log, **options) as server:
        pairs = list(zip(here, GREEDY[0].ask(server.url, prompts), strict=True))
    same = [pair for pair in pairs if pair[0].output_ids == pair[1].output_ids]
    if 2 * len(same) < len(pairs):
        raise ValueError(f"{len(same)} of {len(pairs)} texts are those of the CPU platform")

    def lost(pairs: Sequence[tuple[Answer, Answer]]) -> float:
        ours, theirs = (count_drafts(answer.meta_info for answer in side) for side in zip(*pairs, strict=True))
        expected = theirs.accepted / theirs.verify_steps
        return 1 - ours.accepted / ours.verify_steps / expected if expected else 0.0

    others = [lost(same[:i] + same[i + 1 :]) for i in range(len(same))]
    return lost(same), (len(same) - 1) ** 0.5 * statistics.pstdev(others)


def measure_padding(url: str) -> float | None:
    """Rows per step that fill a graph of the target and are nobody's; None: not TETRIS."""
    answer = requests.get(f"{url}/server_info", timeout=TIMEOUT_S)
    answer.raise_for_status()
    counts = answer.json()["internal_states"][0].get("tetris")
    if counts is None:
        return None
    wanted = counts["num_requests"] + counts["selected_tokens"]
    return (counts["verified_rows"] - wanted) / counts["num_steps"]


def run_check(name: str, folder: Path) -> dict:
    """A stage of check.py, as on a GPU but for how much is asked."""
    out, started_at = folder / name, time.monotonic()
    shutil.rmtree(out, ignore_errors=True)
    check = str(REPOSITORY / "scripts" / "gpu" / "check.py")
    command = [sys.executable, check, "--stages", CHECKS[name], "--out", str(out)]
    variables = {**os.environ, **environment(BUILD / "host-cuda"), "GPU_CHECK_SHAPE": SHAPE}
    with (folder / f"{name}.log").open("w") as log:
        subprocess.run(command, check=False, env=variables, stdout=log, stderr=log)
    report = out / f"{CHECKS[name]}.json"
    stage = json.loads(report.read_text()) if report.exists() else {"findings": [], "error": "it did not run"}
    failed = [f"{finding['what']} ({finding['detail']})" for finding in stage["findings"] if not finding["ok"]]
    error = "; ".join([*failed, *filter(None, [stage["error"]])])
    return {
        "arm": name,
        "error": error or None,
        "cases": [],
        "held": len(stage["findings"]) - len(failed),
        "seconds": round(time.monotonic() - started_at, 1),
    }


def find_faults(row: dict, arm: Arm | None = None) -> list[str]:
    """What does not hold.

    Args:
        arm: that was run; None: the row's.
    """
    if row["error"]:
        return [row["error"]]
    if row["arm"] in CHECKS:
        return []
    arm = arm or ARMS[row["arm"]]
    faults = [f"{case['case']}: {case['says']}" for case in row["cases"] if not case["holds"]]
    faults += [f"{row[what]} {what}" for what in ("tracebacks", "not computed") if row.get(what)]
    if row["not tested"]:
        faults.append(f"nothing was tested: its log does not say {arm.must_log!r}")
    if (rate := measure_success(row)) is not None and rate < arm.min_success:
        faults.append(f"{rate:.2f} of what was verified was accepted, not {arm.min_success}")
    if (row["lost"] or 0) - 2 * row.get("lost_error", 0) > MAX_LOST:
        faults.append(f"{row['lost']:.0%} fewer drafts accepted than on the CPU platform")
    faults += [f"{count} times {race}, in no order" for race, count in row.get("races", {}).items()]
    if (costs := row.get("ledger")) and costs["launches"] > arm.max_launches:
        faults.append(f"{costs['launches']:.1f} launches a step, not {arm.max_launches}")
    if "TETRIS" in arm.flags and any(case.is_counted for case in arm.cases) and not arm.may_wait:
        waits = costs["waits"] if costs else {"no decode step was counted": 1}
        faults += [f"a step waits: {what}, {count:.2f} a step" for what, count in waits.items()]
    return faults


def measure_success(row: dict) -> float | None:
    """Of the drafts verified for greedy requests, the share accepted."""
    greedy = [case for case in row["cases"] if not case["temperature"]]
    selected = sum(case["selected"] for case in greedy)
    return sum(case["accepted"] for case in greedy) / selected if selected else None


def draw_table(rows: list[dict]) -> Table:
    table = Table(title="On a CUDA that computes on the host", title_justify="left", box=None, pad_edge=False)
    for column in ("arm", "seconds", "same text", "worst regret", "drawn: p", "accepted", "lost", "verdict"):
        table.add_column(column, overflow="fold")
    for row in rows:
        greedy = [case for case in row["cases"] if case["num_tokens"]]
        rate = measure_success(row)
        table.add_row(
            row["arm"],
            f"{row['seconds']:.0f}",
            f"{sum(case['num_best'] for case in greedy)} of {sum(case['num_tokens'] for case in greedy)}" if greedy else "",
            f"{max(case['regret'] for case in greedy):.3f}" if greedy else "",
            ", ".join(f"{case['p']:.3f}" for case in row["cases"] if case["p"] is not None),
            "" if rate is None else f"{rate:.2f}",
            "" if row.get("lost") is None else f"{row['lost']:.2f} ± {row.get('lost_error', 0):.2f}",
            "; ".join(find_faults(row)) or (f"{row['held']} checks hold" if "held" in row else "holds"),
        )
    return table


def draw_ledger(rows: list[dict]) -> Table:
    table = Table(title="A decode step, on average", title_justify="left", box=None, pad_edge=False)
    columns = ("launches", "graph_launches", "in_graphs", "host_plans", "pinned_copies", "pageable_copies", "syncs")
    for column in ("arm", *(name.replace("_", " ") for name in columns), "padding", "launches are"):
        table.add_column(column, overflow="fold")
    for row in (row for row in rows if row.get("ledger")):
        costs = row["ledger"]
        callers = ", ".join(f"{name} {count:.0f}" for name, count in list(costs["callers"].items())[:5])
        padding = "" if row.get("padding") is None else f"{row['padding']:.1f}"
        table.add_row(row["arm"], *(f"{costs[name]:.1f}" for name in columns), padding, callers)
    return table


def run_mutations(folder: Path, prompts: list[str], num_jobs: int, console: Console) -> list[str]:
    """Bend one line after the other. Returns the mutations that nothing found."""
    table = Table(title="Mutations", title_justify="left", box=None, pad_edge=False)
    for column in ("mutation", "arm", "found by"):
        table.add_column(column, overflow="fold")
    arms = {name: mutation.apply() for name, mutation in MUTATIONS.items()}
    survivors = []
    for row in run_arms(arms, folder, prompts, num_jobs):
        name = row["arm"]
        faults = [] if row["not tested"] else find_faults(row, arms[name])
        found = faults[0] if faults else "it did not land" if row["not tested"] else "nobody"
        console.print(f"{name}: {found}", highlight=False, markup=False)
        if not faults:
            survivors.append(name)
        table.add_row(name, MUTATIONS[name].arm, found)
    console.print(table)
    return survivors


def main(
    arms: Annotated[str, typer.Option(help=f"Of {', '.join([*ARMS, *CHECKS])}.")] = ",".join([*ARMS, *CHECKS]),
    quick: Annotated[bool, typer.Option(help=f"{', '.join(QUICK)} alone, asked for little.")] = False,
    out: Annotated[Path, typer.Option(help="Logs, ledgers and a summary.")] = BUILD / "gpu-dry-run",
    resume: Annotated[bool, typer.Option(help="Keep the arms that hold.")] = False,
    mutations: Annotated[bool, typer.Option(help="Instead: bend the path line by line; each fault must be found.")] = False,
    jobs: Annotated[int, typer.Option(min=1, help="Servers at once, each with a core and 4 GB.")] = 2,
) -> None:
    """Run the CUDA path of real servers on a machine without a GPU."""
    end_on_sigterm()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # nothing here is large
    console = Console(width=None if sys.stdout.isatty() else 160)
    chosen = list(QUICK) if quick else arms.split(",")
    if unknown := set(chosen) - {*ARMS, *CHECKS}:
        raise typer.BadParameter(f"no such arm: {', '.join(sorted(unknown))}", param_hint="--arms")
    out.mkdir(parents=True, exist_ok=True)
    build(BUILD / "host-cuda")
    summary = out / "summary.json"
    kept = {}
    if resume and summary.exists():
        kept = {row["arm"]: row for row in json.loads(summary.read_text()) if not find_faults(row)}
    prompts = [
        json.loads(line)["text"]
        for line in (PAIR / "prompts.jsonl").read_text().splitlines()[: NUM_QUICK if quick else NUM_PROMPTS]
    ]
    if mutations:
        raise typer.Exit(bool(run_mutations(out, prompts, jobs, console)))
    rows, to_run = dict(kept), [name for name in chosen if name not in kept]
    asked = {name: None if name in CHECKS else (QUICK if quick else ARMS)[name] for name in to_run}
    console.print(f"{', '.join(to_run)}: logs in {out}", highlight=False)
    for number, row in enumerate(run_arms(asked, out, prompts, jobs)):
        rows[row["arm"]] = row
        verdict = "; ".join(find_faults(row)) or "holds"
        console.print(f"{number + 1} of {len(asked)}, {row['arm']}: {verdict}", highlight=False, markup=False)
        summary.write_text(json.dumps(list(rows.values()), indent=1) + "\n")
    shown = [rows[name] for name in chosen]
    console.print(draw_table(shown), draw_ledger(shown))
    raise typer.Exit(any(map(find_faults, shown)))


if __name__ == "__main__":
    typer.run(main)
