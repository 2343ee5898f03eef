"""Shows one recorded step, so that the idea of TETRIS is seen in ten seconds: `tetris-sglang explain`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import torch
from rich import box
from rich.console import Console
from rich.segment import Segments
from rich.table import Table
from rich.text import Text

from tetris_sglang.selection import select_prefixes, select_uniform

STEP_PATH = Path(__file__).parents[1] / "data" / "step.json"
"""What scripts/record_step.py recorded."""
PAGE_PATH = STEP_PATH.with_name("explain.html")
_DATA = "/*STEP*/null"
"""Stands for the step in the page."""
_NARROW = 12
"""Columns of a token."""


class Node(NamedTuple):
    """One drafted token."""

    text: str
    survival: float
    parent: int
    """Number of the parent among the request's nodes, from 1; 0: the root."""
    depth: int
    is_right: bool
    """The target's own text goes on through it."""


class Request(NamedTuple):
    text: str
    """The end of what is written."""
    nodes: list[Node]
    """By falling survival, parents before children."""
    next: str
    """The target's own token behind the right nodes."""


def read_step(path: Path = STEP_PATH) -> list[Request]:
    step = json.loads(path.read_text(encoding="utf-8"))
    return [Request(r["text"], [Node(**node) for node in r["nodes"]], r["next"]) for r in step["requests"]]


def explain(capacity_tokens: int | None = None, html: Path | None = None, console: Console | None = None) -> None:
    """Draw what TETRIS verified of a recorded step, and what the target accepted of that.

    Args:
        capacity_tokens: draft tokens verified over the whole batch, >= 0; default: 2 per request.
        html: write a page with a slider for the capacity there instead.
        console: where to draw; default: the terminal.
    Raises:
        ValueError: a negative capacity.
        OSError: the page cannot be written.
    """
    console, requests = console or Console(), read_step()
    if capacity_tokens is None:
        capacity_tokens = 2 * len(requests)
    if capacity_tokens < 0:
        raise ValueError(f"capacity_tokens must be at least 0, got {capacity_tokens}")
    if html is not None:
        html.write_text(make_page(capacity_tokens), encoding="utf-8")
        console.print(f"{html}: open it in a browser", highlight=False, soft_wrap=True)
        return
    draw(requests, capacity_tokens, console)


def make_page(capacity_tokens: int) -> str:
    """The step as one page of HTML that needs nothing else."""
    page, step = PAGE_PATH.read_text(encoding="utf-8"), json.loads(STEP_PATH.read_text(encoding="utf-8"))
    step["capacity_tokens"] = capacity_tokens
    # Within a script element no text may end it.
    return page.replace(_DATA, json.dumps(step, ensure_ascii=False).replace("</", "<\\/"))


def select(requests: list[Request], capacity_tokens: int) -> list[int]:
    """How many of each request's first nodes TETRIS verifies."""
    survival = torch.zeros(len(requests), max(len(request.nodes) for request in requests))
    for row, request in enumerate(requests):
        survival[row, : len(request.nodes)] = torch.tensor([node.survival for node in request.nodes])
    return select_prefixes(survival, min(capacity_tokens, survival.numel())).tolist()


def list_chain(request: Request) -> list[Node]:
    """The likeliest node of every level, which the draft went on from."""
    parents = {node.parent for node in request.nodes}
    chain, last = [], 0
    while children := [number for number, node in enumerate(request.nodes, start=1) if node.parent == last]:
        last = next((number for number in children if number in parents), children[0])
        chain.append(request.nodes[last - 1])
    return chain


def count_uniform(requests: list[Request], capacity_tokens: int) -> int:
    """Drafts that are accepted where every request has as many of its chain verified as the others."""
    chains = [list_chain(request) for request in requests]
    shape = torch.zeros(len(chains), max(map(len, chains)))
    lens = select_uniform(shape, min(capacity_tokens, shape.numel())).tolist()
    return sum(
        next((i for i, node in enumerate(chain[:length]) if not node.is_right), min(length, len(chain)))
        for chain, length in zip(chains, lens, strict=True)
    )


def count_accepted(requests: list[Request], lens: list[int]) -> int:
    """Drafts that are accepted where `lens` of each request's first nodes are verified."""
    return sum(node.is_right for request, length in zip(requests, lens, strict=True) for node in request.nodes[:length])


def show_chance(node: Node) -> str:
    return "<1%" if node.survival < 0.01 else f"{node.survival:.0%}"


def draw(requests: list[Request], capacity_tokens: int, console: Console) -> None:
    """Colour only adds: marks alone carry the picture."""
    right, wrong = ("+", "x") if console.options.ascii_only else ("✓", "✗")
    lens = select(requests, capacity_tokens)
    num_nodes, depth = sum(len(r.nodes) for r in requests), max(node.depth for r in requests for node in r.nodes)
    console.print(
        f"{len(requests)} requests drafted {num_nodes} tokens; {min(capacity_tokens, num_nodes)} of them may be verified.",
        highlight=False,
    )
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("text so far", no_wrap=True, justify="right")
    for level in range(1, depth + 1):
        table.add_column(f"draft {level}", no_wrap=True)
    for request, length in zip(requests, lens, strict=True):
        chain = list_chain(request)
        cells: list[list[Text]] = [[] for _ in range(depth)]
        for number, node in enumerate(request.nodes):
            mark = "" if number >= length else right if node.is_right else wrong
            style = "dim" if not mark else "bold green" if node.is_right else "yellow"
            token = Text(_show(node.text, console), style)
            token.truncate(_NARROW)
            chance = show_chance(node)
            token.append(f"\n{mark} {chance}" if mark else f"\n{chance}")
            cell = cells[node.depth - 1]
            cell.insert(0 if node in chain else len(cell), token)
        text = Text(_show_text(request.text, console)[-18:])
        table.add_row(text, *[Text("\n").join(cell) for cell in cells], end_section=True)
    # Wider than a pipe's 80 columns if need be: a cut or folded mark would tell a lie.
    wide = console.options.update(width=10_000)
    width = max(console.width, table.__rich_measure__(console, wide).maximum)
    console.print(Segments(console.render(table, wide.update(width=width))), end="", crop=False, soft_wrap=True)
    console.print(
        "%: a token's survival, the chance that it and all before it are accepted. Below a token stands its runner-up.\n"
        f"{right} verified, and accepted by the target; {wrong} verified in vain. TETRIS verifies the likeliest of the batch.\n"
        "Behind its accepted drafts every request emits one token of the target's own.\n",
        highlight=False,
    )
    accepted = count_accepted(requests, lens)
    console.print(f"no speculation {len(requests):3} tokens in a pass of the target", highlight=False)
    for name, count in (("uniform", count_uniform(requests, capacity_tokens)), ("TETRIS", accepted)):
        line = f"{name:<14} {len(requests) + count:3} tokens: {count} of {sum(lens)} verified drafts accepted"
        console.print(line, style="bold" if name == "TETRIS" else None, highlight=False)


def _show(text: str, console: Console) -> str:
    """White space as marks, but for the space that most tokens begin with."""
    space = "_" if console.options.ascii_only else "·"
    return _show_text(text.removeprefix(" ").replace(" ", space) or space, console)


def _show_text(text: str, console: Console) -> str:
    text = text.replace("\n", "/" if console.options.ascii_only else "⏎")
    return text.encode("ascii", "replace").decode() if console.options.ascii_only else text
