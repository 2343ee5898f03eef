"""A recorded run: what was drafted in every step, what was verified of it, and what was accepted.

The file is one line of JSON, then one row of a fixed size per request and step, until the file ends (a torn last row is left
out); a name that ends in .gz is compressed. Little-endian:

| Field | Type | Meaning |
|---|---|---|
| step | uint32 | number of the step |
| request | uint32 | number of the request, in order of appearance |
| depth | uint8 | levels that the step drafted |
| selected | uint16 | drafts verified of this request: the first so many nodes |
| raw | float16[num_nodes] | survival of each node by the draft's own probabilities |
| survival | float16[num_nodes] | the same, calibrated: what selection saw |
| node_depths | uint8[num_nodes] | level of each node, from 1; 0: no node |
| accepted | uint8[ceil(num_nodes / 8)] | bits, lowest first: the node was accepted |

Nodes stand in the order of `Proposal`.
The JSON has `format`, `version`, `num_nodes`, and whatever else describes the run.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

FORMAT, VERSION = "tetris-sglang trace", 3


def row_type(num_nodes: int) -> np.dtype:
    """The type of a row; see the module's table."""
    return np.dtype(
        [
            ("step", "<u4"),
            ("request", "<u4"),
            ("depth", "u1"),
            ("selected", "<u2"),
            ("raw", "<f2", (num_nodes,)),
            ("survival", "<f2", (num_nodes,)),
            ("node_depths", "u1", (num_nodes,)),
            ("accepted", "u1", (-(-num_nodes // 8),)),
        ]
    )


class Trace(NamedTuple):
    """A trace in memory: N rows of n nodes."""

    header: dict[str, Any]
    steps: np.ndarray
    """[N] int64, ascending."""
    requests: np.ndarray
    """[N] int64."""
    depths: np.ndarray
    """[N] int64."""
    selected: np.ndarray
    """[N] int64."""
    raw: np.ndarray
    """[N, n] float32."""
    survival: np.ndarray
    """[N, n] float32, non-increasing."""
    node_depths: np.ndarray
    """[N, n] int64."""
    accepted: np.ndarray
    """[N, n] bool. Nodes that were not verified are False, whatever the target would have said."""

    @property
    def is_complete(self) -> np.ndarray:
        """[N] bool: every draft of the row was verified, so `accepted` is all there is to know."""
        return self.selected == (self.node_depths > 0).sum(axis=1)


def open_for_writing(path: Path, num_nodes: int, **described: Any) -> IO[bytes]:
    """A new trace; rows of `row_type(num_nodes)` follow, as bytes.

    Args:
        described: JSON values that say what is recorded.
    """
    file = _open(path, "wb")
    header = {"format": FORMAT, "version": VERSION, "num_nodes": num_nodes, **described}
    file.write(json.dumps(header).encode() + b"\n")
    return file


def read_trace(path: Path) -> Trace:
    """Read a trace.

    Raises:
        ValueError: it is none, or of another version.
    """
    try:
        with _open(path, "rb") as file:
            header_line, data = file.readline(), file.read()
        header = json.loads(header_line)
        known = header["format"] == FORMAT and header["version"] == VERSION
        kind = row_type(header["num_nodes"])
    except (ValueError, KeyError, TypeError, EOFError, gzip.BadGzipFile):
        known = False
    if not known:
        raise ValueError(f"{path} is no trace of version {VERSION} (--speculative-tetris-record writes them)")
    rows = np.frombuffer(data, kind, count=len(data) // kind.itemsize)
    bits = np.unpackbits(rows["accepted"], axis=1, count=header["num_nodes"], bitorder="little")
    return Trace(
        header,
        steps=rows["step"].astype(np.int64),
        requests=rows["request"].astype(np.int64),
        depths=rows["depth"].astype(np.int64),
        selected=rows["selected"].astype(np.int64),
        raw=rows["raw"].astype(np.float32),
        survival=rows["survival"].astype(np.float32),
        node_depths=rows["node_depths"].astype(np.int64),
        accepted=bits.astype(bool),
    )


def _open(path: Path, mode: str) -> Any:
    return gzip.open(path, mode) if path.suffix == ".gz" else path.open(mode)
