"""The drawing tells the truth: its marks are the selection, and its numbers follow from them."""

import itertools
import re
from io import StringIO

import pytest
import torch
from rich.console import Console

from tetris_sglang.selection import select_prefixes, select_uniform, survival_from_probs
from tetris_sglang.tools.explain import (
    TREE_EXAMPLES,
    draw_selection,
    explain,
    explain_trees,
    invent_survival,
    list_nodes,
)


def draw(call, *args, width=80, **options):
    """What a pipe sees: no colour, `width` columns."""
    output = StringIO()
    call(*args, console=Console(file=output, width=width, force_terminal=False), **options)
    return output.getvalue()


def read_marks(picture, max_draft):
    """Per request: marked tokens, each mark's position, and both strips' lengths."""
    strips = re.findall(rf"([■·]{{{max_draft}}})\s+([■·]{{{max_draft}}})\s*$", picture, re.MULTILINE)
    survival_lines = [line for line in picture.splitlines() if len(re.findall(r"\d+%", line)) == max_draft]
    marked = [[bool(check) for check in re.findall(r"(✓ )?\d+%", line)] for line in survival_lines]
    return marked, [[strip.count("■") for strip in pair] for pair in strips]


@pytest.mark.parametrize("batch, max_draft, capacity, width", [(5, 6, 10, 80), (8, 8, 20, 80), (3, 2, 1, 40), (11, 4, 99, 200)])
def test_marks_are_the_selection(batch, max_draft, capacity, width):
    survival = invent_survival(batch, max_draft, seed=3)
    chosen = select_prefixes(survival, capacity).tolist()
    uniform = select_uniform(survival, capacity).tolist()
    picture = draw(explain, batch, max_draft, capacity, seed=3, width=width)
    marked, strips = read_marks(picture, max_draft)
    assert marked == [[depth < length for depth in range(max_draft)] for length in chosen]
    assert strips == [list(pair) for pair in zip(chosen, uniform, strict=True)]


def test_totals_follow_from_the_marks():
    survival = survival_from_probs(torch.tensor([[0.9, 0.8], [0.4, 0.5]]))
    picture = draw(draw_selection, survival, 2)
    assert "no speculation   2.00 tokens per step" in picture
    assert "uniform          3.30 tokens per step: 1.30 of 2 verified accepted (65%)" in picture
    assert "TETRIS           3.62 tokens per step: 1.62 of 2 verified accepted (81%)" in picture


def test_same_seed_same_picture():
    assert draw(explain, seed=1) == draw(explain, seed=1) != draw(explain, seed=2)


def test_default_fits_a_terminal_of_80_columns_and_has_no_colour_codes_in_a_pipe():
    picture = draw(explain)
    assert max(len(line.rstrip()) for line in picture.splitlines()) <= 80
    assert "\x1b" not in picture and "…" not in picture


def test_ascii_output_needs_no_other_character():
    class AsciiFile(StringIO):
        encoding = "ascii"

    output = AsciiFile()
    explain(console=Console(file=output, width=80))
    output.getvalue().encode("ascii")
    assert output.getvalue().count("* ") >= 10


@pytest.mark.parametrize(
    "options, message",
    [
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"max_draft": 0}, "max_draft must be 1..8, the depth of the examples, got 0"),
        ({"max_draft": 9}, "max_draft must be 1..8"),
        ({"capacity_tokens": 0}, "capacity_tokens must be at least 1, got 0"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        explain(**options)


@pytest.mark.parametrize("capacity", [1, 7, 12, 99])
def test_marked_nodes_are_the_best_of_the_batch_and_never_without_their_parents(capacity):
    generator = torch.Generator().manual_seed(3)
    forest = [list_nodes(children, generator) for _, children in TREE_EXAMPLES]
    picture = draw(explain_trees, capacity, seed=3)
    ranked = sorted((node.survival for nodes in forest for node in nodes), reverse=True)[:capacity]
    marked = [int(percent) for percent in re.findall(r"✓ \S+  (\d+)%", picture)]
    assert sorted(marked, reverse=True) == [round(100 * survival) for survival in ranked]
    for block in re.split(r"\n(?=\S)", picture):
        # Of two lines, the deeper one directly below an unmarked one is unmarked, too.
        lines = [(len(line) - len(line.lstrip("│├└─ ")), "✓" in line) for line in block.splitlines()[1:]]
        for (depth, is_marked), (next_depth, next_is_marked) in itertools.pairwise(lines):
            assert not (next_depth > depth and next_is_marked and not is_marked)
    expected = len(forest) + sum(ranked)
    assert re.search(rf"TETRIS, trees +{expected:.2f} tokens per step", picture)


def test_trees_need_a_capacity():
    with pytest.raises(ValueError, match="capacity_tokens must be at least 1, got 0"):
        explain_trees(0)
