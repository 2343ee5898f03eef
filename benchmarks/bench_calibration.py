"""What calibration costs: against selection itself, and against a copy of the probabilities.

    python benchmarks/bench_calibration.py

Timed as timing.py says. A step with chains calibrates once per drafted level (n-grams: once for all), derives what was
reached and observes; one in `refresh_every` steps refreshes, which is charged to all in equal parts.
"""

import sys
from collections.abc import Callable
from typing import Annotated

import torch
import typer
from timing import (
    RESULTS,
    STEP_MS,
    Device,
    Out,
    RoundMs,
    Rounds,
    StepMs,
    draw_parts,
    report,
    summarise,
    summarise_all,
    summarise_ratio,
    time_in_turn,
)

from tetris_sglang.estimates import Calibration, chain_outcomes
from tetris_sglang.selection import select_prefixes, survival_from_probs

BATCHES = [1, 16, 64, 256, 1024]
PARTS = ["apply_level", "apply_all", "outcomes", "observe", "refresh", "select"]


def main(
    out: Out = RESULTS / "calibration.json",
    step_ms: StepMs = STEP_MS,
    depth: Annotated[int, typer.Option(min=1, help="tokens drafted per request")] = 6,
    rounds: Rounds = 15,
    round_ms: RoundMs = 2.0,
    device: Device = "cpu",
    seed: int = 0,
) -> None:
    """Time calibration for batch 1..1024."""
    report(
        BATCHES,
        lambda batch: measure(batch, depth, rounds, round_ms, device, seed),
        lambda results: [draw_parts(results, PARTS, step_ms, f"D = {depth}", ratios={"step / select": "step_over_select"})],
        out=out,
        step_ms=step_ms,
        device=device,
        seed=seed,
        depth=depth,
        rounds=rounds,
    )


def measure(batch: int, depth: int, rounds: int, round_ms: float, device: str, seed: int) -> dict:
    generator = torch.Generator().manual_seed(seed)
    probs = torch.rand(batch, depth, generator=generator).to(device)
    draft_lens = torch.randint(depth + 1, (batch,), generator=generator, dtype=torch.int32).to(device)
    num_accepted = draft_lens // 2
    depths = torch.arange(1, depth + 1, device=device)
    outcomes = chain_outcomes(num_accepted, draft_lens, depth)
    calibration = Calibration(depth, device)
    refresh_every, calibration.refresh_every = calibration.refresh_every, sys.maxsize
    parts: dict[str, Callable[[], object]] = {
        "apply_level": lambda: calibration.apply(probs[:, :1], 1),
        "apply_all": lambda: calibration.apply(probs, depths),
        "outcomes": lambda: chain_outcomes(num_accepted, draft_lens, depth),
        "observe": lambda: calibration.observe(probs, depths, *outcomes),
        "refresh": calibration.refresh,
        "select": lambda: select_prefixes(survival_from_probs(probs), 2 * batch),
        "copy": lambda: probs.clone(),
    }
    elapsed_us = time_in_turn(parts, rounds, round_ms, device)
    # Per round: what a step with one call for all depths costs.
    steps_us = [
        apply + outcomes + observe + refresh / refresh_every
        for apply, outcomes, observe, refresh in zip(
            *(elapsed_us[name] for name in ("apply_all", "outcomes", "observe", "refresh")),
            strict=True,
        )
    ]

    return {
        "batch": batch,
        "refresh_every": refresh_every,
        **summarise_all(elapsed_us),
        "step_us": summarise(steps_us),
        "step_over_select": summarise_ratio(steps_us, elapsed_us["select"]),
        "step_over_copy": summarise_ratio(steps_us, elapsed_us["copy"]),
    }


if __name__ == "__main__":
    typer.run(main)
