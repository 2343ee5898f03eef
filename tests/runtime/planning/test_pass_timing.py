"""Times of passes that are kept."""

from __future__ import annotations

from tetris_sglang.capacity import (
    PassTimes,
)
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
