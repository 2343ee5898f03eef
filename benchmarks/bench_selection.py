"""What TETRIS's selection costs: batched torch against the paper's heap, and against a copy of its input.

    python benchmarks/bench_selection.py

Timed as timing.py says. The heap is given Python lists: moving the survivals to the host, which a GPU would have to wait
for, is not charged to it.
"""

from collections.abc import Callable
from typing import Annotated

import torch
import typer
from rich.table import Table
from timing import (
    RESULTS,
    SPREAD,
    STEP_MS,
    Device,
    Out,
    RoundMs,
    Rounds,
    StepMs,
    draw_ratio,
    make_table,
    report,
    summarise,
    summarise_ratio,
    time_in_turn,
)

from tetris_sglang.selection import select_prefixes, select_prefixes_reference, survival_from_probs

BATCHES = [2**power for power in range(13)]
DEPTHS = [1, 2, 4, 6, 8, 16]


def main(
    out: Out = RESULTS / "selection.json",
    step_ms: StepMs = STEP_MS,
    tokens_per_request: Annotated[
        float, typer.Option(help="capacity: draft tokens verified per request, at most the depth")
    ] = 2.0,
    rounds: Rounds = 15,
    round_ms: RoundMs = 2.0,
    device: Device = "cpu",
    seed: int = 0,
) -> None:
    """Time selection for batch 1..4096 and depth 1..16."""
    report(
        [(batch, depth) for depth in DEPTHS for batch in BATCHES],
        lambda case: measure(*case, tokens_per_request, rounds, round_ms, device, seed),
        lambda results: draw_tables(results, step_ms),
        out=out,
        step_ms=step_ms,
        device=device,
        seed=seed,
        rounds=rounds,
    )


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
        "step_us": summarise(elapsed_us["batched"]),
        "batched_over_heap": summarise_ratio(elapsed_us["batched"], elapsed_us["heap"]),
        "batched_over_copy": summarise_ratio(elapsed_us["batched"], elapsed_us["copy"]),
    }


def draw_tables(results: list[dict], step_ms: float) -> list[Table]:
    def draw(title: str, draw_cell: Callable[[dict], str]) -> Table:
        table = make_table("batch", *(f"D = {depth}" for depth in DEPTHS), title=title)
        for batch in BATCHES:
            table.add_row(str(batch), *(draw_cell(result) for result in results if result["batch"] == batch))
        return table

    return [
        draw(f"over the paper's heap; {SPREAD}", lambda result: draw_ratio(result["batched_over_heap"])),
        draw(f"over a copy of the input; {SPREAD}", lambda result: draw_ratio(result["batched_over_copy"])),
        draw(f"share of a step of {step_ms:g} ms", lambda result: f"{result['step_share']:.2%}"),
    ]


if __name__ == "__main__":
    typer.run(main)
