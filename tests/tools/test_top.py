"""The arithmetic and the drawing of `tetris-sglang top`; tests/e2e/test_monitoring.py has a terminal and a server."""

from __future__ import annotations

import io
from collections import deque

import pytest
from rich.console import Console

from tetris_sglang.tools.top import NoTetris, State, compare, draw, draw_blocks, draw_course, look, top

ZERO = {
    "num_steps": 0, "plain_steps": 0, "num_requests": 0, "num_drafting_requests": 0, "drafted_tokens": 0, "selected_tokens": 0,
    "accepted_tokens": 0, "accepted_at_position": [0, 0, 0], "draft_depth": 0, "capacity_tokens": 0,
}  # fmt: skip
BUSY = ZERO | {
    "num_steps": 10, "plain_steps": 5, "num_requests": 40, "num_drafting_requests": 20, "drafted_tokens": 60,
    "selected_tokens": 30, "accepted_tokens": 15, "accepted_at_position": [10, 4, 1], "draft_depth": 3, "capacity_tokens": 6,
    "expected_gain": 1.25,
}  # fmt: skip


def state(time_s: float, counts: dict) -> State:
    return State(time_s, "target", "draft", counts)


def test_an_interval_is_what_was_counted_in_it():
    interval = compare(state(1, ZERO), state(3, BUSY))
    assert interval.requests == 4 and interval.tokens_per_s == 55 / 2 and interval.plain_share == 0.5
    assert (interval.drafted, interval.selected, interval.accepted) == (3, 1.5, 0.75)
    assert interval.reached == [0.5, 0.2, 0.05] and interval.gain == 1.25
    idle = compare(state(3, BUSY), state(4, BUSY))
    assert idle.steps == idle.requests == idle.tokens_per_s == idle.depth == 0 and idle.reached == [0, 0, 0]


def test_a_server_that_started_anew_counts_from_nothing():
    assert compare(state(1, BUSY | {"num_steps": 99, "num_requests": 999}), state(2, BUSY)).requests == 4


def test_blocks_are_as_long_as_what_they_count():
    strip = draw_blocks(compare(state(1, ZERO), state(3, BUSY)), 40, is_ascii=False).plain
    assert strip == "█" * 10 + "▓" * 10 + "░" * 20
    assert draw_blocks(compare(state(3, BUSY), state(4, BUSY)), 40, is_ascii=True).plain == ""


def test_a_course_ends_with_the_last_value():
    assert draw_course([0.0, 1.0, 2.0, 4.0], 3, is_ascii=False) == "▃▅█"
    assert draw_course([0.0, 0.0], 10, is_ascii=True) == "__"


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_a_screen_fits_its_terminal(encoding):
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(file=stream, width=100)
    console.print(draw(state(3, BUSY), deque([compare(state(1, ZERO), state(3, BUSY))]), console))
    stream.seek(0)
    lines = stream.read().splitlines()
    assert max(map(len, lines)) <= 100 and len(lines) < 30
    assert any("1.25 of plain decoding" in line for line in lines)


def test_who_does_not_answer_is_named():
    with pytest.raises(NoTetris, match="127.0.0.1:9 is no running SGLang server"):
        look("http://127.0.0.1:9")
    with pytest.raises(ValueError, match="interval_s"):
        top("127.0.0.1:9", interval_s=0)
