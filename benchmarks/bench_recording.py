"""What recording costs a step.

    python benchmarks/bench_recording.py --step-ms 80

Timed as timing.py says. Without a recorder a step does nothing for it.
"""

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Annotated

import torch
import typer
from rich.progress import track
from timing import (
    RESULTS,
    Device,
    Out,
    RoundMs,
    Rounds,
    StepMs,
    describe_run,
    make_table,
    open_console,
    share_of_step,
    summarise_all,
    time_in_turn,
    write_results,
)

from tetris_sglang.capacity import StepPlan
from tetris_sglang.config import TetrisConfig
from tetris_sglang.drafting import CombGrower, Proposal, TreeShape, make_chains, make_grid
from tetris_sglang.observers import StepRecord
from tetris_sglang.packing import AcceptedTokens
from tetris_sglang.runtime.reports.recording import StepRecorder

BATCHES = [1, 4, 16, 64, 256]
CHILDREN = 3
PARTS = ["chains", "trees"]


def main(
    out: Out = RESULTS / "recording.json",
    step_ms: StepMs = 80.0,
    depth: Annotated[int, typer.Option(min=1, help="levels drafted per request")] = 6,
    rounds: Rounds = 15,
    round_ms: RoundMs = 2.0,
    device: Device = "cpu",
    seed: int = 0,
) -> None:
    """Time recording for batch 1..256; the file goes to the folder for temporary files."""
    console = open_console()
    results = [
        measure(batch, depth, rounds, round_ms, device, seed)
        for batch in track(BATCHES, description="recording", console=console)
    ]
    table = make_table("batch", *(f"{part}, us" for part in PARTS), f"chains, of {step_ms:g} ms")
    for result in results:
        cells = (f"{result[f'{part}_us']['median']:.3g}" for part in PARTS)
        table.add_row(str(result["batch"]), *cells, f"{share_of_step(result['chains_us'], step_ms):.2%}")
    console.print(table)
    provenance = describe_run(device, seed=seed, depth=depth, rounds=rounds)
    write_results(out, console, provenance=provenance, results=results)


def measure(batch: int, depth: int, rounds: int, round_ms: float, device: str, seed: int) -> dict:
    torch.manual_seed(seed)
    with TemporaryDirectory() as folder:
        parts = {
            "chains": make_step(draft_chains(batch, depth), depth, device, Path(folder) / "chains"),
            "trees": make_step(draft_combs(batch, depth), depth, device, Path(folder) / "trees"),
        }
        elapsed_us = time_in_turn(parts, rounds, round_ms, device)
    return {"batch": batch, **summarise_all(elapsed_us)}


def draft_chains(batch: int, depth: int) -> Proposal:
    probs = torch.rand(batch, depth)
    return make_chains(torch.randint(0, 2048, (batch, depth)), probs, probs)


def draft_combs(batch: int, depth: int) -> Proposal:
    def draft() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randint(0, 2048, (batch, CHILDREN)), torch.rand(batch, CHILDREN) / CHILDREN

    grower = CombGrower(*draft())
    for _ in range(depth - 1):
        grower.grow(*draft())
    return grower.finish(CHILDREN * depth)


def make_step(proposal: Proposal, depth: int, device: str, path: Path) -> Callable[[], None]:
    """Records one step, to the file and all."""
    batch, num_nodes = proposal.tokens.shape
    move = lambda part: None if part is None else part.to(device)
    shape = proposal.shape and TreeShape(*map(move, proposal.shape))
    proposal = Proposal(*map(move, (proposal.tokens, proposal.survival, proposal.probs)), shape)
    nothing = torch.zeros(batch, dtype=torch.int32, device=device)
    path_columns = None if shape is None else torch.zeros(batch, depth + 1, dtype=torch.int64, device=device)
    record = StepRecord(
        SimpleNamespace(req_pool_indices=torch.arange(batch, device=device)),
        StepPlan(depth, batch * num_nodes),
        proposal,
        make_grid(nothing, proposal, depth, num_nodes + 1),
        SimpleNamespace(verify_lens=torch.full_like(nothing, num_nodes + 1)),
        AcceptedTokens(nothing, nothing, nothing, nothing, nothing, path_columns),
        num_nodes,
    )
    config = TetrisConfig(depth, float(num_nodes), None, record=path)
    recorder = StepRecorder(
        config,
        draft="standalone",
        num_nodes=num_nodes,
        num_slots=batch,
        device=device,
    )

    def take_in() -> None:
        recorder.observe(record)
        recorder.write()

    return take_in


if __name__ == "__main__":
    typer.run(main)
