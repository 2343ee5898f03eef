"""`tetris-sglang`: check, explain, replay, demo, distill, models, bench, top, simulate.

Commands import what they need when they run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tetris_sglang.tools.bench.command import bench

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
    from tetris_sglang.tools.check import find, print_json, print_table

    findings = find(context.args)
    print_json(findings) if as_json else print_table(findings)
    raise typer.Exit(int(any(finding.status == "problem" for finding in findings)))


@app.command()
def explain(
    capacity_tokens: Annotated[
        int | None, typer.Option(help="Draft tokens verified over the whole batch.", show_default="2 per request")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with a slider for the capacity instead.")] = None,
) -> None:
    """Show one recorded step of a real model: what TETRIS verified under a capacity, and what the target accepted."""
    from tetris_sglang.tools.explain import explain

    _call(explain, capacity_tokens=capacity_tokens, html=html)


@app.command()
def replay(
    files: Annotated[
        list[Path],
        typer.Argument(exists=True, dir_okay=False, help="Written by --speculative-tetris-record; .gz too."),
    ],
    capacity_per_request: Annotated[
        str | None,
        typer.Option(help="Drafts verified per step, averaged over the requests; several.", show_default="0.5,1,2,3,4"),
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(help="Shuffle the rows into batches of so many.", show_default="the recorded batches"),
    ] = None,
    repeats: Annotated[
        int | None,
        typer.Option(help="Draws of the random rule, and shuffles with --batch-size.", show_default="1"),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of the random rule and the shuffles.", show_default="0")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Also draw a figure; needs matplotlib.")] = None,
) -> None:
    """Compare selection rules on recorded steps at equal capacity: uniform, random, TETRIS, and the oracle.

    Record with everything verified (--speculative-tetris-capacity-per-request as large as what a request drafts): what
    the target would have said about a draft that was not verified is not known, and steps with such drafts are left out.
    """
    from tetris_sglang.tools.replay import replay

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
    repeats: Annotated[int | None, typer.Option(help="Passes per server and load.", show_default="2")] = None,
    model_path: Annotated[str | None, typer.Option(help="Your own target.", show_default="SmolLM2-135M-Instruct")] = None,
    draft_model_path: Annotated[str | None, typer.Option(help="An EAGLE-3 head of it.", show_default="the shipped one")] = None,
) -> None:
    """Serve a real model with TETRIS, with SGLang's own speculation and with none, and compare the three."""
    from tetris_sglang.tools.demo import demo

    _call(demo, repeats=repeats, model_path=model_path, draft_model_path=draft_model_path)


