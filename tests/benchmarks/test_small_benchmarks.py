"""The benchmarks that need no server run, and write figures that say where they come from."""

import importlib
import json
import math
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SMALL = {
    "selection": {"BATCHES": [4], "DEPTHS": [2]},
    "calibration": {"BATCHES": [4]},
    "matches": {"BATCHES": [4]},
    "planning": {"BATCHES": [4]},
    "noise": {"ROWS": [4], "VOCABULARIES": [50]},
}


@pytest.fixture(params=SMALL)
def name(request) -> str:
    return request.param


def test_figures_are_positive_and_ordered_and_say_where_they_come_from(name, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    bench = importlib.import_module(f"bench_{name}")
    for constant, value in SMALL[name].items():
        monkeypatch.setattr(bench, constant, value)
    monkeypatch.setattr(sys, "argv", [str(BENCHMARKS / f"bench_{name}.py"), "--seed", "3"])
    out = tmp_path / "new" / "figures.json"
    bench.main(out=out, step_ms=80.0, rounds=3, round_ms=0.02, seed=3)
    written = json.loads(out.read_text())
    assert written["provenance"]["command"] == f"python benchmarks/bench_{name}.py --seed 3"
    assert written["provenance"]["clock"] == "CPU time of one thread"
    (result,) = written["results"]
    timed = {part: figures for part, figures in result.items() if isinstance(figures, dict)}
    assert timed
    for figures in timed.values():
        assert 0 < figures["first_quartile"] <= figures["median"] <= figures["third_quartile"] < math.inf
