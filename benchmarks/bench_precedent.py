"""What consulting the request's own text costs a step: looking it up, scoring drafts by it, learning from it.

    python benchmarks/bench_precedent.py --step-ms 80

Timed as in bench_selection.py: in turn within each round, ratios within a round, median and quartiles over the rounds;
on a CPU one thread, by the CPU time it used. `drafts` is what the same chains cost without a precedent; a step is the
lookup, the drafts with it less those without, and learning.
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

from tetris_sglang.drafting import INITIAL_OFFSETS, ChainGrower, Precedent, Proposal, find_precedent
from tetris_sglang.runtime.learning import RequestsCalibration
from tetris_sglang.selection import Calibration, EvidenceOffsets

BATCHES = [1, 16, 64, 256]
RESULT = ROOT / "benchmarks/results/precedent.json"
TIMED = ["tetris_sglang/drafting", "tetris_sglang/selection", "benchmarks/bench_precedent.py"]
PARTS = ["lookup", "drafts_with", "drafts", "learn"]
VOCABULARY = 2000


def main(
    out: Annotated[Path, typer.Option(help="where to write the JSON")] = RESULT,
    step_ms: Annotated[float, typer.Option(help="time of a step, to print this share of it")] = 80.0,
    depth: Annotated[int, typer.Option(min=1, help="tokens drafted per request")] = 6,
    context: Annotated[int, typer.Option(min=16, help="columns that are searched")] = 512,
    rounds: Annotated[int, typer.Option(min=3, help="timing rounds per cell")] = 15,
    round_ms: Annotated[float, typer.Option(help="least time that each part runs in a round")] = 2.0,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    seed: int = 0,
) -> None:
    """Time precedents for batch 1..256."""
    torch.set_num_threads(1)
    console = Console(width=None if sys.stdout.isatty() else 110)
    results = [
        measure(batch, depth, context, rounds, round_ms, device, seed)
        for batch in track(BATCHES, description="precedents", console=console)
    ]
    console.print(draw_table(results, depth, context, step_ms))
    out.parent.mkdir(parents=True, exist_ok=True)
    provenance = describe_run(device, seed) | {"commit": name_commit(TIMED)}
    provenance |= {"depth": depth, "context": context, "rounds": rounds}
    out.write_text(
        json.dumps({"provenance": provenance, "step_ms": step_ms, "results": results}, indent=1) + "\n"
    )
    console.print(f"written: {out}")


def measure(
    batch: int, depth: int, context: int, rounds: int, round_ms: float, device: str, seed: int
) -> dict:
    generator = torch.Generator().manual_seed(seed)
    history = torch.randint(VOCABULARY, (batch, context), generator=generator, dtype=torch.int32).to(device)
    rows, lens = torch.arange(batch, device=device), torch.full((batch,), context, device=device)
    precedent = find_precedent(history, rows, lens, depth=depth)
    tokens = torch.randint(VOCABULARY, (batch, depth), generator=generator).to(device)
    probs = torch.rand(batch, depth, generator=generator).to(device)
    offsets = EvidenceOffsets(INITIAL_OFFSETS, device)
    calibrate = RequestsCalibration(Calibration(depth, device), offsets, torch.zeros(batch, device=device))

    def grow(precedent: Precedent | None) -> Proposal:
        grower = ChainGrower(tokens[:, :1], probs[:, :1], calibrate, precedent)
        for level in range(1, depth):
            grower.grow(tokens[:, level, None, None], probs[:, level, None, None])
        return grower.finish(depth)

    evidence = grow(precedent).evidence
    reached, accepted = probs > 0.3, probs > 0.6
    parts: dict[str, Callable[[], object]] = {
        "lookup": lambda: find_precedent(history, rows, lens, depth=depth),
        "drafts_with": lambda: grow(precedent),
        "drafts": lambda: grow(None),
        "learn": lambda: offsets.observe(evidence, probs, reached, accepted),
    }
    elapsed_us = time_in_turn(parts, rounds, round_ms, device)
    steps_us = [
        lookup + (drafts_with - drafts) + learn
        for lookup, drafts_with, drafts, learn in zip(*(elapsed_us[part] for part in PARTS), strict=True)
    ]
    return {
        "batch": batch,
        **{f"{part}_us": summarise(samples) for part, samples in elapsed_us.items()},
        "step_us": summarise(steps_us),
    }


def draw_table(results: list[dict], depth: int, context: int, step_ms: float) -> Table:
    table = Table(
        "batch",
        *(part.replace("_", " ") for part in PARTS),
        "step",
        f"of {step_ms:g} ms",
        title=f"D = {depth}, {context} columns; microseconds, median ± half the spread between quartiles",
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
    for column in table.columns:
        column.justify, column.no_wrap = "right", True
    for result in results:
        cells = [draw_ratio(result[f"{part}_us"]) for part in [*PARTS, "step"]]
        share = result["step_us"]["median"] / (1000 * step_ms)
        table.add_row(str(result["batch"]), *cells, f"{share:.2%}")
    return table


if __name__ == "__main__":
    typer.run(main)
