"""What planning a step costs: choosing depth and capacity, learning from the last step, and the curves of acceptance.

    python benchmarks/bench_planning.py

Timed as timing.py says. The reference chooses by going through the same candidates one by one.
"""

from typing import Annotated

import numpy as np
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
    time_in_turn,
)

from tetris_sglang.capacity import (
    AcceptCurves,
    AutoCapacity,
    DraftLimits,
    PassTimes,
    StepShape,
    StepTimeModel,
    capacity_shares,
    measure_curves,
)
from tetris_sglang.selection import survival_from_probs

BATCHES = [1, 4, 16, 64, 256]
PARTS = ["choose", "choose_one_by_one", "learn", "curves", "copy"]
SEED = PassTimes(
    {rows: 0.02 + 0.0005 * rows for rows in (1, 4, 16, 64, 256)},
    {1: 0.002, 64: 0.004},
    {1: 0.002, 64: 0.004},
    1e-7,
)


def main(
    out: Out = RESULTS / "planning.json",
    step_ms: StepMs = STEP_MS,
    depth: Annotated[int, typer.Option(min=1, help="tokens drafted per request")] = 6,
    rounds: Rounds = 15,
    round_ms: RoundMs = 2.0,
    device: Device = "cpu",
    seed: int = 0,
) -> None:
    """Time planning for batch 1..256; the curves are measured on the device."""
    report(
        BATCHES,
        lambda batch: measure(batch, depth, rounds, round_ms, device, seed),
        lambda results: [draw_parts(results, PARTS, step_ms, f"D = {depth}")],
        out=out,
        step_ms=step_ms,
        device=device,
        seed=seed,
        depth=depth,
        rounds=rounds,
    )


def measure(batch: int, depth: int, rounds: int, round_ms: float, device: str, seed: int) -> dict:
    limits = DraftLimits(range(1, depth + 1), lambda levels: levels)
    model = StepTimeModel(SEED, max_rows=batch * (depth + 1), max_batch_size=batch)
    policy = AutoCapacity(model, AcceptCurves(depth, capacity_shares(depth)))
    for _ in range(8):
        policy.choose(batch, limits, 100.0 * batch)
    probs = torch.rand(batch, depth, generator=torch.Generator().manual_seed(seed)).to(device)
    survival, depths = survival_from_probs(probs), torch.arange(1, depth + 1, device=device)
    shares = torch.tensor(policy.curves.shares, dtype=torch.float32, device=device)
    shape = StepShape(batch, 3, 3 * batch, 100.0 * batch)
    candidates = [(0, 0)] + [
        (d, round(share * batch)) for d in limits.depths for share in policy.curves.shares[1:] if share <= d
    ]

    def choose_one_by_one() -> tuple[int, int]:
        def speed(plan: tuple[int, int]) -> float:
            levels, tokens = plan
            accepted = policy.curves.accepted(np.array([levels]), np.array([tokens / batch]))[0]
            return (1 + accepted) / model.predict_step(StepShape(batch, levels, batch + tokens, 100.0 * batch))

        return max(candidates, key=speed)

    parts = {
        "choose": lambda: policy.choose(batch, limits, 100.0 * batch),
        "choose_one_by_one": choose_one_by_one,
        "learn": lambda: model.observe(shape, 0.08),
        "curves": lambda: measure_curves(survival, depths, depth, shares),
        "copy": lambda: probs.clone(),
    }
    elapsed_us = time_in_turn(parts, rounds, round_ms, device)
    steps_us = [sum(parts) for parts in zip(*(elapsed_us[part] for part in ("choose", "learn", "curves")), strict=True)]
    return {"batch": batch, **summarise_all(elapsed_us), "step_us": summarise(steps_us)}


if __name__ == "__main__":
    typer.run(main)
