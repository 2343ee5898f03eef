"""What drafts were worth, position by position: a recorded trace as the simulator reads it.

A simulated request walks over the rows of a recorded one, a row per token of its text: there stand the survivals that
selection sees and how many drafts the target would have accepted, had all been verified. So a policy may verify more or less
than the recorded run did, and what is correlated in a text (easy stretches, hard ones) stays so.

A run records only the positions where its steps began. The positions between follow from the row before them: the drafts that
were accepted are what a step that began later would have drafted. What such a row cannot know, its deepest levels, is filled
from the mean of all rows, and so are levels that were drafted and not verified, or not drafted.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from tetris_sglang.trace import Trace, read_trace

CODES = 1024
"""Survivals are compared in steps of 1 / (CODES - 1): the choice then is a counting sort."""


class DraftRows(NamedTuple):
    """Rows for P positions and D levels; those of one recorded request follow one another."""

    survival: np.ndarray
    """[P, D] float32, non-increasing."""
    accepted: np.ndarray
    """[P] int64 in [0, D]: drafts that the target accepts if all are verified."""
    starts: np.ndarray
    """[requests + 1] int64: where each recorded request's rows begin, and P."""

    @property
    def depth(self) -> int:
        """D, most passes of the draft."""
        return self.survival.shape[1]

    def visit(self, depth: int) -> np.ndarray:
        """[n] positions where steps begin that draft with `depth` passes and verify all: easy stretches are passed quickly."""
        visited, emitted = [], np.minimum(self.accepted, depth) + 1
        for start, end in zip(self.starts[:-1].tolist(), self.starts[1:].tolist(), strict=True):
            position = start
            while position < end:
                visited.append(position)
                position += int(emitted[position])
        return np.array(visited)


def read_rows(path: Path, *, seed: int = 0) -> DraftRows:
    """Read a trace file.

    Raises:
        ValueError: no trace, one of trees, or one too short to simulate with.
    """
    return make_rows(read_trace(Path(path)), name=str(path), seed=seed)


def make_rows(trace: Trace, *, name: str = "the trace", seed: int = 0) -> DraftRows:
    """Rows for every position of a recorded run's texts.

    Args:
        name: of the trace, for errors. seed: of what is drawn where nothing was recorded.
    Raises:
        ValueError: as `read_rows`.
    """
    is_chain = (trace.node_depths == 0) | (trace.node_depths == np.arange(1, trace.node_depths.shape[1] + 1))
    if not is_chain.all():
        raise ValueError(f"{name} holds draft trees; simulate takes traces of chains")
    drafted = (trace.node_depths > 0).sum(axis=1)
    if not drafted.any():
        raise ValueError(f"{name} holds no drafts")
    order = np.argsort(trace.requests, kind="stable")
    depth = int(drafted.max())
    accepted = trace.accepted[order, :depth].astype(np.int64).cumprod(axis=1).sum(axis=1)
    drafted, selected = drafted[order], np.minimum(trace.selected, drafted)[order]
    # A rejection ends what is to know; if all that was verified is accepted, the rest is open.
    known = np.where(accepted < selected, depth, selected)
    survival = trace.survival[order, :depth]
    survival[np.arange(depth) >= drafted[:, None]] = np.nan
    requests = trace.requests[order]
    survival, accepted, known, requests = _add_positions_between(survival, accepted, known, requests)
    survival, accepted = _fill(survival, accepted, known, np.random.default_rng(seed))
    if len(accepted) <= depth:
        raise ValueError(f"{name} has {len(accepted)} positions; more than its {depth} levels are needed")
    starts = np.flatnonzero(np.diff(requests, prepend=-1))
    return DraftRows(survival, accepted, np.append(starts, len(requests)))


def _add_positions_between(survival, accepted, known, requests):
    """A row for each accepted draft of a step: what a step that begins behind it would have drafted and accepted."""
    num_rows, depth = survival.shape
    offsets = np.arange(accepted.sum() + num_rows) - np.repeat(np.cumsum(accepted + 1) - accepted - 1, accepted + 1)
    row = np.repeat(np.arange(num_rows), accepted + 1)
    columns = offsets[:, None] + np.arange(depth)
    wide = np.concatenate((survival, np.full((num_rows, depth), np.nan, np.float32)), axis=1)
    shifted = np.take_along_axis(wide[row], columns, axis=1)
    before = np.where(offsets > 0, survival[row, np.maximum(offsets - 1, 0)], 1.0)
    shifted = np.minimum(shifted / np.maximum(before, 1e-6)[:, None], 1.0)
    # Known to have been rejected stays known at every later beginning.
    was_rejected = known[row] == depth
    was_rejected &= accepted[row] < depth
    still_known = np.where(was_rejected, depth, np.maximum(known[row] - offsets, 0))
    return shifted.astype(np.float32), accepted[row] - offsets, still_known, requests[row]


def _fill(survival, accepted, known, random):
    """Levels without a survival, or without an outcome, continue as the mean row does at that level."""
    depth, ratio = survival.shape[1], 0.0
    survival, accepted = survival.copy(), accepted.copy()
    for level in range(depth):
        above = survival[:, level - 1] if level else np.ones(len(survival), np.float32)
        mine = survival[:, level]
        has = ~np.isnan(mine) & (above > 0)
        ratio = float(np.mean(mine[has] / above[has])) if has.any() else ratio
        survival[:, level] = np.where(np.isnan(mine), above * ratio, mine)
        reached = (accepted >= level) & (known > level)
        # Levels above that were drawn do not count: they say nothing new.
        # Where none was verified, what the draft believes has to do.
        share = float(np.mean(accepted[reached] > level)) if reached.any() else ratio
        is_open = (accepted == level) & (known <= level)
        accepted[is_open & (random.random(len(accepted)) < share)] += 1
    return np.minimum.accumulate(survival, axis=1), accepted


def encode(survival: np.ndarray, weight: float = 1.0) -> np.ndarray:
    """Survivals as whole numbers [.., D] uint16, at least 1 unless exactly 0.

    Args:
        weight: in (0, 1], of the request's class against the heaviest one.
    """
    codes = np.rint(survival * (weight * (CODES - 1)))
    return np.where(survival > 0, np.maximum(codes, 1), 0).astype(np.uint16)
