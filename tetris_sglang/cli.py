"""`tetris-sglang`: check, explain, replay, demo, bench. Commands import what they need when they run, so `--help` is quick."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tetris_sglang.bench.command import bench

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="TETRIS batch-wide optimal speculative decoding as a plugin for stock SGLang.",
)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def check(
    context: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Say what is installed, and what would stop TETRIS from starting.

    Takes the arguments of `sglang serve`, for example --model-path, --speculative-draft-model-path,
    --speculative-num-steps, and resolves them as a server would, without loading weights. Exits with 1 if something
    would stop TETRIS.
    """
    from tetris_sglang.check import find, print_json, print_table

    findings = find(context.args)
    print_json(findings) if as_json else print_table(findings)
    raise typer.Exit(int(any(finding.status == "problem" for finding in findings)))


@app.command()
def explain(
    batch_size: Annotated[int | None, typer.Option(help="Running requests.", show_default="5")] = None,
    max_draft: Annotated[
        int | None, typer.Option(help="Tokens drafted per request.", show_default="6")
    ] = None,
    capacity_tokens: Annotated[
        int | None,
        typer.Option(help="Draft tokens verified over the whole batch.", show_default="2 per request"),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of the invented probabilities.", show_default="0")] = None,
    trees: Annotated[bool, typer.Option("--trees", help="Draw draft trees instead of chains.")] = False,
) -> None:
    """Draw one selection: which draft tokens TETRIS verifies under a capacity, and which uniform speculation does."""
    from tetris_sglang.explain import explain, explain_trees

    if trees:
        if batch_size is not None or max_draft is not None:
            raise typer.BadParameter("--trees draws a given batch: leave out --batch-size and --max-draft")
        _call(explain_trees, capacity_tokens=capacity_tokens, seed=seed)
        return
    _call(explain, batch_size=batch_size, max_draft=max_draft, capacity_tokens=capacity_tokens, seed=seed)


@app.command()
def replay(
    files: Annotated[
        list[Path],
        typer.Argument(exists=True, dir_okay=False, help="Written by --speculative-tetris-record; .gz too."),
    ],
    capacity_per_request: Annotated[
        str | None,
        typer.Option(
            help="Drafts verified per step, averaged over the requests; several.", show_default="0.5,1,2,3,4"
        ),
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(help="Shuffle the rows into batches of so many.", show_default="the recorded batches"),
    ] = None,
    repeats: Annotated[
        int | None, typer.Option(help="Draws of the random rule, and shuffles.", show_default="3")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of those.", show_default="0")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Also draw a figure; needs matplotlib.")] = None,
) -> None:
    """Compare selection rules on recorded steps at equal capacity: uniform, random, TETRIS, and the oracle.

    Record with everything verified (--speculative-tetris-capacity-per-request as large as what a request drafts): what
    the target would have said about a draft that was not verified is not known, and steps with such drafts are left out.
    """
    from tetris_sglang.replay import replay

    _call(
        replay,
        files=files,
        capacities=capacity_per_request,
        batch_size=batch_size,
        repeats=repeats,
        seed=seed,
        as_json=as_json,
        plot=plot,
    )


@app.command()
def demo(
    shape: Annotated[
        str | None, typer.Option(help="What the trained target is inflated to.", show_default="cpu-100m")
    ] = None,
    repeats: Annotated[
        int | None, typer.Option(help="Passes per server and concurrency.", show_default="3")
    ] = None,
    num_steps: Annotated[
        int | None, typer.Option(help="Tokens drafted per request.", show_default="4")
    ] = None,
    capacity_per_request: Annotated[
        int | None, typer.Option(help="Of those, verified on average.", show_default="3")
    ] = None,
) -> None:
    """Serve the shipped model pair with TETRIS and without speculation, and compare the two."""
    from tetris_sglang.demo import demo

    _call(demo, shape=shape, repeats=repeats, num_steps=num_steps, capacity_per_request=capacity_per_request)


app.command()(bench)


def _call(command, **options) -> None:
    """Call `command` with the options that were given; a ValueError of its becomes a usage error."""
    try:
        command(**{name: value for name, value in options.items() if value is not None})
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def main() -> None:
    app(prog_name="tetris-sglang")
