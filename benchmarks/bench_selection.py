"""What TETRIS's selection costs: batched torch against the paper's heap, and against a copy of its input.

    python benchmarks/bench_selection.py --step-ms 80

Timed as timing.py says. The heap is given Python lists: moving the survivals to the host, which a GPU would have to wait
for, is not charged to it.
"""

from collections.abc import Callable
from typing import Annotated

import torch
import typer
from rich.progress import track
from rich.table import Table
from timing import (
    RESULTS,
    SPREAD,
    Device,
    Out,
    RoundMs,
    Rounds,
    StepMs,
    describe_run,
    draw_ratio,
    make_table,
    open_console,
    share_of_step,
    summarise,
    summarise_ratio,
    time_in_turn,
    title_of_shares,
    write_results,
)

from tetris_sglang.selection import select_prefixes, select_prefixes_reference, survival_from_probs

BATCHES = [2**power for power in range(13)]
DEPTHS = [1, 2, 4, 6, 8, 16]


def main(
    out: Out = RESULTS / "selection.json",
    step_ms: StepMs = None,
    tokens_per_request: Annotated[
        float, typer.Option(help="capacity: draft tokens verified per request, at most the depth")
    ] = 2.0,
    rounds: Rounds = 15,
    round_ms: RoundMs = 2.0,
    device: Device = "cpu",
    seed: int = 0,
) -> None:
    """Time selection for batch 1..4096 and depth 1..16."""
    console = open_console()
    cells = [(batch, depth) for depth in DEPTHS for batch in BATCHES]
    results = [
        measure(batch, depth, tokens_per_request, rounds, round_ms, device, seed)
        for batch, depth in track(cells, description="selection", console=console)
    ]
    for result in results:
        result["step_share"] = share_of_step(result["batched_us"], step_ms)
    for title, name in (("the paper's heap", "heap"), ("a copy of the input", "copy")):
        draw_cell = lambda cell, name=name: draw_ratio(cell[f"batched_over_{name}"])
        console.print(draw_table(results, f"over {title}; {SPREAD}", draw_cell))
    if step_ms is not None:
        console.print(draw_table(results, title_of_shares(step_ms), lambda cell: f"{cell['step_share']:.2%}"))
    provenance = describe_run(device, seed=seed, rounds=rounds)
    write_results(out, console, provenance=provenance, step_ms=step_ms, results=results)


def measure(batch: int, depth: int, tokens_per_request: float, rounds: int, round_ms: float, device: str, seed: int) -> dict:
    generator = torch.Generator().manual_seed(seed)
    draft_probs = 0.3 + 0.7 * torch.rand(batch, depth, generator=generator)
    survival = survival_from_probs(draft_probs).to(device)
    chains = survival.tolist()
    capacity_tokens = max(1, int(min(tokens_per_request, depth) * batch))
    assert select_prefixes(survival, capacity_tokens).tolist() == select_prefixes_reference(chains, capacity_tokens)
    rules: dict[str, Callable[[], object]] = {
        "batched": lambda: select_prefixes(survival, capacity_tokens),
        "heap": lambda: select_prefixes_reference(chains, capacity_tokens),
        "copy": lambda: survival.clone(),
    }
    elapsed_us = time_in_turn(rules, rounds, round_ms, device)
    return {
        "batch": batch,
        "max_draft": depth,
        "capacity_tokens": capacity_tokens,
        "batched_us": summarise(elapsed_us["batched"]),
        "batched_over_heap": summarise_ratio(elapsed_us["batched"], elapsed_us["heap"]),
        "batched_over_copy": summarise_ratio(elapsed_us["batched"], elapsed_us["copy"]),
    }


def draw_table(results: list[dict], title: str, draw_cell: Callable[[dict], str]) -> Table:
    table = make_table("batch", *(f"D = {depth}" for depth in DEPTHS), title=title)
    for batch in BATCHES:
        table.add_row(str(batch), *(draw_cell(result) for result in results if result["batch"] == batch))
    return table


if __name__ == "__main__":
    typer.run(main)
