"""What a comparison says to serve with: `tetris-sglang bench --recommend`."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from statistics import geometric_mean
from typing import NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table

from tetris_sglang.tools.bench.arms import CONTROL, REFERENCE, Arm
from tetris_sglang.tools.bench.report import Cell, build_cells
from tetris_sglang.tools.bench.results import Results
from tetris_sglang.tools.real_model import ensure_target

AS_GOOD = 0.98
"""Of the best: what is within chance of it, and has fewer flags, is served with rather."""


class Candidate(NamedTuple):
    arm: str
    gain: float
    """Output tokens per second over those without speculation: geometric mean over the loads and temperatures."""
    worst: Cell
    flags: tuple[str, ...]
    """Of the server, beyond the model's."""


def list_candidates(results: Results, drafts: Mapping[str, str | None]) -> list[Candidate]:
    """What was measured everywhere, the fastest first.

    Args:
        drafts: each draft's folder; None for n-grams.
    """
    cells = build_cells(results["samples"])
    places = {(cell.temperature, cell.load) for cell in cells}
    found = []
    for name, described in results["arms"].items():
        arm, own = Arm(**described), [cell for cell in cells if cell.arm == name]
        if arm.family in (REFERENCE, CONTROL) or arm.draft == "useless" or len(own) < len(places):
            continue
        gain = geometric_mean(cell.throughput.median for cell in own)
        worst = min(own, key=lambda cell: cell.throughput.median)
        found.append(Candidate(name, gain, worst, tuple(arm.flags(drafts.get(arm.draft), phase_times=False))))
    return sorted(found, key=lambda candidate: -candidate.gain)


def choose(candidates: Sequence[Candidate]) -> Candidate | None:
    """The one to serve with; None: no speculation."""
    good = [c for c in candidates if c.gain >= AS_GOOD * candidates[0].gain and c.gain > 1]
    return min(good, key=lambda c: (len(c.flags), -c.gain), default=None)


def print_recommendation(results: Results, drafts: Mapping[str, str | None], console: Console) -> None:
    candidates = list_candidates(results, drafts)
    chosen = choose(candidates)
    table = Table(title="What to serve with", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for header in ("", "over all loads", "at worst", "there"):
        table.add_column(header, no_wrap=True)
    for candidate in candidates:
        style = "bold" if candidate is chosen else None
        worst = candidate.worst
        there = f"temperature {worst.temperature:g}, {worst.load}"
        table.add_row(candidate.arm, f"{candidate.gain:.2f}", f"{worst.throughput.median:.2f}", there, style=style)
    console.print(table)
    console.print(
        f"Output tokens per second over those without speculation. Of what reaches {AS_GOOD} of the best, the one with the "
        "fewest flags.\n",
        style="dim",
    )
    if chosen is None:
        console.print("Serve without speculation: nothing gains under these loads.", highlight=False)
        return
    model = results["settings"]["model_path"] or str(ensure_target())
    console.print(f"[bold]{chosen.arm}[/]: {chosen.gain:.2f} of no speculation. Serve with", highlight=False)
    command = f"  python -m sglang.launch_server --model-path {shlex.quote(model)} {shlex.join(chosen.flags)}"
    console.print(command, soft_wrap=True, highlight=False, markup=False)
    if chosen.worst.throughput.median < AS_GOOD:
        where = f"temperature {chosen.worst.temperature:g}, {chosen.worst.load}"
        console.print(f"It loses at {where}: {chosen.worst.throughput.median:.2f}. Leave speculation out if that is your load.")
