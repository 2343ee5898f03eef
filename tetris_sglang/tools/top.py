"""A running server, live in the terminal: `tetris-sglang top URL`."""

from __future__ import annotations

import select
import sys
import termios
import time
import tty
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import requests
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

_TIMEOUT_S = 10
_HISTORY = 600
"""Intervals that are kept: more than a wide terminal shows."""
_STEPS_UP = "▁▂▃▄▅▆▇█"
_ASCII_STEPS_UP = "_.-=+*#@"


class NoTetris(Exception):
    """There is no server, or none with TETRIS; the message is for users."""


class State(NamedTuple):
    """What a server has counted so far; of several schedulers, the sum."""

    time_s: float
    model: str
    draft: str
    tetris: dict[str, Any]
    """The `tetris` section of /server_info (docs/serving.md)."""


class Interval(NamedTuple):
    """What happened between two looks."""

    seconds: float
    steps: float
    requests: float
    """Per step."""
    tokens_per_s: float
    drafted: float
    """Per request of a step that drafted, as are the next two."""
    selected: float
    accepted: float
    depth: float
    """Of the last step, as is the next one."""
    capacity_tokens: float
    plain_share: float
    """Of the steps."""
    gain: float | None
    """Of speculation over plain decoding, as the server estimates it; None: its capacity is fixed."""
    reached: list[float]
    """Share of the requests in drafting steps that had a draft of each position accepted."""


def look(url: str) -> State:
    """Ask a server.

    Raises:
        NoTetris: it does not answer, or does not serve with TETRIS.
    """
    try:
        response = requests.get(f"{url}/server_info", timeout=_TIMEOUT_S)
        response.raise_for_status()
        info = response.json()
    except (requests.RequestException, ValueError) as error:
        raise NoTetris(f"{url} is no running SGLang server: {error}") from None
    found = [state["tetris"] for state in info.get("internal_states", ()) if "tetris" in state]
    if not found:
        algorithm = info.get("speculative_algorithm")
        raise NoTetris(f"{url} serves with --speculative-algorithm {algorithm}, not TETRIS")
    total = dict(found[0])
    for other in found[1:]:
        for name, value in other.items():
            total[name] = (
                [a + b for a, b in zip(total[name], value, strict=True)] if isinstance(value, list) else total[name] + value
            )
    for name in ("draft_depth", "expected_gain"):
        if name in total:
            total[name] /= len(found)
    draft = info.get("speculative_draft_model_path") or "n-grams or the target's own layers"
    return State(time.monotonic(), info.get("served_model_name") or info["model_path"], draft, total)


def compare(before: State, after: State) -> Interval:
    """What happened between two looks; after a restart of the server, since that."""

    def grew(name: str) -> float:
        then, now = before.tetris.get(name, 0), after.tetris[name]
        return now - then if now >= then else now

    seconds = max(after.time_s - before.time_s, 1e-9)
    steps, requests_seen, drafting = grew("num_steps"), grew("num_requests"), grew("num_drafting_requests")
    accepted = grew("accepted_tokens")
    then = before.tetris["accepted_at_position"]
    reached = [
        max(0, now - earlier) / drafting if drafting else 0.0
        for now, earlier in zip(after.tetris["accepted_at_position"], then, strict=True)
    ]
    return Interval(
        seconds=seconds,
        steps=steps,
        requests=requests_seen / steps if steps else 0.0,
        tokens_per_s=(requests_seen + accepted) / seconds,
        drafted=grew("drafted_tokens") / drafting if drafting else 0.0,
        selected=grew("selected_tokens") / drafting if drafting else 0.0,
        accepted=accepted / drafting if drafting else 0.0,
        depth=after.tetris["draft_depth"] if steps else 0.0,
        capacity_tokens=after.tetris["capacity_tokens"] if steps else 0.0,
        plain_share=grew("plain_steps") / steps if steps else 0.0,
        gain=after.tetris.get("expected_gain"),
        reached=reached,
    )


