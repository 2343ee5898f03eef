"""What TETRIS's selection costs: batched torch against the paper's heap, and against a copy of its input.

    python benchmarks/bench_selection.py --step-ms 80

Rules are timed in turn within each round, so that a slow moment of the machine hits all of them; ratios are
taken within a round and reported as median and spread (first and third quartile) over the rounds. On a CPU
one thread is timed by the CPU time it used: other load on the machine does not count. The heap is given
Python lists: moving the survivals to the host, which a GPU would have to wait for, is not charged to it.
"""

import json
import math
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

from tetris_sglang.selection import select_prefixes, select_prefixes_reference, survival_from_probs

BATCHES = [2**power for power in range(13)]
DEPTHS = [1, 2, 4, 6, 8, 16]
ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks/results/selection.json"
TIMED = ["tetris_sglang/selection", "benchmarks/bench_selection.py"]


def main(
    out: Annotated[Path, typer.Option(help="where to write the JSON")] = RESULT,
    step_ms: Annotated[
        float | None, typer.Option(help="time of a step of the demo pair, to print selection's share of it")
    ] = None,
    tokens_per_request: Annotated[
        float, typer.Option(help="capacity: draft tokens verified per request, at most the depth")
    ] = 2.0,
    rounds: Annotated[int, typer.Option(min=3, help="timing rounds per cell")] = 15,
    round_ms: Annotated[float, typer.Option(help="least time that each rule runs in a round")] = 2.0,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    seed: int = 0,
) -> None:
    """Time selection for batch 1..4096 and depth 1..16."""
    if step_ms is not None and not step_ms > 0:
        raise typer.BadParameter(f"must be above 0, got {step_ms}", param_hint="--step-ms")
    torch.set_num_threads(1)
    cells = [(batch, depth) for depth in DEPTHS for batch in BATCHES]
    console = Console(width=None if sys.stdout.isatty() else 110)
    results = [
        measure(batch, depth, tokens_per_request, rounds, round_ms, device, seed)
        for batch, depth in track(cells, description="selection", console=console)
    ]
    for result in results:
        result["step_share"] = None if step_ms is None else result["batched_us"]["median"] / (1000 * step_ms)
    spread = "median ± half the spread between quartiles"
    console.print(
        draw_table(
            results, f"over the paper's heap; {spread}", lambda cell: draw_ratio(cell["batched_over_heap"])
        ),
        draw_table(
            results, f"over a copy of the input; {spread}", lambda cell: draw_ratio(cell["batched_over_copy"])
        ),
    )
    if step_ms is not None:
        title = f"share of a step of {step_ms:g} ms; holds in the rows near the batch that it was measured at"
        console.print(draw_table(results, title, lambda cell: f"{cell['step_share']:.2%}"))
    out.parent.mkdir(parents=True, exist_ok=True)
    report = {"provenance": describe_run(device, seed), "step_ms": step_ms, "results": results}
    out.write_text(json.dumps(report, indent=1) + "\n")
    console.print(f"written: {out}")


def measure(
    batch: int, depth: int, tokens_per_request: float, rounds: int, round_ms: float, device: str, seed: int
) -> dict:
    generator = torch.Generator().manual_seed(seed)
    draft_probs = 0.3 + 0.7 * torch.rand(batch, depth, generator=generator)
    survival = survival_from_probs(draft_probs).to(device)
    chains = survival.tolist()
    capacity_tokens = max(1, int(min(tokens_per_request, depth) * batch))
    assert select_prefixes(survival, capacity_tokens).tolist() == select_prefixes_reference(
        chains, capacity_tokens
    )
    rules: dict[str, Callable[[], object]] = {
        "batched": lambda: select_prefixes(survival, capacity_tokens),
        "heap": lambda: select_prefixes_reference(chains, capacity_tokens),
        "copy": lambda: survival.clone(),
    }
    with torch.inference_mode():
        calls = {name: count_calls(rule, round_ms, device) for name, rule in rules.items()}
        elapsed_us = {name: [] for name in rules}
        for _ in range(rounds):
            for name, rule in rules.items():
                elapsed_us[name].append(time_us(rule, calls[name], device) / calls[name])

    def ratio(other: str) -> dict[str, float]:
        return summarise(
            [mine / its for mine, its in zip(elapsed_us["batched"], elapsed_us[other], strict=True)]
        )

    return {
        "batch": batch,
        "max_draft": depth,
        "capacity_tokens": capacity_tokens,
        "batched_us": summarise(elapsed_us["batched"]),
        "batched_over_heap": ratio("heap"),
        "batched_over_copy": ratio("copy"),
    }


