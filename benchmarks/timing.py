"""How the small benchmarks time and what they write.

What is compared takes turns within each round, so that a slow moment of the machine hits all of it; ratios are taken within
a round and reported as median and spread (first and third quartile) over the rounds. On a CPU one thread is timed by the
CPU time it used: other load on the machine does not count.
"""

import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

from tetris_sglang.tools.bench.results import collect_provenance

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks/results/kernels"

Part = Callable[[], object]


def _check_step_ms(step_ms: float) -> float:
    if not step_ms > 0:
        raise typer.BadParameter(f"must be above 0, got {step_ms}")
    return step_ms


Out = Annotated[Path, typer.Option(help="where to write the JSON")]
StepMs = Annotated[float, typer.Option(help="time of a step, of which this part is a share", callback=_check_step_ms)]
STEP_MS = 80.0
"""Of one request, SmolLM2-135M-Instruct on two cores."""
Rounds = Annotated[int, typer.Option(min=3, help="timing rounds per cell")]
RoundMs = Annotated[float, typer.Option(help="least time that each part runs in a round")]
Device = Annotated[str, typer.Option(help="cpu or cuda")]


def open_console() -> Console:
    """One thread from here on; tables as wide as the terminal."""
    torch.set_num_threads(1)
    return Console(width=None if sys.stdout.isatty() else 110)


def time_us(part: Part, calls: int, device: str) -> float:
    if device == "cpu":
        clock, wait = time.thread_time, lambda: None
    else:
        clock, wait = time.perf_counter, torch.cuda.synchronize
    wait()
    start = clock()
    for _ in range(calls):
        part()
    wait()
    return (clock() - start) * 1e6


def time_in_turn(parts: Mapping[str, Part], rounds: int, round_ms: float, device: str) -> dict[str, list[float]]:
    """Microseconds per call of every part, a sample per round; within a round the parts take turns."""
    with torch.inference_mode():
        calls = {name: _count_calls(part, round_ms, device) for name, part in parts.items()}
        elapsed_us: dict[str, list[float]] = {name: [] for name in parts}
        for _ in range(rounds):
            for name, part in parts.items():
                elapsed_us[name].append(time_us(part, calls[name], device) / calls[name])
    return elapsed_us


def _count_calls(part: Part, round_ms: float, device: str) -> int:
    """How often to call the part in a round so that it runs for round_ms; warms it up on the way."""
    calls = 1
    while time_us(part, calls, device) < 1000 * round_ms:
        calls *= 2
    return calls


def summarise(samples: Sequence[float]) -> dict[str, float]:
    first, median, third = statistics.quantiles(samples, n=4, method="inclusive")
    return {"median": median, "first_quartile": first, "third_quartile": third}


def summarise_all(elapsed_us: Mapping[str, Sequence[float]]) -> dict[str, dict[str, float]]:
    """{part_us: summary}."""
    return {f"{name}_us": summarise(samples) for name, samples in elapsed_us.items()}


def summarise_ratio(mine: Sequence[float], others: Sequence[float]) -> dict[str, float]:
    """Of samples from the same rounds."""
    return summarise([one / other for one, other in zip(mine, others, strict=True)])


# -- tables -------------------------------------------------------------------------------------------------------

SPREAD = "median ± half the spread between quartiles"


def make_table(*columns: str, title: str | None = None) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def draw_ratio(ratio: Mapping[str, float]) -> str:
    half_spread = (ratio["third_quartile"] - ratio["first_quartile"]) / 2
    digits = max(0, 1 - math.floor(math.log10(ratio["median"])))
    return f"{ratio['median']:.{digits}f} ±{half_spread:.{digits}f}"


def draw_parts(
    results: Sequence[dict], parts: Sequence[str], step_ms: float, title: str, *, ratios: Mapping[str, str] | None = None
) -> Table:
    """A row per batch: what each part and the step take, and the step's share.

    Args:
        ratios: column -> which of the figures, between the two.
    """
    ratios = ratios or {}
    columns = ["batch", *(part.replace("_", " ") for part in parts), "step", *ratios, f"of {step_ms:g} ms"]
    table = make_table(*columns, title=f"{title}; microseconds, {SPREAD}")
    for result in results:
        cells = [draw_ratio(result[figure]) for figure in [*(f"{part}_us" for part in [*parts, "step"]), *ratios.values()]]
        table.add_row(str(result["batch"]), *cells, f"{result['step_share']:.2%}")
    return table


# -- files --------------------------------------------------------------------------------------------------------


def report(
    cases: Sequence,
    measure: Callable[[Any], dict],
    draw: Callable[[list[dict]], Sequence[Table]],
    *,
    out: Path,
    step_ms: float,
    device: str,
    **settings: object,
) -> None:
    """Measure every case, print the tables and write the JSON.

    Args:
        measure: gives figures, among them `step_us`: what the part takes of a step. draw: makes tables of all of them, each
            with its `step_share`. settings: for the provenance.
    """
    console = open_console()
    results = [measure(case) for case in track(cases, description=out.stem, console=console)]
    for result in results:
        result["step_share"] = result["step_us"]["median"] / (1000 * step_ms)
    for table in draw(results):
        console.print(table)
    write_results(out, console, provenance=describe_run(device, **settings), step_ms=step_ms, results=results)


def describe_run(device: str = "cpu", **more: object) -> dict[str, object]:
    """Where figures come from; `more`: settings."""
    clock = "CPU time of one thread" if device == "cpu" else "wall clock"
    return collect_provenance() | {"clock": clock} | more


def write_results(out: Path, console: Console, **content: object) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(content, indent=1) + "\n")
    console.print(f"written: {out}")
