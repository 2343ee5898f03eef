"""What n-gram drafting costs: against a plain copy of the windows it looks at, the least that any lookup reads.

    python benchmarks/bench_ngram.py --step-ms 80

Timed as timing.py says. The texts are random with 1 / rank frequencies, full up to the context, every fourth one periodic:
matches of every length.
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
from torch import Tensor

from tetris_sglang.drafting import look_up_reference, propose_by_lookup

BATCHES = [1, 4, 16, 64, 256]
CONTEXTS = [128, 512, 2048, 8192]
VOCABULARY = 32000


def main(
    out: Out = RESULTS / "ngram.json",
    step_ms: StepMs = None,
    depth: Annotated[int, typer.Option(min=1, help="tokens drafted per branch")] = 6,
    branches: Annotated[int, typer.Option(min=1, help="of the ways timed, the one with branches")] = 4,
    max_match: Annotated[int, typer.Option(min=1, help="tokens compared at most")] = 8,
    rounds: Rounds = 9,
    round_ms: RoundMs = 2.0,
    device: Device = "cpu",
    seed: int = 0,
) -> None:
    """Time drafting for batch 1..256 and context 128..8192."""
    console = open_console()
    cells = [(batch, context) for context in CONTEXTS for batch in BATCHES]
    results = [
        measure(batch, context, depth, branches, max_match, rounds, round_ms, device, seed)
        for batch, context in track(cells, description="n-gram drafts", console=console)
    ]
    for result in results:
        result["step_share"] = share_of_step(result["chain_us"], step_ms)
    titles = {
        "chain_over_copy": "a chain over a copy of the windows",
        "branches_over_chain": f"{branches} branches over one",
        "half_over_chain": "the last half over all of the context",
        "chain_us": "microseconds for a chain",
    }
    for name, title in titles.items():
        console.print(
            draw_table(results, f"{title}; {SPREAD}", lambda cell, name=name: draw_ratio(cell[name]))
        )
    if step_ms is not None:
        console.print(draw_table(results, title_of_shares(step_ms), lambda cell: f"{cell['step_share']:.2%}"))
    provenance = describe_run(
        device, seed=seed, depth=depth, branches=branches, max_match=max_match, rounds=rounds
    )
    write_results(out, console, provenance=provenance, step_ms=step_ms, results=results)


def measure(
    batch: int,
    context: int,
    depth: int,
    branches: int,
    max_match: int,
    rounds: int,
    round_ms: float,
    device: str,
    seed: int,
) -> dict:
    history = write_texts(batch, context, seed)
    rows, lens = torch.arange(batch), torch.full((batch,), context)
    check(history, depth, branches, max_match)
    history, rows, lens = (part.to(device) for part in (history, rows, lens))
    kwargs = {"depth": depth, "max_match": max_match}
    ways: dict[str, Callable[[], object]] = {
        "chain": lambda: propose_by_lookup(history, rows, lens, **kwargs),
        "branches": lambda: propose_by_lookup(history, rows, lens, branches=branches, **kwargs),
        "half": lambda: propose_by_lookup(history, rows, lens, window=context // 2, **kwargs),
        "copy": lambda: history.index_select(0, rows),
    }
    elapsed_us = time_in_turn(ways, rounds, round_ms, device)

    def ratio(name: str, other: str) -> dict[str, float]:
        return summarise_ratio(elapsed_us[name], elapsed_us[other])

    return {
        "batch": batch,
        "context": context,
        "chain_us": summarise(elapsed_us["chain"]),
        "copy_us": summarise(elapsed_us["copy"]),
        "chain_over_copy": ratio("chain", "copy"),
        "branches_over_chain": ratio("branches", "chain"),
        "half_over_chain": ratio("half", "chain"),
    }


def write_texts(batch: int, context: int, seed: int) -> Tensor:
    """[batch, context] int32: token of rank r with frequency 1 / r, every fourth row with a period of 50."""
    generator = torch.Generator().manual_seed(seed)
    tokens = (VOCABULARY ** torch.rand(batch, context, generator=generator)).int() - 1
    tokens[::4] = tokens[::4, torch.arange(context) % 50]
    return tokens


def check(history: Tensor, depth: int, branches: int, max_match: int) -> None:
    """What is timed is what the definition says, in the first rows."""
    rows = torch.arange(min(len(history), 2))
    lens = torch.full_like(rows, history.shape[1])
    proposal = propose_by_lookup(history, rows, lens, depth=depth, branches=branches, max_match=max_match)
    for row in rows.tolist():
        expected = look_up_reference(
            history[row].tolist(), depth=depth, branches=branches, max_match=max_match
        )
        assert proposal.tokens[row].tolist() == [branch.tokens for branch in expected]


def draw_table(results: list[dict], title: str, draw_cell: Callable[[dict], str]) -> Table:
    table = make_table("batch", *(f"context {context}" for context in CONTEXTS), title=title)
    for batch in BATCHES:
        table.add_row(str(batch), *(draw_cell(result) for result in results if result["batch"] == batch))
    return table


if __name__ == "__main__":
    typer.run(main)
