"""What consulting recent texts costs a step: writing them down, looking them up, scoring drafts by them, learning from them.

    python benchmarks/bench_matches.py

Timed as timing.py says. `drafts` is what the same chains cost without a match; a step is writing down, the
lookup, the drafts with it less those without, and learning.
"""

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
    time_in_turn,
)

from tetris_sglang.drafting import ChainGrower, Proposal
from tetris_sglang.estimates.estimator import AcceptanceEstimator
from tetris_sglang.texts import Match, RecentTexts

BATCHES = [1, 16, 64, 256]
PARTS = ["write", "lookup", "drafts_with", "drafts", "learn"]
VOCABULARY = 2000


def main(
    out: Out = RESULTS / "matches.json",
    step_ms: StepMs = STEP_MS,
    depth: Annotated[int, typer.Option(min=1, help="tokens drafted per request")] = 6,
    context: Annotated[int, typer.Option(min=16, help="tokens of each text")] = 512,
    rounds: Rounds = 15,
    round_ms: RoundMs = 2.0,
    device: Device = "cpu",
    seed: int = 0,
) -> None:
    """Time matches for batch 1..256."""
    report(
        BATCHES,
        lambda batch: measure(batch, depth, context, rounds, round_ms, device, seed),
        lambda results: [draw_parts(results, PARTS, step_ms, f"D = {depth}, {context} tokens")],
        out=out,
        step_ms=step_ms,
        device=device,
        seed=seed,
        depth=depth,
        context=context,
        rounds=rounds,
    )


def measure(batch: int, depth: int, context: int, rounds: int, round_ms: float, device: str, seed: int) -> dict:
    generator = torch.Generator().manual_seed(seed)
    history = torch.randint(VOCABULARY, (batch, context), generator=generator, dtype=torch.int32).to(device)
    rows, lens = torch.arange(batch, device=device), torch.full((batch,), context, device=device)
    recent = RecentTexts(batch, VOCABULARY, device, are_shared=False)
    recent.begin(rows, recent.place(range(batch), range(batch), [0] * batch).to(device))
    recent.append(rows, history, lens)
    match = recent.find(rows, depth)
    emitted = torch.randint(VOCABULARY, (batch, depth + 1), generator=generator).to(device)
    counts = torch.randint(1, depth + 2, (batch,), generator=generator).to(device)
    tokens = torch.randint(VOCABULARY, (batch, depth), generator=generator).to(device)
    probs = torch.rand(batch, depth, generator=generator).to(device)
    calibrate = AcceptanceEstimator(depth, device)

    def grow(match: Match | None) -> Proposal:
        grower = ChainGrower(tokens[:, :1], probs[:, :1], calibrate, match)
        for level in range(1, depth):
            grower.grow(tokens[:, level, None], probs[:, level, None])
        return grower.finish(depth)

    evidence = grow(match).evidence
    reached, accepted = probs > 0.3, probs > 0.6
    parts: dict[str, Callable[[], object]] = {
        "write": lambda: recent.append(rows, emitted, counts),
        "lookup": lambda: recent.find(rows, depth),
        "drafts_with": lambda: grow(match),
        "drafts": lambda: grow(None),
        "learn": lambda: calibrate.evidence.observe(evidence, probs, reached, accepted),
    }
    elapsed_us = time_in_turn(parts, rounds, round_ms, device)
    steps_us = [
        write + lookup + (drafts_with - drafts) + learn
        for write, lookup, drafts_with, drafts, learn in zip(*(elapsed_us[part] for part in PARTS), strict=True)
    ]
    return {"batch": batch, **summarise_all(elapsed_us), "step_us": summarise(steps_us)}


if __name__ == "__main__":
    typer.run(main)
