"""TETRIS beside no speculation and SGLang's own on three real servers, in a few minutes without a GPU: `tetris-sglang demo`."""

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

from tetris_sglang.tools.fetch import NotFetched
from tetris_sglang.tools.load import DraftCounts, count_drafts, flush_cache, generate
from tetris_sglang.tools.prompts import read_questions, render_chats
from tetris_sglang.tools.real_model import HEAD, ensure_target
from tetris_sglang.tools.server_process import ServerFailed, ServerProcess, sigterm_as_interrupt, start_all

PROMPTS_AT = {1: 3, 4: 8, 8: 16}
"""Requests in flight -> questions asked."""
MAX_NEW_TOKENS = (48, 128, 32, 96, 160, 64, 112)
"""Users' answers are of unlike lengths; all of one length would start and end together, which flatters no speculation."""
NONE, UPSTREAM, TETRIS = "no speculation", "SGLang EAGLE3, k = 1", "TETRIS"
_STREAMED_TOKENS = 160
_STREAMED = ("code-01", "explain-00")
"""Questions whose answers are shown."""
_PASS_STYLES = ("bold green", "bold cyan")


class Run(NamedTuple):
    """One pass over the prompts on one server."""

    tokens_per_s: float
    counts: DraftCounts
    texts: list[str]


def demo(
    console: Console | None = None,
    repeats: int = 2,
    model_path: str | None = None,
    draft_model_path: str | None = None,
) -> None:
    """Start SGLang with TETRIS, with its own speculation and with none; stream answers, and compare the three.

    Args:
        console: where to draw; default: the terminal.
        repeats: interleaved passes per server and load.
        model_path: a folder with a chat template; default: SmolLM2-135M-Instruct, fetched.
        draft_model_path: an EAGLE-3 head of it; default: the shipped one. Together with model_path, or neither.
    Raises:
        typer.Exit: 1 if a greedy output of TETRIS differs from the one without speculation, 2 if something is missing,
            130 after Ctrl-C; the servers are gone in every case.
        ValueError: one path without the other, or no repeats.
    """
    console = console or Console()
    if repeats < 1:
        raise ValueError(f"--repeats {repeats}: give 1 or more")
    if (model_path is None) != (draft_model_path is None):
        raise ValueError("--model-path and --draft-model-path belong together: give both, or neither")
    try:
        identical, total = _run(console, repeats, model_path, draft_model_path)
    except KeyboardInterrupt:
        console.print("\nStopped; the servers are gone.")
        raise typer.Exit(130) from None
    except (FileNotFoundError, NotFetched, ServerFailed) as error:
        console.print(Text.assemble(("error: ", "red"), str(error)))
        raise typer.Exit(2) from None
    if identical < total:
        raise typer.Exit(1)


def server_arguments(target: str, head: str) -> dict[str, list[str]]:
    """What each of the three is started with."""
    # SGLang would serve a float32 model in float16, which few CPUs multiply fast, and which rounds so coarsely that
    # greedy ties break differently from one batch size to another.
    plain = ["--model-path", target, "--dtype", "float32"]
    draft = ["--speculative-draft-model-path", head]
    # One draft, which two cores gain most with (docs/results.md).
    chain = ["--speculative-num-steps", "1", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "2"]
    return {
        NONE: plain,
        UPSTREAM: [*plain, "--speculative-algorithm", "EAGLE3", *draft, *chain],
        TETRIS: [*plain, "--speculative-algorithm", "TETRIS", *draft],
    }


