"""How far is each rule of acceptance from what is possible? On recorded laws of a real target and its head.

    python benchmarks/bench_acceptance_rules.py

Reads benchmarks/laws/*.npz (scripts/record_laws.py writes them); writes JSON, of which
scripts/render_results.py makes the table in docs/acceptance.md. No model runs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from rich.console import Console
from rich.progress import track
from torch import Tensor

from tetris_sglang.acceptance import rates
from tetris_sglang.tools.bench.results import collect_provenance

ROOT = Path(__file__).resolve().parent.parent
LAWS = ROOT / "benchmarks/laws"
RESULT = ROOT / "benchmarks/results/acceptance/rates.json"

RULES = {
    "coupled, one draft": lambda p, q: rates.coupled(p, q, 1),
    "rejection, one draft": rates.rejection,
    "most possible of one draft": lambda p, q: rates.best(p, q, 1, with_replacement=True),
    "coupled, first two": lambda p, q: rates.coupled(p, q, 2),
    "recursive rejection, two drafts": rates.recursion,
    "most possible of two drafts without replacement": lambda p, q: rates.best(p, q, 2, with_replacement=False),
    "most possible of two independent drafts": lambda p, q: rates.best(p, q, 2, with_replacement=True),
}


def main(out: Annotated[Path, typer.Option(help="Where to write the JSON.")] = RESULT) -> None:
    found: dict[str, dict[str, float]] = {rule: {} for rule in RULES}
    paths = sorted(LAWS.glob("*.npz"))
    num_positions = {}
    for path, rule in track([(path, rule) for path in paths for rule in RULES], console=Console()):
        p, q = read_laws(path)
        found[rule][path.stem] = float(RULES[rule](p, q).mean())
        num_positions[path.stem] = len(p)
    out.parent.mkdir(parents=True, exist_ok=True)
    report = {"provenance": collect_provenance(), "positions": num_positions, "rates": found}
    out.write_text(json.dumps(report, indent=1) + "\n")
    print(f"written: {out}")


def read_laws(path: Path) -> tuple[Tensor, Tensor]:
    """p and q [n, tokens] float64."""
    with np.load(path) as arrays:
        p, q = (torch.from_numpy(arrays[name]).double() for name in ("p", "q"))
    return p / p.sum(dim=1, keepdim=True), q / q.sum(dim=1, keepdim=True)


if __name__ == "__main__":
    typer.run(main)
