"""The shipped traces."""

import json
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY / "benchmarks"), str(REPOSITORY / "scripts")]

import bench_replay as bench
from record_traces import RECORDINGS

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
