"""README's picture is the recorded step."""

from __future__ import annotations

import re

import pytest

from scripts.draw_step import CAPACITY_TOKENS, DEPTH, PICTURE, draw
from tetris_sglang.tools.explain import read_step, select


@pytest.fixture(scope="module")
def picture() -> str:
    return draw(read_step())


def test_it_is_the_one_in_the_docs(picture):
    assert PICTURE.read_text(encoding="utf-8") == picture, "run scripts/draw_step.py"


def test_marks_are_the_selection_and_what_the_target_accepted(picture):
    requests, found = read_step(), dict.fromkeys(("right", "wrong", "left"), 0)
    for request, length in zip(requests, select(requests, CAPACITY_TOKENS), strict=True):
        for number, node in enumerate(request.nodes):
            if node.depth <= DEPTH:
                found["left" if number >= length else "right" if node.is_right else "wrong"] += 1
    drawn = {kind: picture.count(f'<rect class="{kind}"') - 1 for kind in found}  # one each in the legend
    assert drawn == found and found["right"] + found["wrong"] == CAPACITY_TOKENS
    accepted, in_vain, left = (int(number) for number in re.findall(r": (\d+)</text>", picture))
    assert (accepted, in_vain) == (found["right"], found["wrong"])
    assert accepted + in_vain + left == sum(len(request.nodes) for request in requests)
