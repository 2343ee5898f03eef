"""What calibration costs: against selection itself, and against a copy of the probabilities.

    python benchmarks/bench_calibration.py --step-ms 80

Timed as in bench_selection.py: in turn within each round, ratios within a round, median and quartiles over the rounds;
on a CPU one thread, by the CPU time it used. A step with chains calibrates once per drafted level (n-grams: once for
all), derives what was reached and observes; one in `refresh_every` steps refreshes, which is charged to all in equal parts.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import typer
from bench_selection import ROOT, describe_run, draw_ratio, name_commit, summarise, time_in_turn
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

from tetris_sglang.selection import (
    AcceptanceHistory,
    Calibration,
    chain_outcomes,
    select_prefixes,
    survival_from_probs,
)

BATCHES = [1, 16, 64, 256, 1024]
RESULT = ROOT / "benchmarks/results/calibration.json"
TIMED = ["tetris_sglang/selection", "benchmarks/bench_calibration.py"]
PARTS = ["apply_level", "apply_all", "outcomes", "history", "observe", "refresh", "select"]


def main(
    out: Annotated[Path, typer.Option(help="where to write the JSON")] = RESULT,
    step_ms: Annotated[
        float | None, typer.Option(help="time of a step of the demo pair, to print calibration's share of it")
    ] = None,
    depth: Annotated[int, typer.Option(min=1, help="tokens drafted per request")] = 6,
    rounds: Annotated[int, typer.Option(min=3, help="timing rounds per cell")] = 15,
    round_ms: Annotated[float, typer.Option(help="least time that each part runs in a round")] = 2.0,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    seed: int = 0,
) -> None:
    """Time calibration for batch 1..1024."""
    if step_ms is not None and not step_ms > 0:
        raise typer.BadParameter(f"must be above 0, got {step_ms}", param_hint="--step-ms")
    torch.set_num_threads(1)
    console = Console(width=None if sys.stdout.isatty() else 110)
    results = [
        measure(batch, depth, rounds, round_ms, device, seed)
        for batch in track(BATCHES, description="calibration", console=console)
    ]
    for result in results:
        result["step_share"] = None if step_ms is None else result["step_us"]["median"] / (1000 * step_ms)
    console.print(draw_table(results, depth, step_ms))
    out.parent.mkdir(parents=True, exist_ok=True)
    provenance = describe_run(device, seed) | {"commit": name_commit(TIMED), "depth": depth, "rounds": rounds}
    out.write_text(
        json.dumps({"provenance": provenance, "step_ms": step_ms, "results": results}, indent=1) + "\n"
    )
    console.print(f"written: {out}")


def measure(batch: int, depth: int, rounds: int, round_ms: float, device: str, seed: int) -> dict:
    generator = torch.Generator().manual_seed(seed)
    probs = torch.rand(batch, depth, generator=generator).to(device)
    draft_lens = torch.randint(depth + 1, (batch,), generator=generator, dtype=torch.int32).to(device)
    accept_lens = draft_lens // 2
    depths = torch.arange(1, depth + 1, device=device)
    outcomes = chain_outcomes(accept_lens, draft_lens, depth)
    calibration = Calibration(depth, device)
    refresh_every, calibration.refresh_every = calibration.refresh_every, sys.maxsize
    history, rows = AcceptanceHistory(batch, device), torch.arange(batch, device=device)
    parts: dict[str, Callable[[], object]] = {
        "apply_level": lambda: calibration.apply(probs[:, :1], 1, history.offsets(rows)[:, None]),
        "apply_all": lambda: calibration.apply(probs, depths, history.offsets(rows)[:, None]),
        "outcomes": lambda: chain_outcomes(accept_lens, draft_lens, depth),
        "history": lambda: history.observe(rows, calibration.apply(probs, depths), *outcomes),
        "observe": lambda: calibration.observe(probs, depths, *outcomes),
        "refresh": calibration.refresh,
        "select": lambda: select_prefixes(survival_from_probs(probs), 2 * batch),
        "copy": lambda: probs.clone(),
    }
    elapsed_us = time_in_turn(parts, rounds, round_ms, device)
    # Per round: what a step with one call for all depths costs.
    steps_us = [
        apply + outcomes + history_us + observe + refresh / refresh_every
        for apply, outcomes, history_us, observe, refresh in zip(
            *(elapsed_us[name] for name in ("apply_all", "outcomes", "history", "observe", "refresh")),
            strict=True,
        )
    ]

    def ratio(other: str) -> dict[str, float]:
        return summarise([mine / its for mine, its in zip(steps_us, elapsed_us[other], strict=True)])

    return {
        "batch": batch,
        "refresh_every": refresh_every,
        **{f"{name}_us": summarise(samples) for name, samples in elapsed_us.items()},
        "step_us": summarise(steps_us),
        "step_over_select": ratio("select"),
        "step_over_copy": ratio("copy"),
    }


def draw_table(results: list[dict], depth: int, step_ms: float | None) -> Table:
    table = Table(
        "batch",
        *(name.replace("_", " ") for name in PARTS),
        "step",
        "step / select",
        title=f"D = {depth}; microseconds, median ± half the spread between quartiles",
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
    if step_ms is not None:
        table.add_column(f"of {step_ms:g} ms")
    for column in table.columns:
        column.justify, column.no_wrap = "right", True
    for result in results:
        cells = [draw_ratio(result[f"{name}_us"]) for name in [*PARTS, "step"]]
        share = [] if step_ms is None else [f"{result['step_share']:.2%}"]
        table.add_row(str(result["batch"]), *cells, draw_ratio(result["step_over_select"]), *share)
    return table


if __name__ == "__main__":
    typer.run(main)