def draw(state: State, history: deque[Interval], console: Console) -> RenderableType:
    """The screen after the last interval of `history`."""
    now, is_ascii = history[-1], console.options.ascii_only
    width = max(20, console.width - 30)
    numbers = Table.grid(padding=(0, 3))
    numbers.add_row(
        f"[bold]{now.requests:.1f}[/] requests a step" if now.steps else "[dim]idle[/]",
        f"[bold]{now.steps / now.seconds:.1f}[/] steps/s",
        f"[bold]{now.tokens_per_s:.0f}[/] tokens/s",
        "capacity is fixed" if now.gain is None else f"[bold]{now.gain:.2f}[/] of plain decoding, estimated",
    )
    step = Table.grid(padding=(0, 2))
    step.add_row("", draw_blocks(now, width, is_ascii), "")
    step.add_row(
        "",
        Text.assemble(
            ("accepted ", "green"), f"{now.accepted:.2f}   ",
            ("verified ", "yellow"), f"{now.selected:.2f}   ",
            ("drafted ", "bright_black"), f"{now.drafted:.2f}   per request of a step that drafted",
        ),
        "",
    )  # fmt: skip
    course = Table.grid(padding=(0, 2))
    for name, unit, values in (
        ("depth", "", [i.depth for i in history]),
        ("capacity", " tokens", [i.capacity_tokens for i in history]),
        ("plain steps", "%", [100 * i.plain_share for i in history]),
        ("speed", " tokens/s", [i.tokens_per_s for i in history]),
    ):
        course.add_row(name, draw_course(values, width, is_ascii), f"{values[-1]:.0f}{unit}")
    positions = Table.grid(padding=(0, 2))
    full = "#" if is_ascii else "█"
    for position, share in enumerate(now.reached, start=1):
        positions.add_row(f"draft {position}", Text(full * round(share * width), "green"), f"{share:.0%}")
    return Group(
        Panel(numbers, title=f"{state.model}, drafts from {state.draft}", title_align="left"),
        Panel(step, title="a request's drafts", title_align="left"),
        Panel(course, title="over time", title_align="left"),
        Panel(positions, title="accepted, by position", title_align="left"),
        Text("q quits", "dim"),
    )


def draw_blocks(interval: Interval, width: int, is_ascii: bool) -> Text:
    """A request's drafts as a strip: accepted, verified, drafted."""
    accepted, rejected, unverified = "#+." if is_ascii else "█▓░"
    scale = width / interval.drafted if interval.drafted else 0.0
    ends = [round(n * scale) for n in (interval.accepted, interval.selected, interval.drafted)]
    return Text.assemble(
        (accepted * ends[0], "green"),
        (rejected * (ends[1] - ends[0]), "yellow"),
        (unverified * (ends[2] - ends[1]), "bright_black"),
    )


def draw_course(values: list[float], width: int, is_ascii: bool) -> str:
    """The last `width` values as heights from 0 to the largest."""
    shown, heights = values[-width:], _ASCII_STEPS_UP if is_ascii else _STEPS_UP
    largest = max(shown)
    if largest <= 0:
        return heights[0] * len(shown)
    return "".join(heights[min(len(heights) - 1, int(value / largest * len(heights)))] for value in shown)


def top(url: str, interval_s: float = 1.0, console: Console | None = None) -> None:
    """Show a server until q or Ctrl-C.

    Args:
        url: its address; http:// may be left out.
    Raises:
        ValueError: an interval that is not positive.
        NoTetris: no such server, at the start or later.
    """
    if interval_s <= 0:
        raise ValueError(f"interval_s must be positive, got {interval_s}")
    url = (url if "://" in url else f"http://{url}").rstrip("/")
    console, history = console or Console(), deque[Interval](maxlen=_HISTORY)
    before = look(url)
    with keys() as is_quit, Live(console=console, screen=console.is_terminal, auto_refresh=False) as live:
        while not is_quit(interval_s):
            after = look(url)
            history.append(compare(before, after))
            live.update(draw(after, history, console), refresh=True)
            before = after


@contextmanager
def keys() -> Iterator[Any]:
    """Yields a function that waits for so many seconds and tells whether q, or Ctrl-C, ended that."""
    if not sys.stdin.isatty():

        def sleep(seconds: float) -> bool:
            try:
                time.sleep(seconds)
            except KeyboardInterrupt:
                return True
            return False

        yield sleep
        return
    descriptor = sys.stdin.fileno()
    saved = termios.tcgetattr(descriptor)

    def wait(seconds: float) -> bool:
        until = time.monotonic() + seconds
        try:
            while (left := until - time.monotonic()) > 0:
                if select.select([sys.stdin], [], [], left)[0] and sys.stdin.read(1) in ("q", "Q", ""):
                    return True
        except KeyboardInterrupt:
            return True
        return False

    try:
        tty.setcbreak(descriptor)
        yield wait
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, saved)