def time_us(rule: Callable[[], object], calls: int, device: str) -> float:
    if device == "cpu":
        clock, wait = time.thread_time, lambda: None
    else:
        clock, wait = time.perf_counter, torch.cuda.synchronize
    wait()
    start = clock()
    for _ in range(calls):
        rule()
    wait()
    return (clock() - start) * 1e6


def count_calls(rule: Callable[[], object], round_ms: float, device: str) -> int:
    """How often to call the rule in a round so that it runs for round_ms; warms it up on the way."""
    calls = 1
    while time_us(rule, calls, device) < 1000 * round_ms:
        calls *= 2
    return calls


def time_in_turn(
    parts: dict[str, Callable[[], object]], rounds: int, round_ms: float, device: str
) -> dict[str, list[float]]:
    """Microseconds per call of every part, a sample per round; within a round the parts take turns."""
    with torch.inference_mode():
        calls = {name: count_calls(part, round_ms, device) for name, part in parts.items()}
        elapsed_us: dict[str, list[float]] = {name: [] for name in parts}
        for _ in range(rounds):
            for name, part in parts.items():
                elapsed_us[name].append(time_us(part, calls[name], device) / calls[name])
    return elapsed_us


def summarise(samples: list[float]) -> dict[str, float]:
    first, median, third = statistics.quantiles(samples, n=4, method="inclusive")
    return {"median": median, "first_quartile": first, "third_quartile": third}


def draw_table(results: list[dict], title: str, draw_cell: Callable[[dict], str]) -> Table:
    table = Table(
        "batch", *(f"D = {depth}" for depth in DEPTHS), title=title, title_justify="left", box=box.SIMPLE_HEAD
    )
    for column in table.columns:
        column.justify, column.no_wrap = "right", True
    for batch in BATCHES:
        table.add_row(str(batch), *(draw_cell(result) for result in results if result["batch"] == batch))
    return table


def draw_ratio(ratio: dict[str, float]) -> str:
    half_spread = (ratio["third_quartile"] - ratio["first_quartile"]) / 2
    digits = max(0, 1 - math.floor(math.log10(ratio["median"])))
    return f"{ratio['median']:.{digits}f} ±{half_spread:.{digits}f}"


def describe_run(device: str, seed: int) -> dict[str, object]:
    arguments = [Path(sys.argv[0]).name, *sys.argv[1:]]
    return {
        "command": shlex.join(["python", f"benchmarks/{arguments[0]}", *arguments[1:]]),
        "device": torch.cuda.get_device_name() if device != "cpu" else name_cpu(),
        "clock": "CPU time of one thread" if device == "cpu" else "wall clock",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "sglang": installed_version("sglang"),
        "commit": name_commit(),
        "seed": seed,
    }


def name_cpu() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def name_commit(timed: Sequence[str] = TIMED) -> str | None:
    """The checkout's commit, `-dirty` if what is timed differs from it; None outside a checkout."""
    git = ["git", "-C", str(ROOT)]
    head = subprocess.run(
        [*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=False
    )
    if head.returncode != 0:
        return None
    clean = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", *timed], check=False).returncode == 0
    return head.stdout.strip() + ("" if clean else "-dirty")


def installed_version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    typer.run(main)