@app.command()
def distill(
    draft: Annotated[
        str, typer.Option(help="A standalone draft, a head or a DFlash draft; or a new one: eagle3, eagle, dflash.")
    ],
    out: Annotated[Path, typer.Option(help="The new draft's folder.")],
    target: Annotated[str | None, typer.Option(help="The model it drafts for.", show_default="SmolLM2-135M-Instruct")] = None,
    prompts: Annotated[
        list[Path] | None,
        typer.Option(
            help='Answered by the target: a file with a line each, {"text": "a question"}; or sharegpt, humaneval, functions, '
            "questions. Several."
        ),
    ] = None,
    traffic: Annotated[
        list[Path] | None, typer.Option(help="Recorded by a server with --speculative-tetris-record-text; several files.")
    ] = None,
    work_dir: Annotated[Path | None, typer.Option(help="Answers and checkpoints.", show_default="OUT-work")] = None,
    writer: Annotated[str | None, typer.Option(help="Who answers: target, draft or both.", show_default="target")] = None,
    divergence: Annotated[
        str | None,
        typer.Option(
            help="forward-kl, reverse-kl, jensen-shannon, total-variation or disagreement (of draws with shared noise, what is "
            "served).",
            show_default="forward-kl",
        ),
    ] = None,
    greedy_share: Annotated[
        float | None, typer.Option(help="Of the loss, for the target's likeliest token.", show_default="0.5")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Of training.", show_default="300")] = None,
    batch_tokens: Annotated[int | None, typer.Option(help="Of a step and process, padded.", show_default="2048")] = None,
    rate: Annotated[
        float | None, typer.Option(help="Of learning.", show_default="0.02 new heads, 0.005 heads, 0.0001 models")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Of a prompt and its answer.", show_default="448")] = None,
    max_texts: Annotated[int | None, typer.Option(help="Answered of the prompts.", show_default="4000")] = None,
    held_out: Annotated[int | None, typer.Option(help="Texts kept back, which judge.", show_default="64")] = None,
    chain: Annotated[int | None, typer.Option(help="Drafts in a row.", show_default="5")] = None,
    layer_ids: Annotated[
        str | None, typer.Option(help="Of the target, read by a new head.", show_default="early, in the middle, last")
    ] = None,
    vocabulary: Annotated[int | None, typer.Option(help="Tokens of a new head.", show_default="6144")] = None,
    intermediate: Annotated[
        int | None, typer.Option(help="Of a new head's feed-forward layer.", show_default="the target's")
    ] = None,
    mask_token: Annotated[str | None, typer.Option(help="Of a new DFlash draft: one that no text has.")] = None,
    steer: Annotated[bool, typer.Option("--steer", help="A standalone draft by the target's states.")] = False,
    server_flags: Annotated[str | None, typer.Option(help="For the server that answers.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of everything drawn.", show_default="0")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where an earlier call ended.")] = False,
    stop_after: Annotated[int | None, typer.Option(help="End after this step; --resume goes on.")] = None,
) -> None:
    """Make a draft better at what its target writes: prompts answered by the target, or your own recorded traffic.

    For example: tetris-sglang distill --draft eagle3 --prompts questions.jsonl --out my-head

    Several devices: torchrun --nproc-per-node 8 -m tetris_sglang distill [options]; or accelerate launch, for FSDP.
    """
    given = dict(locals())
    import shlex

    try:
        from tetris_sglang.tools.distill.command import Options, distill
    except ModuleNotFoundError as error:
        raise typer.BadParameter(f"{error}: pip install '.[distill]' in the clone") from error
    from tetris_sglang.tools.real_model import ensure_target

    given["target"] = target or str(ensure_target())
    given["work_dir"] = work_dir or out.with_name(out.name + "-work")
    given["layer_ids"] = None if layer_ids is None else [int(layer) for layer in layer_ids.split(",")]
    given["server_flags"] = None if server_flags is None else shlex.split(server_flags)
    _call(lambda **options: distill(Options(**options)), **given)


@app.command()
def models() -> None:
    """Fetch the model and the prompts that demo and bench use, and say where they are."""
    from tetris_sglang.tools.fetch import HUMAN_EVAL, SHAREGPT, NotFetched, fetch
    from tetris_sglang.tools.real_model import ensure_target

    try:
        for name, path in (
            ("SmolLM2-135M-Instruct", ensure_target),
            ("HumanEval", lambda: fetch(HUMAN_EVAL)),
            ("ShareGPT", lambda: fetch(SHAREGPT)),
        ):
            typer.echo(f"{name}: {path()}")
    except NotFetched as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None


app.command()(bench)


@app.command()
def top(
    url: Annotated[str, typer.Argument(help="The server's address, for example localhost:30000.")],
    interval_s: Annotated[float | None, typer.Option(help="Between two looks.", show_default="1")] = None,
) -> None:
    """Show a running server: what its steps draft, verify and accept, and what that gains. q quits."""
    from tetris_sglang.tools.top import NoTetris, top

    try:
        _call(top, url=url, interval_s=interval_s)
    except NoTetris as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None


@app.command()
def simulate(
    trace: Annotated[
        str | None,
        typer.Option(help="Recorded drafts; several files, separated by commas, are as many classes."),
    ] = None,
    classes: Annotated[Path | None, typer.Option(help="Instead of --trace: request classes, JSON (docs/simulate.md).")] = None,
    pass_times: Annotated[
        Path | None, typer.Option(help="What a server timed: $SGLANG_TETRIS_CACHE/pass_times/*.json.")
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(help="Instead of --pass-times: a roofline of a100, h100, h200 or l40s. Modelled, not measured."),
    ] = None,
    model_b: Annotated[float | None, typer.Option(help="Target's parameters, 1e9.", show_default="8")] = None,
    draft_b: Annotated[float | None, typer.Option(help="Draft's parameters, 1e9.", show_default="0.5")] = None,
    kv_kib_per_token: Annotated[float | None, typer.Option(help="Of the target's KV cache.", show_default="128")] = None,
    host_ms: Annotated[float | None, typer.Option(help="Host time per step.", show_default="5% of the target's pass")] = None,
    arrivals: Annotated[
        str | None,
        typer.Option(help="closed, poisson, gamma, or a file of seconds.", show_default="closed"),
    ] = None,
    users: Annotated[
        str | None, typer.Option(help="Of a closed loop, over the whole fleet.", show_default="1,4,16,64,256")
    ] = None,
    rates: Annotated[
        str | None, typer.Option(help="Requests per second, over the whole fleet.", show_default="1,2,4,8")
    ] = None,
    burstiness: Annotated[
        float | None,
        typer.Option(help="Of gamma arrivals: the gaps' deviation over their mean.", show_default="2"),
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(help="Simulated per setting.", show_default="2000, or 4 per user if that is more"),
    ] = None,
    prompt_len: Annotated[str | None, typer.Option(help="Tokens: N, LOW-HIGH or exp:MEAN.", show_default="exp:256")] = None,
    output_len: Annotated[str | None, typer.Option(help="Tokens: N, LOW-HIGH or exp:MEAN.", show_default="exp:256")] = None,
    max_running: Annotated[int | None, typer.Option(help="Requests in one replica's batch.", show_default="256")] = None,
    chunk_tokens: Annotated[int | None, typer.Option(help="Of a prefill batch.", show_default="8192")] = None,
    kv_tokens: Annotated[
        int | None,
        typer.Option(help="A replica's KV cache.", show_default="what the device holds; unlimited with --pass-times"),
    ] = None,
    replicas: Annotated[int | None, typer.Option(help="Servers behind a router.", show_default="1")] = None,
    router: Annotated[
        str | None,
        typer.Option(help="round_robin, shortest_queue or power_of_two.", show_default="power_of_two"),
    ] = None,
    policies: Annotated[
        str | None,
        typer.Option(
            help="Of none, sdK, uniformK+E, tetrisK+E, tetrisD@C, auto; hidden:POLICY drafts on a device of its own.",
            show_default="none,sd3,tetris3+1,auto",
        ),
    ] = None,
    capacities: Annotated[str | None, typer.Option(help="What capacity is worth: C / batch, with the deepest drafts.")] = None,
    slo_e2e_ms: Annotated[float | None, typer.Option(help="What a fleet saves: replicas for this 99th percentile.")] = None,
    slo_tpot_ms: Annotated[float | None, typer.Option(help="As --slo-e2e-ms, but per token after the first.")] = None,
    max_replicas: Annotated[int | None, typer.Option(help="How far that search goes.", show_default="64")] = None,
    threads: Annotated[int | None, typer.Option(help="Settings simulated at once.", show_default="all cores")] = None,
    seed: Annotated[int | None, typer.Option(help="Of everything drawn.", show_default="0")] = None,
    as_json: Annotated[Path | None, typer.Option("--json", help="Also write JSON.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Also draw gain and tail latency by load.")] = None,
) -> None:
    """Simulate serving from recorded drafts and timed passes: where speculation pays, and what a fleet saves.

    For example: tetris-sglang simulate --trace drafts.trace.gz --device h100 --users 1,16,256,4096 --max-running 4096
    """
    options = dict(locals())
    try:
        from tetris_sglang.tools.simulate.command import simulate
    except ModuleNotFoundError as error:
        raise typer.BadParameter(f"{error}: SGLang brings numba, pip install numba does, too") from error

    _call(simulate, **options)


def _call(command, **options) -> None:
    """Call `command` with the options that were given; a ValueError of its becomes a usage error."""
    try:
        command(**{name: value for name, value in options.items() if value is not None})
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def main() -> None:
    app(prog_name="tetris-sglang")
