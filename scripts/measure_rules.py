"""Which rule of acceptance, and runners-up or not? Counted on a real server at equal rows of the target; times play no part.

    python scripts/measure_rules.py                  # half an hour on two cores

SmolLM2-135M-Instruct and its EAGLE-3 head answer the prompts of scripts/record_traces.py, at a fixed capacity, so that every
server verifies as many drafts per request. Writes JSON, of which
scripts/render_results.py makes the table in docs/acceptance.md.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from record_traces import Recording, mixed_prompts, record

from tetris_sglang.tools.bench.results import collect_provenance
from tetris_sglang.trace import Trace, read_trace

RESULT = ROOT / "benchmarks/results/acceptance/served.json"
CHAINS, COMBS = "chains", "chains with runners-up"
CASES = [("coupled", CHAINS), ("coupled", COMBS), ("rejection", CHAINS), ("rejection", COMBS), ("block", CHAINS)]
"""Rule and shape; block verification judges chains alone."""


def main(
    out: Annotated[Path, typer.Option(help="Where to write the JSON.")] = RESULT,
    temperatures: Annotated[str, typer.Option(help="0 is greedy, where all rules are one.")] = "0,0.7,1",
    capacity_per_request: Annotated[str, typer.Option(help="Drafts verified per request.")] = "2",
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens written per prompt, at most.")] = 128,
    count: Annotated[int, typer.Option("--prompts", min=1, help="Prompts answered.")] = 32,
    concurrency: Annotated[int, typer.Option(min=1, help="Running requests.")] = 8,
    seed: Annotated[int, typer.Option(help="Of sampling.")] = 0,
) -> None:
    texts = [prompt.text for prompt in mixed_prompts(count)]
    jobs = [
        (float(temperature), float(capacity), rule, shape)
        for temperature in temperatures.split(",")
        for capacity in capacity_per_request.split(",")
        for rule, shape in CASES
        if float(temperature) > 0 or rule == "coupled"
    ]
    provenance = collect_provenance() | {"prompts": len(texts), "seed": seed}
    out.parent.mkdir(parents=True, exist_ok=True)
    rows = []
    for temperature, capacity, rule, shape in track(jobs, description="serving", console=Console()):
        recording = Recording(
            temperature=temperature,
            num_runners_up=int(shape == COMBS),
            acceptance=rule,
            capacity_per_request=capacity,
        )
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "recorded"
            record(recording, path, texts, new_tokens, concurrency, seed)
            counted = count_trace(read_trace(path))
        rows.append({"temperature": temperature, "capacity": capacity, "rule": rule, "shape": shape} | counted)
        out.write_text(json.dumps({"provenance": provenance, "rows": rows}, indent=1) + "\n")
    print(f"written: {out}")


def count_trace(trace: Trace) -> dict[str, float]:
    """Shares, and what chance alone would move the success rate by (one standard error of that many verified drafts)."""
    num_requests, verified, accepted = len(trace.steps), int(trace.selected.sum()), int(trace.accepted.sum())
    rate = accepted / verified
    return {
        "request_steps": num_requests,
        "verified_per_request": verified / num_requests,
        "success_rate": rate,
        "standard_error": math.sqrt(rate * (1 - rate) / verified),
        "emitted_per_request": 1 + accepted / num_requests,
    }


if __name__ == "__main__":
    typer.run(main)
