"""Times of passes that are kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from tetris_sglang.capacity import PassTimes
from tetris_sglang.runtime.planning import pass_timing
from tetris_sglang.runtime.ranks import Ranks


def test_times_that_cannot_be_kept_are_taken_anew(monkeypatch, tmp_path, caplog):
    """A read-only file system, or another user's folder, is no reason not to serve."""
    timed, no_folder = PassTimes({1: 1e-2}, {1: 1e-3}, {1: 1e-3}), tmp_path / "file"
    no_folder.write_text("")
    monkeypatch.setattr(pass_timing, "_cache_path", lambda *_: no_folder / "times.json")
    monkeypatch.setattr(pass_timing, "time_passes", lambda *_, **__: timed)
    assert pass_timing.load_or_time_passes(None, None, num_draft_tokens=3, max_rows=8, ranks=Ranks()) is timed
    assert "cannot be kept" in caplog.text and "SGLANG_TETRIS_CACHE" in caplog.text


def test_small_sizes_of_all_kinds_come_before_large_ones(monkeypatch):
    """A pool for many requests has passes of seconds, which few steps need: they must not use up the time of the others."""
    now, runs = 0.0, Counter()
    monkeypatch.setattr(pass_timing.time, "perf_counter", lambda: now)

    def make_pass(key: tuple[str, int]) -> Callable[[], None]:
        def run() -> None:
            nonlocal now
            now += key[1] * (0.01 if key[0] == "target" else 0.001)
            runs[key] += 1

        return run

    sizes = [2**i for i in range(11)]
    passes = {(kind, size): make_pass((kind, size)) for kind in ("target", "window", "draft") for size in sizes}
    best = pass_timing._time_in_turns(passes, "cpu", Ranks())
    for kind in ("target", "window", "draft"):
        assert [runs[kind, size] >= pass_timing._ROUNDS for size in (1, 2, 16, 32)] == 4 * [True]
    assert best["target", 32] == pytest.approx(0.32) and best["window", 32] == pytest.approx(0.032)
    assert ("target", 1024) not in best
    assert now < pass_timing._BUDGET_S + 2 * 10.24
