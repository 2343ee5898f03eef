"""How near does TETRIS come to the oracle? Every selection rule on the shipped traces, at equal capacity.

    python benchmarks/bench_replay.py

Reads benchmarks/traces/*.trace.gz (scripts/record_traces.py writes them); writes JSON, Markdown and a figure. No model
runs. `tetris-sglang replay FILE` shows the same of any trace.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import track

from tetris_sglang.estimates import Calibration, chain_outcomes
from tetris_sglang.selection import survival_from_probs
from tetris_sglang.tools.bench.results import collect_provenance
from tetris_sglang.tools.replay import (
    GOAL,
    RULES,
    Figures,
    Study,
    draw_figure,
    draw_success,
    name_trace,
    study,
)
from tetris_sglang.trace import Trace, read_trace

ROOT = Path(__file__).resolve().parent.parent
TRACES = ROOT / "benchmarks/traces"
RESULT = ROOT / "benchmarks/results/replay/replay.json"
TETRIS = "tetris calibrated"


def main(
    out: Annotated[Path, typer.Option(help="where to write the JSON; .md and .png go beside it")] = RESULT,
    capacity_per_request: Annotated[str, typer.Option(help="drafts verified per request")] = "0.5,1,1.5,2,3,4,5",
    batch_size: Annotated[str, typer.Option(help="rows shuffled into batches of so many")] = "64",
    repeats: Annotated[int, typer.Option(min=1, help="draws of the random rule, and shuffles")] = 1,
    seed: int = 0,
) -> None:
    """Replay the shipped traces: as recorded, and in batches of other sizes."""
    capacities = [float(text) for text in capacity_per_request.split(",")]
    sizes = [None, *(int(text) for text in batch_size.split(","))]
    paths = sorted(TRACES.glob("*.trace.gz"))
    jobs = [(path, size) for size in sizes for path in paths]
    by_size: dict[int | None, list[Study]] = {size: [] for size in sizes}
    hindsight: list[Study] = []
    options = {"repeats": repeats, "seed": seed}
    for path, size in track(jobs, description="replaying", console=Console()):
        trace, name = read_trace(path), name_trace(path)
        by_size[size].append(study(trace, name, capacities, batch_size=size, **options))
        if size is None and trace.header["num_nodes"] == trace.header["num_steps"]:
            hindsight.append(study(calibrate_in_hindsight(trace), name, capacities, **options))
    command = shlex.join(["python", "benchmarks/bench_replay.py", *sys.argv[1:]])
    provenance = collect_provenance() | {"command": command, "repeats": repeats, "seed": seed}
    results = [{"batch_size": size} | result.as_json() for size, studies in by_size.items() for result in studies]
    out.parent.mkdir(parents=True, exist_ok=True)
    in_hindsight = [{"name": result.name} | result.find(TETRIS, c).as_json() for result in hindsight for c in capacities]
    report = {"provenance": provenance, "results": results, "hindsight": in_hindsight}
    out.write_text(json.dumps(report, indent=1) + "\n")
    out.with_suffix(".md").write_text("\n".join(render(provenance, by_size, hindsight)))
    draw_figure(by_size[None], out.with_suffix(".png"))
    print(f"written: {out}")


def calibrate_in_hindsight(trace: Trace) -> Trace:
    """Chains with the survivals of a calibration that has seen the whole trace, these very rows included: what the draft's
    probabilities could say at best, per depth and score."""
    raw = torch.from_numpy(trace.raw)
    before = torch.nn.functional.pad(raw[:, :-1], (1, 0), value=1.0)
    # Half precision: a ratio may exceed 1, and what has become 0 stays the least likely.
    probs = (raw / before.clamp(min=1e-7)).clamp(1e-7, 1.0)
    depths = torch.arange(1, raw.shape[1] + 1)
    outcomes = chain_outcomes(torch.from_numpy(trace.accepted.sum(axis=1)), torch.from_numpy(trace.selected), raw.shape[1])
    calibration = Calibration(raw.shape[1], prior_strength=1.0, decay=1.0, refresh_every=1)
    calibration.observe(probs, depths, *outcomes)
    return trace._replace(survival=survival_from_probs(calibration.apply(probs, depths)).numpy())


def render(provenance: dict, by_size: dict[int | None, list[Study]], hindsight: list[Study]) -> Iterator[str]:
    yield "# Selection rules on recorded steps\n"
    yield (
        f"Made by `{provenance['command']}` on {provenance['date']}, commit {provenance['commit']}, Python "
        f"{provenance['python']}, torch {provenance['torch']}; no model ran. docs/replay.md says what is compared.\n"
    )
    yield "k: drafts verified per request and step, on average. Every rule verifies as many.\n"
    for size, studies in by_size.items():
        rows = "the recorded batches" if size is None else f"the same rows, shuffled into batches of {size}"
        yield f"## TETRIS's share of the oracle's success rate, {rows}\n"
        yield f"In bold where it is at least {GOAL:.0%}.\n"
        yield from render_table(
            studies[0],
            ((result.name, result, TETRIS) for result in studies),
            lambda f: f"{'**' if f.oracle_share >= GOAL else ''}{f.oracle_share:.1%}{'**' if f.oracle_share >= GOAL else ''}",
        )
    yield "## Chains calibrated in hindsight, on the rows that they are judged by\n"
    yield "Accepted / verified (share of the oracle's) of TETRIS with such survivals, the recorded batches:\n"
    yield from render_table(hindsight[0], ((result.name, result, TETRIS) for result in hindsight), draw_success)
    yield "![success rate against capacity](replay.png)\n"
    for result in by_size[None]:
        yield f"## {result.name}\n"
        yield (
            f"{result.num_steps} steps of {result.num_rows / result.num_steps:.1f} requests; {result.header['num_nodes']} "
            f"drafts per request; temperature {result.header['temperature']:g}.\n"
        )
        yield "Accepted / verified (share of the oracle's):\n"
        yield from render_table(result, ((rule, result, rule) for rule in RULES), draw_success)
        yield "Success rate that the chosen survivals promise:\n"
        promising = [rule for rule in RULES if RULES[rule].promises]
        yield from render_table(result, ((rule, result, rule) for rule in promising), lambda f: f"{f.promised:.3f}")
        yield "Emitted per row of the target's pass:\n"
        yield from render_table(result, ((rule, result, rule) for rule in RULES), lambda f: f"{f.emitted_per_row:.3f}")


def render_table(first: Study, lines: Iterable[tuple[str, Study, str]], draw: Callable[[Figures], str]) -> Iterator[str]:
    """A Markdown table; lines are (label, study, rule)."""
    yield "| | " + " | ".join(f"k = {c:g}" for c in first.capacities) + " |"
    yield "|---" * (1 + len(first.capacities)) + "|"
    for label, result, rule in lines:
        yield f"| {label} | " + " | ".join(draw(result.find(rule, c)) for c in first.capacities) + " |"
    yield ""


if __name__ == "__main__":
    typer.run(main)
