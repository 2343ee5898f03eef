"""The file of a recorded run."""

import json

import numpy as np
import pytest

from tetris_sglang.trace import FORMAT, VERSION, open_for_writing, read_trace, row_type

NUM_NODES = 9  # accepted takes a second byte


def make_rows(count: int, seed: int = 0) -> np.ndarray:
    draw = np.random.default_rng(seed)
    rows = np.zeros(count, row_type(NUM_NODES))
    rows["step"] = np.sort(draw.integers(0, 2**32, count))
    rows["request"] = draw.integers(0, 2**32, count)
    rows["depth"], rows["selected"] = draw.integers(1, 65, count), draw.integers(0, NUM_NODES + 1, count)
    for name in ("raw", "survival"):
        rows[name] = -np.sort(-draw.random((count, NUM_NODES)))
    rows["node_depths"] = draw.integers(0, 6, (count, NUM_NODES))
    rows["accepted"] = np.packbits(draw.random((count, NUM_NODES)) < 0.5, axis=1, bitorder="little")
    return rows


def write(path, rows: np.ndarray, **described) -> None:
    with open_for_writing(path, NUM_NODES, **described) as file:
        file.write(rows.tobytes())


@pytest.mark.parametrize("name", ["run.trace", "run.trace.gz"])
def test_what_is_written_is_read(tmp_path, name):
    rows = make_rows(5)
    write(tmp_path / name, rows, draft="eagle", capacity=2.5)
    trace = read_trace(tmp_path / name)
    assert trace.header == {
        "format": FORMAT, "version": VERSION, "num_nodes": NUM_NODES, "draft": "eagle", "capacity": 2.5,
    }  # fmt: skip
    for values, field in zip(trace[1:5], ("step", "request", "depth", "selected"), strict=True):
        assert values.tolist() == rows[field].tolist()
    # Half precision is what the file has; nothing is lost on the way out of it.
    assert trace.raw.astype(np.float16).tolist() == rows["raw"].tolist()
    assert trace.survival.astype(np.float16).tolist() == rows["survival"].tolist()
    assert trace.node_depths.tolist() == rows["node_depths"].tolist()
    for row, accepted in zip(rows["accepted"], trace.accepted, strict=True):
        assert accepted.tolist() == [bool(row[node // 8] >> node % 8 & 1) for node in range(NUM_NODES)]


def test_the_layout_is_the_documented_one():
    """Other programs may read the file: packed, in this order, little-endian."""
    kind = row_type(NUM_NODES)
    ends = np.cumsum([4, 4, 1, 2, 2 * NUM_NODES, 2 * NUM_NODES, NUM_NODES, 2])
    assert [kind.fields[name][1] for name in kind.names] == [0, *ends[:-1]]
    assert kind.itemsize == ends[-1]
    row = np.zeros(1, kind)
    row["step"], row["selected"] = 0x01020304, 0x0506
    assert row.tobytes()[:11] == bytes([4, 3, 2, 1, 0, 0, 0, 0, 0, 6, 5])


@pytest.mark.parametrize("torn", [1, row_type(NUM_NODES).itemsize - 1])
def test_a_torn_last_row_is_left_out(tmp_path, torn):
    """The server was killed while it wrote."""
    path = tmp_path / "run.trace"
    rows = make_rows(4)
    write(path, rows)
    path.write_bytes(path.read_bytes()[:-torn])
    assert read_trace(path).steps.tolist() == rows["step"][:3].tolist()


def test_no_step_yet(tmp_path):
    write(tmp_path / "run.trace", make_rows(0))
    trace = read_trace(tmp_path / "run.trace")
    assert len(trace.steps) == len(trace.is_complete) == 0 and trace.accepted.shape == (0, NUM_NODES)


def test_complete_is_what_was_verified_to_its_last_node(tmp_path):
    rows = make_rows(3)
    rows["node_depths"] = [[1] * NUM_NODES, [1, 2, 3] + [0] * 6, [1, 2, 3] + [0] * 6]
    rows["selected"] = [NUM_NODES - 1, 3, 2]
    write(tmp_path / "run.trace", rows)
    assert read_trace(tmp_path / "run.trace").is_complete.tolist() == [False, True, False]


@pytest.mark.parametrize(
    "name, content",
    [
        ("a", b""),
        ("b", b"\x00\xff\n"),
        ("c", b"[1]\n"),
        ("d", b"{}\n"),
        ("e", json.dumps({"format": FORMAT, "version": VERSION}).encode() + b"\n"),
        ("f", json.dumps({"format": FORMAT, "version": VERSION + 1, "num_nodes": 2}).encode() + b"\n"),
        ("g", json.dumps({"format": "other", "version": VERSION, "num_nodes": 2}).encode() + b"\n"),
        ("h.gz", b"not compressed\n"),
    ],
)
def test_anything_else_is_refused_by_name(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"{name} is no trace of version {VERSION}"):
        read_trace(tmp_path / name)


def test_a_compressed_trace_that_ends_early_is_refused(tmp_path):
    path = tmp_path / "run.trace.gz"
    write(path, make_rows(50))
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match="is no trace"):
        read_trace(path)
