"""How near does TETRIS come to the oracle? Every selection rule on the shipped traces, at equal capacity.

    python benchmarks/bench_replay.py

Reads benchmarks/traces/*.trace.gz (scripts/record_traces.py writes them); writes JSON and a figure, from which
scripts/render_results.py makes the tables. No model runs. `tetris-sglang replay FILE` shows the same of any trace.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track

from tetris_sglang.tools.bench.results import collect_provenance
from tetris_sglang.tools.replay import Study, draw_figure, name_trace, study
from tetris_sglang.trace import read_trace

ROOT = Path(__file__).resolve().parent.parent
TRACES = ROOT / "benchmarks/traces"
RESULT = ROOT / "benchmarks/results/replay/replay.json"


def main(
    out: Annotated[Path, typer.Option(help="where to write the JSON; a .png goes beside it")] = RESULT,
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
    options = {"repeats": repeats, "seed": seed}
    for path, size in track(jobs, description="replaying", console=Console()):
        trace, name = read_trace(path), name_trace(path)
        by_size[size].append(study(trace, name, capacities, batch_size=size, **options))
    provenance = collect_provenance() | {"repeats": repeats, "seed": seed}
    results = [{"batch_size": size} | result.as_json() for size, studies in by_size.items() for result in studies]
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"provenance": provenance, "results": results}, indent=1) + "\n")
    draw_figure(by_size[None], out.with_suffix(".png"))
    print(f"written: {out}")


if __name__ == "__main__":
    typer.run(main)