def _run(console: Console, repeats: int, model_path: str | None, head: str | None) -> tuple[int, int]:
    console.rule("1. A model and a draft")
    if model_path is None:
        head = str(HEAD)
        with console.status("SmolLM2-135M-Instruct: the first time it is fetched (93 MB) and dequantised"):
            model_path = str(ensure_target())
    console.print(f"target  {_shorten(model_path)}\ndraft   {_shorten(head)}", highlight=False, soft_wrap=True)
    prompts = render_chats(model_path, [question.text for question in read_questions()])

    console.rule("2. Three SGLang servers")
    arguments = server_arguments(model_path, head)
    with sigterm_as_interrupt(), ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tetris-demo-")))
        servers = {
            name: ServerProcess(flags, logs / f"{index}.log", start_timeout_s=600)
            for index, (name, flags) in enumerate(arguments.items())
        }
        for name, flags in arguments.items():
            command = [sys.executable, "-m", "sglang.launch_server", *flags]
            console.print(f"[bold]{name}[/]", highlight=False)
            console.print("  " + " ".join(map(_shorten, command)), soft_wrap=True, highlight=False, markup=False)
        _start(servers, stack, prompts, console)

        console.rule("3. TETRIS through the OpenAI API")
        console.print(
            "Each piece (one colour, or between two bars) came out of one pass of the target: the accepted "
            "drafts and one token of its own.\n",
            highlight=False,
        )
        questions = {question.id: question.text for question in read_questions()}
        with _awake(servers[TETRIS]) as server:
            client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
            for name in _STREAMED:
                _stream_answer(client, questions[name], console)

        console.rule("4. The same questions on all three")
        console.print(
            f"Greedy, answers of at most {min(MAX_NEW_TOKENS)} to {max(MAX_NEW_TOKENS)} tokens, {repeats} times in turn; the "
            "waiting servers are frozen.",
            highlight=False,
        )
        runs = _compare(servers, prompts, repeats, console)
    return _report(runs, console)


def _shorten(argument: Path | str) -> str:
    """An argument as one would type it in a shell here: paths relative, or from the home folder."""
    text = str(argument)
    for base, prefix in ((Path.cwd(), ""), (Path.home(), "~/")):
        if text.startswith(f"{base}{os.sep}"):
            return prefix + shlex.quote(text[len(str(base)) + 1 :])
    return shlex.quote(text)


# -- the servers ---------------------------------------------------------------------------------------------


def _start(servers: dict[str, ServerProcess], stack: ExitStack, prompts: Sequence[str], console: Console) -> None:
    """Start all; each is warmed up, then frozen until its turn."""

    def warm_up(server: ServerProcess) -> None:
        generate(server.url, prompts[-4:], concurrency=4, max_new_tokens=16)
        server.pause()

    for server in servers.values():
        stack.callback(server.stop)
    with console.status("starting (a minute or two)"):
        failures = start_all(list(servers.values()), warm_up)
    for name, failure in zip(servers, failures, strict=True):
        if failure is not None:
            raise ServerFailed(f"the server of {name} did not start: {failure}")
    console.print("All answer.")


class _awake:
    """A server that runs inside the block and is frozen outside, so that it costs the others nothing."""

    def __init__(self, server: ServerProcess) -> None:
        self._server = server

    def __enter__(self) -> ServerProcess:
        self._server.resume()
        return self._server

    def __exit__(self, *_) -> None:
        if self._server.is_running:
            self._server.pause()


# -- what is shown -------------------------------------------------------------------------------------------


def _stream_answer(client: openai.OpenAI, question: str, console: Console) -> None:
    console.print("[bold]POST /v1/chat/completions, stream=true[/]", highlight=False)
    console.print(Text(question, style="dim"), soft_wrap=True)
    stream = client.chat.completions.create(
        model="default",
        messages=[{"role": "user", "content": question}],
        max_tokens=_STREAMED_TOKENS,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    bar = "" if console.color_system else "|"
    num_pieces = num_tokens = 0
    for chunk in stream:
        if chunk.choices and (text := chunk.choices[0].delta.content):
            console.print(Text(bar + text, style=_PASS_STYLES[num_pieces % 2]), end="", soft_wrap=True)
            num_pieces += 1
        if chunk.usage:
            num_tokens = chunk.usage.completion_tokens
    console.print(f"\n({num_tokens} tokens in {num_pieces} pieces)\n", style="dim", highlight=False)


def _compare(
    servers: dict[str, ServerProcess], prompts: Sequence[str], repeats: int, console: Console
) -> dict[tuple[str, int], list[Run]]:
    """Measure all servers in turn; (server, requests in flight) -> one run per repeat."""
    runs: dict[tuple[str, int], list[Run]] = {(name, c): [] for name in servers for c in PROMPTS_AT}
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=repeats * len(runs))
        for repeat in range(repeats):
            names = list(servers)[:: 1 if repeat % 2 == 0 else -1]
            for concurrency, count in PROMPTS_AT.items():
                # Others in every repeat: a cache of what was asked before helps nobody.
                asked = [prompts[(repeat * count + i) % len(prompts)] for i in range(count)]
                for name in names:
                    progress.update(task, description=f"{name}, {concurrency} in flight")
                    with _awake(servers[name]) as server:
                        runs[name, concurrency].append(_measure(server, asked, concurrency))
                    progress.advance(task)
    return runs


