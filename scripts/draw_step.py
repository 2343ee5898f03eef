#!/usr/bin/env python
"""Draw README's picture, docs/step.svg, from the step that scripts/record_step.py recorded.

.venv/bin/python scripts/draw_step.py
"""

from __future__ import annotations

import sys
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tetris_sglang.tools.explain import Node, Request, count_accepted, list_chain, read_step, select, show_chance

PICTURE = ROOT / "docs" / "step.svg"
CAPACITY_TOKENS, DEPTH = 12, 4
CELL_WIDTH, CELL_HEIGHT, GAP, TOP, LEFT = 116, 24, 6, 56, 226
ROW_HEIGHT = 2 * CELL_HEIGHT + 22
STYLE = """
text { font: 14px system-ui, sans-serif; fill: #59636e }
.right { fill: #1f883d } .wrong { fill: #bf8700 } .left { fill: none; stroke: #818b98; stroke-dasharray: 3 3 }
.verified { fill: #ffffff; font-weight: 600 }
@media (prefers-color-scheme: dark) {
text { fill: #9198a1 } .verified { fill: #ffffff } .right { fill: #238636 } .wrong { fill: #9e6a03 }
}
"""


def draw(requests: list[Request]) -> str:
    lens = select(requests, CAPACITY_TOKENS)
    num_nodes, accepted = sum(len(r.nodes) for r in requests), count_accepted(requests, lens)
    width, height = LEFT + DEPTH * (CELL_WIDTH + GAP) + 10, TOP + len(requests) * ROW_HEIGHT + 78
    described = (
        f"{len(requests)} requests drafted {num_nodes} tokens; the {CAPACITY_TOKENS} with the largest survivals of the batch "
        f"are verified, and {accepted} of them accepted."
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-labelledby="t d">',
        f'<title id="t">A recorded step</title>\n<desc id="d">{described}</desc>\n<style>{STYLE}</style>',
        write(LEFT - 16, 30, "text so far", "end"),
    ]
    parts += [write(LEFT + level * (CELL_WIDTH + GAP), 30, f"draft {level + 1}") for level in range(DEPTH)]
    for row, (request, length) in enumerate(zip(requests, lens, strict=True)):
        top = TOP + row * ROW_HEIGHT
        parts.append(write(LEFT - 16, top + 17, "\u2026" + show(request.text)[-24:], "end"))
        chain = list_chain(request)
        for number, node in enumerate(request.nodes):
            if node.depth <= DEPTH:
                x = LEFT + (node.depth - 1) * (CELL_WIDTH + GAP)
                parts += draw_node(x, top + (0 if node in chain else CELL_HEIGHT + 4), node, number < length)
    y = TOP + len(requests) * ROW_HEIGHT + 8
    legend = (
        ("right", f"verified, and accepted by the target: {accepted}"),
        ("wrong", f"verified in vain: {CAPACITY_TOKENS - accepted}"),
        ("left", f"drafted, not verified: {num_nodes - CAPACITY_TOKENS}"),
    )
    x = 20
    for kind, text in legend:
        parts += [f'<rect class="{kind}" x="{x}" y="{y}" width="14" height="14" rx="3"/>', write(x + 22, y + 12, text)]
        x += 320 if kind == "right" else 190
    explained = "%: survival, the chance that a draft and all before it are accepted. Below each token, its runner-up."
    parts.append(write(20, y + 42, explained))
    return "\n".join([*parts, "</svg>"]) + "\n"


def draw_node(x: int, y: int, node: Node, is_verified: bool) -> list[str]:
    kind = "left" if not is_verified else "right" if node.is_right else "wrong"
    style = "verified" if is_verified else ""
    return [
        f'<rect class="{kind}" x="{x}" y="{y}" width="{CELL_WIDTH}" height="{CELL_HEIGHT}" rx="5"/>',
        write(x + 8, y + 17, show(node.text)[:9], style=style),
        write(x + CELL_WIDTH - 8, y + 17, show_chance(node), "end", style),
    ]


def write(x: int, y: int, text: str, anchor: str = "start", style: str = "") -> str:
    style = f' class="{style}"' if style else ""
    return f'<text{style} x="{x}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>'


def show(text: str) -> str:
    return text.replace("\n", "\u23ce").removeprefix(" ") or "\u00b7"


if __name__ == "__main__":
    PICTURE.write_text(draw(read_step()), encoding="utf-8")
