"""What n-gram drafting costs: against a plain copy of the windows it looks at, the least that any lookup reads.

    python benchmarks/bench_ngram.py --step-ms 80

Timed as in bench_selection.py: in turn within each round, ratios within a round, median and quartiles over the
rounds; on a CPU one thread, by the CPU time it used. The texts are random with 1 / rank frequencies, full up to the
context, every fourth one periodic: matches of every length.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import typer
from bench_selection import ROOT, count_calls, describe_run, draw_ratio, name_commit, summarise, time_us
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from tetris_sglang.drafting import look_up_reference, propose_by_lookup

BATCHES = [1, 4, 16, 64, 256]
CONTEXTS = [128, 512, 2048, 8192]
VOCABULARY = 32000
RESULT = ROOT / "benchmarks/results/ngram.json"
TIMED = ["tetris_sglang/drafting", "benchmarks/bench_ngram.py"]


def main(
    out: Annotated[Path, typer.Option(help="where to write the JSON")] = RESULT,
    step_ms: Annotated[
        float | None, typer.Option(help="time of a step of the demo pair, to print drafting's share of it")
    ] = None,
    depth: Annotated[int, typer.Option(min=1, help="tokens drafted per branch")] = 6,
    branches: Annotated[int, typer.Option(min=1, help="of the ways timed, the one with branches")] = 4,
    max_match: Annotated[int, typer.Option(min=1, help="tokens compared at most")] = 8,
    rounds: Annotated[int, typer.Option(min=3, help="timing rounds per cell")] = 9,
    round_ms: Annotated[float, typer.Option(help="least time that each way runs in a round")] = 2.0,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    seed: int = 0,
) -> None:
    """Time drafting for batch 1..256 and context 128..8192."""
    if step_ms is not None and not step_ms > 0:
        raise typer.BadParameter(f"must be above 0, got {step_ms}", param_hint="--step-ms")
    torch.set_num_threads(1)
    cells = [(batch, context) for context in CONTEXTS for batch in BATCHES]
    console = Console(width=None if sys.stdout.isatty() else 110)
    results = [
        measure(batch, context, depth, branches, max_match, rounds, round_ms, device, seed)
        for batch, context in track(cells, description="n-gram drafts", console=console)
    ]
    for result in results:
        result["step_share"] = None if step_ms is None else result["chain_us"]["median"] / (1000 * step_ms)
    spread = "median ± half the spread between quartiles"
    console.print(
        draw_table(
            results, f"a chain over a copy of the windows; {spread}", lambda cell: cell["chain_over_copy"]
        ),
        draw_table(
            results, f"{branches} branches over one; {spread}", lambda cell: cell["branches_over_chain"]
        ),
        draw_table(
            results, f"the last half over all of the context; {spread}", lambda cell: cell["half_over_chain"]
        ),
        draw_table(results, f"microseconds for a chain; {spread}", lambda cell: cell["chain_us"]),
    )
    if step_ms is not None:
        title = f"share of a step of {step_ms:g} ms; holds in the rows near the batch that it was measured at"
        console.print(draw_table(results, title, lambda cell: f"{cell['step_share']:.2%}"))
    out.parent.mkdir(parents=True, exist_ok=True)
    provenance = describe_run(device, seed) | {
        "commit": name_commit(TIMED),
        "depth": depth,
        "branches": branches,
        "max_match": max_match,
        "rounds": rounds,
    }
    out.write_text(
        json.dumps({"provenance": provenance, "step_ms": step_ms, "results": results}, indent=1) + "\n"
    )
    console.print(f"written: {out}")


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
    with torch.inference_mode():
        calls = {name: count_calls(way, round_ms, device) for name, way in ways.items()}
        elapsed_us: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(rounds):
            for name, way in ways.items():
                elapsed_us[name].append(time_us(way, calls[name], device) / calls[name])

    def ratio(name: str, other: str) -> dict[str, float]:
        return summarise([mine / its for mine, its in zip(elapsed_us[name], elapsed_us[other], strict=True)])

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


def draw_table(results: list[dict], title: str, read_cell: Callable[[dict], dict | str]) -> Table:
    table = Table(
        "batch",
        *(f"context {context}" for context in CONTEXTS),
        title=title,
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
    for column in table.columns:
        column.justify, column.no_wrap = "right", True
    for batch in BATCHES:
        values = [read_cell(result) for result in results if result["batch"] == batch]
        table.add_row(
            str(batch), *(value if isinstance(value, str) else draw_ratio(value) for value in values)
        )
    return table


if __name__ == "__main__":
    typer.run(main)
