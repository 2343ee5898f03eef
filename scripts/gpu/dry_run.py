"""The CUDA path of real servers on a machine without a GPU: `make gpu-dry-run`.

A CUDA that computes on the host (host_cuda/) looks like one H100. Servers take the path that they take on a GPU: SGLang's graph
runners, FlashInfer's plans, Triton's kernels, captured graphs that are replayed. What they write is held against the target in
float32.

Not shown: what the real kernels compute and round on a device, streams that run side by side, memory that graphs take, speed.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, NamedTuple

import requests
import typer
from rich.console import Console
from rich.table import Table

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "scripts" / "gpu")]

from host_cuda.environment import build, environment
from proof import MAX_REGRET, Reference

from tetris_sglang.tools.load import DraftCounts, count_drafts
from tetris_sglang.tools.server_process import ServerFailed, ServerProcess

PAIR = REPOSITORY / "tests" / "pair"
BUILD = REPOSITORY / "build"
BATCH_SIZES = (1, 2, 4)
NUM_STEPS = 4
NUM_PROMPTS, NUM_TOKENS = 12, 16
LOADS = (1, 3, 8)
"""8 is beyond the captured sizes."""
START_TIMEOUT_S, REQUEST_TIMEOUT_S = 900.0, 900.0
MIN_P = 1e-3

COMMON = [
    *("--model-path", str(PAIR / "target"), "--dtype", "bfloat16", "--device", "cuda"),
    *("--attention-backend", "flashinfer", "--sampling-backend", "flashinfer"),
    *("--max-running-requests", "8", "--max-total-tokens", "4096"),
    *("--cuda-graph-bs-decode", *map(str, BATCH_SIZES), "--disable-prefill-cuda-graph"),
    *("--mem-fraction-static", "0.5", "--sleep-on-idle", "--random-seed", "7", "--watchdog-timeout", "3600"),
]
TETRIS = [*COMMON, "--speculative-algorithm", "TETRIS", "--speculative-num-steps", str(NUM_STEPS)]
STANDALONE = ["--speculative-draft-model-path", str(PAIR / "draft")]
FIXED = ["--speculative-tetris-capacity-per-request", "2"]
ARMS = {
    "none": COMMON,
    "fixed": [*TETRIS, *STANDALONE, *FIXED],
    "host plan": [*TETRIS, *STANDALONE, *FIXED, "--speculative-tetris-verify-plan", "host"],
    "eager": [*TETRIS, *STANDALONE, *FIXED, "--speculative-tetris-verify-plan", "eager"],
    "auto": [*TETRIS, *STANDALONE],
    "tree": [*TETRIS, *STANDALONE, "--speculative-tetris-capacity-per-request", "3", "--speculative-eagle-topk", "2"],
    "eagle3": [
        *TETRIS, "--speculative-draft-model-path", str(PAIR / "eagle3"), "--speculative-tetris-capacity-per-request", "3",
        "--speculative-eagle-topk", "2",
    ],
    "ngram": [*TETRIS, *FIXED],
}  # fmt: skip


CHECKS = "checks"


class Answer(NamedTuple):
    output_ids: list[int]
    meta_info: dict


def ask(url: str, prompts: list[str], concurrency: int, temperature: float) -> list[Answer]:
    def complete(prompt: str) -> Answer:
        sampling = {"temperature": temperature, "max_new_tokens": NUM_TOKENS, "ignore_eos": True}
        answer = requests.post(f"{url}/generate", json={"text": prompt, "sampling_params": sampling}, timeout=REQUEST_TIMEOUT_S)
        answer.raise_for_status()
        return Answer(answer.json()["output_ids"], answer.json()["meta_info"])

    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(complete, prompts))


def run_arm(name: str, folder: Path, reference: Reference, prompts: list[str]) -> dict:
    """Start a server, let it answer at every load, greedily and drawn, and judge what it wrote."""
    log, started_at = folder / f"{name.replace(' ', '-')}.log", time.monotonic()
    variables = environment(BUILD / "host-cuda") | {"HOST_CUDA_LEDGER": str(folder / "ledger" / name.replace(" ", "-"))}
    row: dict = {"arm": name, "error": None, "runs": []}
    try:
        with ServerProcess(ARMS[name], log, environment=variables, start_timeout_s=START_TIMEOUT_S) as server:
            row["start_s"] = round(server.start_seconds, 1)
            for load, temperature in [*((load, 0.0) for load in LOADS), (LOADS[1], 1.0)]:
                requests.post(f"{server.url}/flush_cache", timeout=REQUEST_TIMEOUT_S).raise_for_status()
                answers = ask(server.url, prompts, load, temperature)
                row["runs"].append(judge(answers, prompts, reference, load, temperature))
    except (ServerFailed, OSError, requests.RequestException) as error:
        row["error"] = f"{type(error).__name__}: {str(error)[-300:]} (see {log})"
    text = log.read_text(errors="replace")
    row["tracebacks"] = text.count("Traceback (most recent call last)")
    row["not computed"] = text.count("host CUDA: nobody computes")
    row["seconds"] = round(time.monotonic() - started_at, 1)
    return row


def run_checks(folder: Path) -> dict:
    """Stages a and c of check.py: the ways to plan the verify pass, against float64 and each other."""
    out, started_at = folder / CHECKS, time.monotonic()
    shutil.rmtree(out, ignore_errors=True)
    command = [sys.executable, str(REPOSITORY / "scripts" / "gpu" / "check.py"), "--stages", "a,c", "--out", str(out)]
    with (folder / f"{CHECKS}.log").open("w") as log:
        subprocess.run(command, check=False, env={**os.environ, **environment(BUILD / "host-cuda")}, stdout=log, stderr=log)
    stages = [json.loads(path.read_text()) for path in sorted(out.glob("*.json"))]
    failed = [f"stage {stage['stage']}: {stage['error'] or 'see its log'}" for stage in stages if stage["status"] != "passed"]
    error = "; ".join(failed) or (None if stages else "no stage ran")
    seconds = round(time.monotonic() - started_at, 1)
    return {"arm": CHECKS, "error": error, "runs": [], "tracebacks": 0, "not computed": 0, "seconds": seconds}


def judge(answers: list[Answer], prompts: list[str], reference: Reference, load: int, temperature: float) -> dict:
    outputs = [answer.output_ids for answer in answers]
    drafts: DraftCounts = count_drafts(answer.meta_info for answer in answers)
    run = {"load": load, "temperature": temperature, "selected": drafts.selected, "accepted": drafts.accepted}
    if temperature:
        p = reference.judge_draws(prompts, outputs)
        return run | {"p": p, "holds": p > MIN_P}
    greedy = reference.judge_greedy(prompts, outputs)
    return run | greedy._asdict() | {"holds": greedy.regret <= MAX_REGRET["bfloat16"]}


def is_fine(row: dict) -> bool:
    return not (row["error"] or row["tracebacks"] or row["not computed"]) and all(run["holds"] for run in row["runs"])


def draw_table(rows: list[dict]) -> Table:
    table = Table(title="On a CUDA that computes on the host", title_justify="left", box=None, pad_edge=False)
    for column in ("arm", "up after", "own tokens", "worst regret", "drawn: p", "accepted of selected", "verdict"):
        table.add_column(column, overflow="fold")
    for row in rows:
        greedy = [run for run in row["runs"] if not run["temperature"]]
        drawn = [run for run in row["runs"] if run["temperature"]]
        table.add_row(
            row["arm"],
            f"{row['start_s']} s" if "start_s" in row else "",
            f"{sum(run['num_best'] for run in greedy)} of {sum(run['num_tokens'] for run in greedy)}" if greedy else "",
            f"{max(run['regret'] for run in greedy):.3f}" if greedy else "",
            ", ".join(f"{run['p']:.3f}" for run in drawn),
            f"{sum(run['accepted'] for run in row['runs'])} of {sum(run['selected'] for run in row['runs'])}" if greedy else "",
            "holds"
            if is_fine(row)
            else row["error"] or f"fails: {row['tracebacks']} tracebacks, {row['not computed']} not computed",
        )
    return table


def main(
    arms: Annotated[str, typer.Option(help=f"Of {', '.join([*ARMS, CHECKS])}.")] = ",".join([*ARMS, CHECKS]),
    out: Annotated[Path, typer.Option(help="Logs, ledgers and a summary.")] = BUILD / "gpu-dry-run",
    resume: Annotated[bool, typer.Option(help="Keep the arms that hold.")] = False,
) -> None:
    """Run the CUDA path of real servers on a machine without a GPU."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # leaves `with` blocks, and so ends the server
    console = Console(width=None if sys.stdout.isatty() else 160)
    chosen = arms.split(",")
    if unknown := set(chosen) - {*ARMS, CHECKS}:
        raise typer.BadParameter(f"no such arm: {', '.join(sorted(unknown))}", param_hint="--arms")
    out.mkdir(parents=True, exist_ok=True)
    build(BUILD / "host-cuda")
    summary = out / "summary.json"
    kept = {row["arm"]: row for row in json.loads(summary.read_text()) if is_fine(row)} if resume and summary.exists() else {}
    reference = Reference(PAIR / "target")
    prompts = [json.loads(line)["text"] for line in (PAIR / "prompts.jsonl").read_text().splitlines()[:NUM_PROMPTS]]
    rows = []
    for name in chosen:
        if name not in kept:
            console.print(f"{name}: {out / name.replace(' ', '-')}.log", highlight=False, soft_wrap=True)
        rows.append(kept.get(name) or (run_checks(out) if name == CHECKS else run_arm(name, out, reference, prompts)))
        summary.write_text(json.dumps(rows, indent=1) + "\n")
    console.print(draw_table(rows))
    raise typer.Exit(not all(map(is_fine, rows)))


if __name__ == "__main__":
    typer.run(main)
