"""What recording costs a step, on and off.

    python benchmarks/bench_recording.py --step-ms 80

Timed as in bench_selection.py: in turn within each round, median and quartiles over the rounds; on a CPU one thread, by
the CPU time it used. `off` is all that a step does without a recorder: it asks twice whether there is one.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Annotated

import torch
import typer
from bench_selection import ROOT, describe_run, name_commit, summarise, time_in_turn
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

from tetris_sglang.config import TetrisConfig
from tetris_sglang.drafting import TreeGrower, make_grid
from tetris_sglang.drafting.proposal import Proposal
from tetris_sglang.kernels.reference import AcceptedTokens
from tetris_sglang.runtime.recording import StepRecorder

BATCHES = [1, 4, 16, 64, 256]
BRANCHES = 3
RESULT = ROOT / "benchmarks/results/recording.json"
TIMED = ["tetris_sglang/runtime/recording.py", "tetris_sglang/runtime/learning.py", "tetris_sglang/drafting",
         "tetris_sglang/trace.py", "benchmarks/bench_recording.py"]  # fmt: skip
PARTS = ["chains", "trees", "off"]


def main(
    out: Annotated[Path, typer.Option(help="where to write the JSON")] = RESULT,
    step_ms: Annotated[float, typer.Option(help="time of a step, to print recording's share of it")] = 80.0,
    depth: Annotated[int, typer.Option(min=1, help="levels drafted per request")] = 6,
    rounds: Annotated[int, typer.Option(min=3, help="timing rounds per cell")] = 15,
    round_ms: Annotated[float, typer.Option(help="least time that each part runs in a round")] = 2.0,
    device: Annotated[str, typer.Option(help="cpu or cuda: where drafts are")] = "cpu",
    seed: int = 0,
) -> None:
    """Time recording for batch 1..256; the file goes to the folder for temporary files."""
    torch.set_num_threads(1)
    console = Console(width=None if sys.stdout.isatty() else 110)
    results = [
        measure(batch, depth, rounds, round_ms, device, seed)
        for batch in track(BATCHES, description="recording", console=console)
    ]
    table = Table(
        "batch", *(f"{part}, us" for part in PARTS), f"chains, of {step_ms:g} ms", box=box.SIMPLE_HEAD
    )
    for result in results:
        cells = (f"{result[f'{part}_us']['median']:.3g}" for part in PARTS)
        table.add_row(str(result["batch"]), *cells, f"{result['chains_us']['median'] / (10 * step_ms):.2f}%")
    console.print(table)
    out.parent.mkdir(parents=True, exist_ok=True)
    provenance = describe_run(device, seed) | {"commit": name_commit(TIMED), "depth": depth, "rounds": rounds}
    out.write_text(json.dumps({"provenance": provenance, "results": results}, indent=1) + "\n")
    console.print(f"written: {out}")


def measure(batch: int, depth: int, rounds: int, round_ms: float, device: str, seed: int) -> dict:
    torch.manual_seed(seed)
    worker = SimpleNamespace(recorder=None)

    def off() -> None:
        for _ in range(2):
            if worker.recorder is not None:
                raise AssertionError

    with TemporaryDirectory() as folder:
        parts = {
            "chains": make_step(draft_chains(batch, depth), depth, device, Path(folder) / "chains"),
            "trees": make_step(draft_trees(batch, depth), depth, device, Path(folder) / "trees"),
            "off": off,
        }
        elapsed_us = time_in_turn(parts, rounds, round_ms, device)
    return {"batch": batch, **{f"{name}_us": summarise(samples) for name, samples in elapsed_us.items()}}


def draft_chains(batch: int, depth: int) -> Proposal:
    probs = torch.rand(batch, depth)
    return Proposal(torch.randint(0, 2048, (batch, depth)), probs, None, probs)


def draft_trees(batch: int, depth: int) -> Proposal:
    def draft(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randint(0, 2048, shape), torch.rand(shape) / BRANCHES

    grower = TreeGrower(*draft(batch, BRANCHES))
    for _ in range(depth - 1):
        grower.grow(*draft(batch, BRANCHES, BRANCHES))
    return grower.finish(BRANCHES * depth)


def make_step(proposal: Proposal, depth: int, device: str, path: Path) -> Callable[[], None]:
    """Records one step, to the file and all."""
    batch, num_nodes = proposal.tokens.shape
    move = lambda part: None if part is None else part.to(device)
    shape = proposal.shape and type(proposal.shape)(*map(move, proposal.shape))
    proposal = Proposal(*map(move, (proposal.tokens, proposal.scores)), shape, move(proposal.probs))
    grid = make_grid(torch.zeros(batch, device=device), proposal, depth, num_nodes + 1)
    nothing = torch.zeros(batch, dtype=torch.int32, device=device)
    path_columns = None if shape is None else torch.zeros(batch, depth + 1, dtype=torch.int64, device=device)
    accepted = AcceptedTokens(nothing, nothing, nothing, nothing, nothing, path_columns)
    verify_lens, slots = torch.full_like(nothing, num_nodes + 1), torch.arange(batch, device=device)
    config = TetrisConfig(depth, float(num_nodes), None, record=path)
    recorder = StepRecorder(
        config, draft="standalone", topk=1, num_nodes=num_nodes, num_slots=batch, device=device
    )

    def record() -> None:
        recorder.add(proposal, grid, accepted, verify_lens, slots)
        recorder.write()

    return record


if __name__ == "__main__":
    typer.run(main)
