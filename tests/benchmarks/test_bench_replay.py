"""The replay of the shipped traces: what is shipped, and the report's own arithmetic."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY / "benchmarks"), str(REPOSITORY / "scripts")]

import bench_replay as bench
from record_traces import RECORDINGS

from tests.tools.test_replay import make_trace
from tetris_sglang.tools.replay import RULES, study
from tetris_sglang.trace import read_trace

MAX_BYTES = 400_000


def test_there_is_a_trace_of_every_recording_and_of_no_other():
    assert {path.name for path in bench.TRACES.iterdir()} == {f"{name}.trace.gz" for name in RECORDINGS}


@pytest.mark.parametrize("name", RECORDINGS)
def test_a_shipped_trace(name):
    """Small, of the draft that it is named after, every draft verified, and nothing in it of the machine it was made on."""
    path, recording = bench.TRACES / f"{name}.trace.gz", RECORDINGS[name]
    trace = read_trace(path)
    assert path.stat().st_size < MAX_BYTES and trace.header["model"].startswith("smollm2-135m")
    assert trace.header["draft"] == name.partition("_")[0]
    assert trace.header["temperature"] == recording.temperature
    assert trace.header["num_steps"] == recording.num_steps
    assert "/" not in json.dumps(trace.header)
    assert trace.is_complete.all()
    assert (trace.node_depths > 0).sum(axis=1).tolist() == [recording.num_nodes] * len(trace.steps)
    assert len(set(trace.steps.tolist())) > 200 and trace.header["prompts"] == 32
    # Accepted nodes are one path from the root: as many as the deepest is deep.
    assert (trace.accepted.sum(axis=1) == (trace.accepted * trace.node_depths).max(axis=1)).all()


def test_hindsight_corrects_a_draft_that_is_too_sure():
    trace = make_trace(num_steps=400)
    sure = trace._replace(raw=np.sqrt(trace.survival))
    before = study(sure._replace(survival=sure.raw), "sure", [2.0], repeats=1).find(bench.TETRIS, 2.0)
    after = study(bench.calibrate_in_hindsight(sure), "sure", [2.0], repeats=1).find(bench.TETRIS, 2.0)
    assert before.promised - before.success_rate > 0.1
    assert after.promised == pytest.approx(after.success_rate, abs=0.02)


def test_the_report_says_what_was_found():
    result = study(make_trace()._replace(header={"num_nodes": 4, "temperature": 0.0}), "invented", [0.5, 4.0])
    provenance = {"command": "c", "date": "d", "commit": "e", "python": "f", "torch": "g"}
    text = "\n".join(bench.render(provenance, {None: [result], 8: [result]}, [result]))
    assert "shuffled into batches of 8" in text and "](replay.png)" in text
    # All verified: every rule does as well as the oracle.
    shares = re.findall(r"^\| invented \| (\S+) \| (\*\*100\.0%\*\*) \|$", text, re.MULTILINE)
    assert len(shares) == 2
    for rule in RULES:
        figures = result.find(rule, 0.5)
        assert re.search(rf"^\| {rule} \| {figures.success_rate:.3f} \({figures.oracle_share:.0%}\) \|", text, re.MULTILINE)
