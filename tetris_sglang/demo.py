"""TETRIS beside no speculation on two real servers, in a few minutes without a GPU: `tetris-sglang demo`."""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import NamedTuple

import openai
import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from tetris_sglang.load import DraftCounts, count_drafts, flush_cache, generate, read_step_counts
from tetris_sglang.pair import PAIR, check_parts, inflate, read_prompts
from tetris_sglang.server_process import ServerFailed, ServerProcess, start_all

CONCURRENCIES = (1, 4, 8)
NUM_STEPS = 4
CAPACITY_PER_REQUEST = 3
NEW_TOKENS = 48
_STREAMED_TOKENS = 64
_QUESTION = "What does this function do?\n\ndef add(a, b):\n    return a + b"
_STEP_STYLES = ("bold green", "bold cyan")


class Run(NamedTuple):
    """One pass over the prompts on one server."""

    tokens_per_s: float
    counts: DraftCounts
    rows_per_step: float | None
    texts: list[str]


def demo(
    console: Console | None = None,
    shape: str = "cpu-100m",
    repeats: int = 3,
    pair: Path = PAIR,
    num_steps: int = NUM_STEPS,
    capacity_per_request: int = CAPACITY_PER_REQUEST,
) -> None:
    """Start SGLang with and without TETRIS, stream a completion, and compare the two.

    Args:
        console: where to draw; default: the terminal.
        shape: what the target is inflated to, for a realistic cost per pass (scripts/inflate_model.py).
        repeats: interleaved passes per server and concurrency.
        pair: folder with target/, draft/ and prompts.jsonl.
        num_steps: tokens drafted per request and step.
        capacity_per_request: of those, how many are verified on average.
    Raises:
        typer.Exit: 1 if a greedy output differs from the one without speculation, 2 if something is missing,
            130 after Ctrl-C; the servers are gone in every case.
    """
    console = console or Console()
    try:
        identical, total = _run(console, shape, repeats, Path(pair), num_steps, capacity_per_request)
    except KeyboardInterrupt:
        console.print("\nStopped; both servers are gone.")
        raise typer.Exit(130) from None
    except (ValueError, FileNotFoundError, ServerFailed) as error:
        console.print(Text.assemble(("error: ", "red"), str(error)))
        raise typer.Exit(2) from None
    if identical < total:
        raise typer.Exit(1)


def _run(
    console: Console, shape: str, repeats: int, pair: Path, num_steps: int, capacity_per_request: int
) -> tuple[int, int]:
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1, got {repeats}")
    prompts = _read_prompts(pair)
    console.rule("1. A model pair")
    console.print(
        f"A small trained target and its draft are in {_shorten(pair)}. The target is embedded exactly into "
        f"a larger architecture ({shape}): the same function at a larger model's cost.",
        highlight=False,
    )
    target = inflate(pair / "target", shape)

    console.rule("2. Two SGLang servers")
    # SGLang would serve a float32 model in float16, which few CPUs multiply fast, and which rounds so coarsely that
    # greedy ties break differently from one batch size to another.
    plain = ["--model-path", str(target), "--dtype", "float32"]
    speculative = [
        *plain,
        *("--speculative-algorithm", "TETRIS"),
        *("--speculative-draft-model-path", str(pair / "draft")),
        *("--speculative-num-steps", str(num_steps)),
        *("--speculative-tetris-capacity-per-request", str(capacity_per_request)),
    ]
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tetris-demo-")))
        servers = {
            name: ServerProcess(arguments, logs / f"{name}.log", start_timeout_s=600)
            for name, arguments in (("no speculation", plain), ("TETRIS", speculative))
        }
        for name, arguments in (("no speculation", plain), ("TETRIS", speculative)):
            command = [sys.executable, "-m", "sglang.launch_server", *arguments]
            console.print(f"[bold]{name}[/]", highlight=False)
            console.print(
                "  " + " ".join(map(_shorten, command)), soft_wrap=True, highlight=False, markup=False
            )
        _start(servers, stack, prompts, console)

        console.rule("3. TETRIS through the OpenAI API")
        console.print(
            "Each piece (one colour, or between two bars) came out of one pass of the target: the accepted "
            "drafts and one token of its own.\n",
            highlight=False,
        )
        with _awake(servers["TETRIS"]) as server:
            client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
            _stream_completion(client, prompts[0], console)
            _chat(client, console)

        console.rule("4. The same prompts on both servers")
        console.print(
            f"Greedy, {NEW_TOKENS} tokens each, {repeats} times in turn; the waiting server is frozen.",
            highlight=False,
        )
        runs = _compare(servers, prompts, repeats, console)
    return _report(runs, console)


