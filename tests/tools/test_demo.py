"""What the demo prints of its runs, and what it starts."""

import io

from rich.console import Console

from tetris_sglang.tools.demo import NONE, PROMPTS_AT, TETRIS, UPSTREAM, Run, _report, server_arguments
from tetris_sglang.tools.load import DraftCounts


def make_runs(speeds: dict[str, float], texts: dict[str, list[str]]) -> dict:
    counts = DraftCounts(100, 300, 80)
    return {
        (name, load): [Run(load * speed, counts, texts.get(name, ["a", "b"]))] * 2
        for name, speed in speeds.items()
        for load in PROMPTS_AT
    }


def test_what_loses_is_printed_as_losing_and_only_own_outputs_are_counted():
    printed = io.StringIO()
    runs = make_runs({NONE: 10.0, UPSTREAM: 9.0, TETRIS: 12.0}, {UPSTREAM: ["a", "other"]})
    assert _report(runs, Console(file=printed, width=120)) == (4 * len(PROMPTS_AT), 4 * len(PROMPTS_AT))
    lines = printed.getvalue().splitlines()
    (upstream, *_) = [line for line in lines if UPSTREAM in line]
    (ours, *_) = [line for line in lines if line.strip().startswith(TETRIS) and "(" in line]
    assert "0.90 (0.90..0.90) loses" in upstream and "2 of 4" in upstream
    assert "1.20 (1.20..1.20) " in ours and "loses" not in ours and "1.80" in ours and "27%" in ours


def test_a_differing_output_of_ours_is_counted():
    runs = make_runs({NONE: 10.0, UPSTREAM: 9.0, TETRIS: 12.0}, {TETRIS: ["a", "other"]})
    assert _report(runs, Console(file=io.StringIO())) == (2 * len(PROMPTS_AT), 4 * len(PROMPTS_AT))


def test_three_servers_differ_in_their_speculation_alone():
    arguments = server_arguments("target", "head")
    assert list(arguments) == [NONE, UPSTREAM, TETRIS]
    plain = arguments[NONE]
    assert all(flags[: len(plain)] == plain for flags in arguments.values())
    assert all("head" in arguments[name] for name in (UPSTREAM, TETRIS))