def _measure(server: ServerProcess, prompts: Sequence[str], concurrency: int) -> Run:
    generate(server.url, prompts[-1:], concurrency=1, max_new_tokens=4)  # wakes it up
    flush_cache(server.url)
    lengths = [MAX_NEW_TOKENS[i % len(MAX_NEW_TOKENS)] for i in range(len(prompts))]
    completions, seconds = generate(server.url, prompts, concurrency=concurrency, max_new_tokens=lengths, ignore_eos=False)
    return Run(
        tokens_per_s=sum(c.meta_info["completion_tokens"] for c in completions) / seconds,
        counts=count_drafts(c.meta_info for c in completions),
        texts=[c.text for c in completions],
    )


def _report(runs: dict[tuple[str, int], list[Run]], console: Console) -> tuple[int, int]:
    """Print the table; returns how many of TETRIS's outputs are equal to those without speculation, of how many."""
    table = Table(title="Output tokens per second", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    columns = ("in flight", "server", "tokens/s", "ratio", "accept length", "success rate", "same text")
    for column in columns:
        justify = "left" if column == "server" else "right"
        table.add_column(column.replace(" ", "\n", 1), justify=justify, no_wrap=True)
    identical = total = 0
    for name, concurrency in sorted(runs, key=lambda key: key[1]):
        plain, own = runs[NONE, concurrency], runs[name, concurrency]
        speed = f"{median(run.tokens_per_s for run in own):.1f}"
        if name == NONE:
            table.add_row(str(concurrency), name, speed, "1", "", "", "")
            continue
        ratios = [o.tokens_per_s / p.tokens_per_s for o, p in zip(own, plain, strict=True)]
        same = [a == b for o, p in zip(own, plain, strict=True) for a, b in zip(o.texts, p.texts, strict=True)]
        counts = DraftCounts(*(sum(values) for values in zip(*map(_as_tuple, own), strict=True)))
        loses = round(median(ratios), 2) < 1
        table.add_row(
            "",
            Text(name, style="bold" if name == TETRIS else ""),
            speed,
            Text(
                f"{median(ratios):.2f} ({min(ratios):.2f}..{max(ratios):.2f})" + (" loses" if loses else ""),
                style="red" if loses else "green",
            ),
            "" if counts.accept_length is None else f"{counts.accept_length:.2f}",
            "" if counts.success_rate is None else f"{counts.success_rate:.0%}",
            f"{sum(same)} of {len(same)}",
        )
        if name == TETRIS:
            identical, total = identical + sum(same), total + len(same)
    console.print(table)
    console.print(
        "Ratio: to no speculation in the same repeat, median and smallest..largest. Accept length: tokens per request and "
        "pass of the target. Success rate: accepted of verified drafts.",
        style="dim",
        highlight=False,
    )
    style = "green" if identical == total else "bold red"
    console.print(Text(f"TETRIS's greedy outputs identical: {identical} of {total}", style=style))
    return identical, total


def _as_tuple(run: Run) -> tuple[int, int, int]:
    return run.counts.verify_steps, run.counts.selected, run.counts.accepted