# -- the pair ------------------------------------------------------------------------------------------------


def _read_prompts(pair: Path) -> list[str]:
    """Texts of different kinds in turn, so that the first few differ in how well they can be drafted."""
    check_parts(pair, "target/config.json", "draft/config.json")
    prompts = read_prompts(pair)
    if len(prompts) < max(CONCURRENCIES):
        raise ValueError(f"{pair / 'prompts.jsonl'} holds too few prompts: {max(CONCURRENCIES)} are needed")
    return prompts


def _shorten(argument: Path | str) -> str:
    """An argument as one would type it in a shell here: paths relative, or from the home folder."""
    text = str(argument)
    for base, prefix in ((Path.cwd(), ""), (Path.home(), "~/")):
        if text.startswith(f"{base}{os.sep}"):
            return prefix + shlex.quote(text[len(str(base)) + 1 :])
    return shlex.quote(text)


# -- the servers ---------------------------------------------------------------------------------------------


def _start(
    servers: dict[str, ServerProcess], stack: ExitStack, prompts: Sequence[str], console: Console
) -> None:
    """Start both servers at once; each is warmed up, then frozen until its turn."""

    def warm_up(server: ServerProcess) -> None:
        generate(server.url, prompts[:4], concurrency=4, max_new_tokens=16)
        server.pause()

    for server in servers.values():
        stack.callback(server.stop)
    with console.status("starting (about a minute; the first time takes longer)"):
        failures = start_all(list(servers.values()), warm_up)
    for name, failure in zip(servers, failures, strict=True):
        if failure is not None:
            raise ServerFailed(f"the server of {name} did not start: {failure}")
    console.print("Both answer.")


class _awake:
    """A server that runs inside the block and is frozen outside, so that it costs the other one nothing."""

    def __init__(self, server: ServerProcess) -> None:
        self._server = server

    def __enter__(self) -> ServerProcess:
        self._server.resume()
        return self._server

    def __exit__(self, *_) -> None:
        if self._server.is_running:
            self._server.pause()


# -- what is shown -------------------------------------------------------------------------------------------


def _stream_completion(client: openai.OpenAI, prompt: str, console: Console) -> None:
    console.print("[bold]POST /v1/completions, stream=true[/]", highlight=False)
    console.print(Text(prompt, style="dim"), end="", soft_wrap=True)
    stream = client.completions.create(
        model="default", prompt=prompt, max_tokens=_STREAMED_TOKENS, temperature=0, stream=True
    )
    bar = "" if console.color_system else "|"
    num_pieces = 0
    for chunk in stream:
        if chunk.choices and (text := chunk.choices[0].text):
            console.print(Text(bar + text, style=_STEP_STYLES[num_pieces % 2]), end="", soft_wrap=True)
            num_pieces += 1
    console.print(f"\n({_STREAMED_TOKENS} tokens in {num_pieces} pieces)\n", style="dim", highlight=False)


def _chat(client: openai.OpenAI, console: Console) -> None:
    console.print("[bold]POST /v1/chat/completions[/]", highlight=False)
    console.print(Text(_QUESTION, style="dim"), soft_wrap=True)
    answer = client.chat.completions.create(
        model="default",
        messages=[{"role": "user", "content": _QUESTION}],
        max_tokens=_STREAMED_TOKENS,
        temperature=0,
    )
    console.print(Text(answer.choices[0].message.content or "(empty)", style="bold green"), soft_wrap=True)
    console.print(
        "(A model of a few million parameters: speed is real, wisdom is not.)\n", style="dim", highlight=False
    )


