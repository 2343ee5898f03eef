"""What shared noise costs: drawing with it against torch.multinomial, and perturbing a draft's logits.

    python benchmarks/bench_noise.py

Timed as timing.py says. A step with a sampled request draws once, over all verified rows, and perturbs once per drafted
level, over one row per request (and branch).
"""

from collections.abc import Callable
from itertools import product

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
    summarise_all,
    summarise_ratio,
    time_in_turn,
)

from tetris_sglang.acceptance import RequestNoise
from tetris_sglang.runtime.operations import get_operations

ROWS = [1, 16, 64]
VOCABULARIES = [2048, 49_152, 151_936]


def main(
    out: Out = RESULTS / "noise.json",
    step_ms: StepMs = STEP_MS,
    rounds: Rounds = 7,
    round_ms: RoundMs = 2.0,
    device: Device = "cpu",
    seed: int = 0,
) -> None:
    """Time draws of 1..64 rows from three vocabularies."""
    report(
        list(product(ROWS, VOCABULARIES)),
        lambda case: measure(*case, rounds, round_ms, device, seed),
        lambda results: [draw_table(results, step_ms)],
        out=out,
        step_ms=step_ms,
        device=device,
        seed=seed,
        rounds=rounds,
    )


def measure(rows: int, vocab: int, rounds: int, round_ms: float, device: str, seed: int) -> dict:
    generator = torch.Generator().manual_seed(seed)
    logits = (4 * torch.randn(rows, vocab, generator=generator)).to(device)
    weights = logits.softmax(dim=1)
    seeds = torch.randint(2**63 - 1, (rows,), generator=generator).to(device)
    positions = torch.randint(4096, (rows,), generator=generator).to(device)
    noise = RequestNoise(seeds, torch.ones(rows, device=device))
    operations = get_operations(device, "tetris")
    parts: dict[str, Callable[[], object]] = {
        "draw": lambda: operations.draw(weights, seeds, positions),
        "multinomial": lambda: torch.multinomial(weights, 1),
        "perturb": lambda: operations.perturb(logits, noise, positions),
        "softmax": lambda: logits.softmax(dim=1),
    }
    elapsed_us = time_in_turn(parts, rounds, round_ms, device)
    return {
        "rows": rows,
        "vocab": vocab,
        **summarise_all(elapsed_us),
        "step_us": summarise(elapsed_us["draw"]),
        "draw_against_multinomial": summarise_ratio(elapsed_us["draw"], elapsed_us["multinomial"]),
        "perturb_against_softmax": summarise_ratio(elapsed_us["perturb"], elapsed_us["softmax"]),
    }


def draw_table(results: list[dict], step_ms: float) -> Table:
    columns = ["rows", "vocabulary", "draw / multinomial", "perturb / softmax", f"draw, of {step_ms:g} ms"]
    table = make_table(*columns, title=f"Shared noise, {SPREAD}")
    for result in results:
        table.add_row(
            str(result["rows"]),
            str(result["vocab"]),
            draw_ratio(result["draw_against_multinomial"]),
            draw_ratio(result["perturb_against_softmax"]),
            f"{result['step_share']:.2%}",
        )
    return table


if __name__ == "__main__":
    typer.run(main)