def _compare(
    servers: dict[str, ServerProcess], prompts: Sequence[str], repeats: int, console: Console
) -> dict[tuple[str, int], list[Run]]:
    """Measure both servers in turn; (server, concurrency) -> one run per repeat."""
    runs: dict[tuple[str, int], list[Run]] = {(name, c): [] for name in servers for c in CONCURRENCIES}
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=repeats * len(runs))
        for repeat in range(repeats):
            names = list(servers) if repeat % 2 == 0 else list(servers)[::-1]
            for concurrency in CONCURRENCIES:
                for name in names:
                    progress.update(task, description=f"{name}, concurrency {concurrency}")
                    with _awake(servers[name]) as server:
                        runs[name, concurrency].append(_measure(server, prompts, concurrency))
                    progress.advance(task)
    return runs


def _measure(server: ServerProcess, prompts: Sequence[str], concurrency: int) -> Run:
    generate(server.url, prompts[:1], concurrency=1, max_new_tokens=4)  # wakes it up
    flush_cache(server.url)
    before = read_step_counts(server.url)
    completions, seconds = generate(
        server.url, prompts[: max(4, concurrency)], concurrency=concurrency, max_new_tokens=NEW_TOKENS
    )
    steps = read_step_counts(server.url).since(before)
    return Run(
        tokens_per_s=sum(c.meta_info["completion_tokens"] for c in completions) / seconds,
        counts=count_drafts(c.meta_info for c in completions),
        rows_per_step=steps.rows_per_step,
        texts=[c.text for c in completions],
    )


def _report(runs: dict[tuple[str, int], list[Run]], console: Console) -> tuple[int, int]:
    """Print the table; returns how many outputs are equal, of how many."""
    table = Table(
        title="TETRIS against no speculation", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False
    )
    columns = (
        "concurrency",
        "tokens/s ratio",
        "accept length",
        "success rate",
        "verified per step",
        "same text",
    )
    for column in columns:
        table.add_column(column.replace(" ", "\n", 1), justify="right", no_wrap=True)
    identical = total = 0
    for concurrency in CONCURRENCIES:
        plain, tetris = runs["no speculation", concurrency], runs["TETRIS", concurrency]
        ratios = [t.tokens_per_s / p.tokens_per_s for t, p in zip(tetris, plain, strict=True)]
        same = [
            a == b for t, p in zip(tetris, plain, strict=True) for a, b in zip(t.texts, p.texts, strict=True)
        ]
        counts = DraftCounts(*(sum(values) for values in zip(*map(_as_tuple, tetris), strict=True)))
        ratio = median(ratios)
        table.add_row(
            str(concurrency),
            Text(
                f"{ratio:.2f} ({min(ratios):.2f}..{max(ratios):.2f})"
                + (" loses" if round(ratio, 2) < 1 else ""),
                style="red" if round(ratio, 2) < 1 else "green",
            ),
            f"{counts.accept_length:.2f}",
            f"{counts.success_rate:.0%}",
            f"{median(run.rows_per_step for run in tetris):.1f}",
            f"{sum(same)} of {len(same)}",
        )
        identical, total = identical + sum(same), total + len(same)
    console.print(table)
    console.print(
        "Ratio: median and smallest..largest of the paired repeats. Accept length: tokens per request and "
        "step. Success rate: accepted of verified drafts. Verified per step: rows of one target pass, one root "
        "per request included.",
        style="dim",
        highlight=False,
    )
    style = "green" if identical == total else "bold red"
    console.print(Text(f"greedy outputs identical: {identical} of {total}", style=style))
    return identical, total


def _as_tuple(run: Run) -> tuple[int, int, int]:
    return run.counts.verify_steps, run.counts.selected, run.counts.accepted
