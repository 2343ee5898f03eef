"""What every step drafted, verified and accepted, written to a file while serving."""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Sequence
from importlib.metadata import version
from typing import IO, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tetris_sglang import __version__
from tetris_sglang.config import TetrisConfig
from tetris_sglang.drafting import Grid, Proposal, tree_survival
from tetris_sglang.estimates.estimator import judge_nodes
from tetris_sglang.packing import AcceptedTokens
from tetris_sglang.runtime.host_copy import HostCopy
from tetris_sglang.runtime.requests.values import RequestValues
from tetris_sglang.selection import survival_from_probs
from tetris_sglang.texts import min_passes
from tetris_sglang.trace import open_for_writing, row_type

logger = logging.getLogger(__name__)

# The settings that say how to read a trace.
_DESCRIBED = ("num_steps", "capacity_per_request", "capacity_tokens", "selection", "calibration")


class _Rows(NamedTuple):
    """One step, as the fields of the same names in a trace; [batch] or [batch, drafted nodes]."""

    request: Tensor
    selected: Tensor
    raw: Tensor
    survival: Tensor
    node_depths: Tensor
    passes: Tensor
    accepted: Tensor


class StepRecorder:
    """Writes a trace (tetris_sglang/trace.py). Never waits for the device: rows are written once they have come in.

    Args:
        config: says where to, and how the server speculates.
        draft: its kind. topk: its branches.
        num_nodes: most that a request drafts. num_extension: of these, behind the last pass.
        num_slots: of running requests.
        device: "cuda" or "cpu".
    Raises:
        OSError: the file cannot be written.
    """

    def __init__(
        self,
        config: TetrisConfig,
        *,
        draft: str,
        topk: int,
        num_nodes: int,
        num_extension: int,
        num_slots: int,
        device: str,
    ) -> None:
        self._file: IO[bytes] | None = open_for_writing(
            config.record,
            num_nodes,
            draft=draft,
            topk=topk,
            num_extension=num_extension,
            **{name: getattr(config, name) for name in _DESCRIBED},
            sglang=version("sglang"),
            tetris_sglang=__version__,
        )
        self._file.flush()
        self._row_type, self._num_extension = row_type(num_nodes), num_extension
        self._num_steps = 0
        numbers = itertools.count()
        self._numbers = RequestValues(lambda req: next(numbers), num_slots, device)
        self._pending: deque[tuple[int, int, HostCopy]] = deque()

    def add_prefilled(self, reqs: Sequence, slots: Tensor) -> None:
        """Number SGLang's `Req`s; the same one may come again.

        Args:
            slots: [batch] integers, where each of them runs.
        """
        self._numbers.add_prefilled(reqs, slots)

    def add(
        self,
        proposal: Proposal | None,
        grid: Grid,
        accepted: AcceptedTokens,
        verify_lens: Tensor,
        slots: Tensor,
        depth: int,
    ) -> None:
        """Take in one step; None where it drafted nothing.

        Args:
            depth: passes of the draft.
            verify_lens: [batch], selected drafts and the root.
            slots: [batch] integers, where each request runs.
        Sync: none.
        """
        step = self._num_steps
        self._num_steps += 1
        if proposal is None or self._file is None:
            return
        if proposal.shape is None:
            raw, survival = survival_from_probs(proposal.probs), survival_from_probs(proposal.scores)
        else:
            raw = tree_survival(proposal.probs, proposal.shape.parents, grid.max_depth)
            survival = proposal.scores
        judged = judge_nodes(proposal, grid, accepted, verify_lens)
        passes = judged.depths
        if self._num_extension:
            passes = min_passes(proposal.evidence, self._num_extension)
        rows = _Rows(
            self._numbers.at(slots),
            verify_lens - 1,
            raw.half(),
            survival.half(),
            judged.depths.to(torch.uint8),
            passes.to(torch.uint8),
            judged.accepted,
        )
        self._pending.append((step, depth, HostCopy(*rows)))

    def write(self) -> None:
        """Write the steps that have come in, all the way to the file: whoever kills the server loses none of them."""
        while self._pending and self._pending[0][2].is_ready:
            step, depth, copied = self._pending.popleft()
            parts = _Rows(*copied.tensors)
            rows = np.zeros(len(parts.request), self._row_type)
            rows["step"], rows["depth"] = step, depth
            for name, part in zip(_Rows._fields, parts, strict=True):
                values = part.numpy()
                if name == "accepted":
                    values = np.packbits(values, axis=1, bitorder="little")
                columns = ... if values.ndim == 1 else (slice(None), slice(values.shape[1]))
                # What was not drafted stays 0.
                rows[name][columns] = values
            try:
                self._file.write(rows.tobytes())
                self._file.flush()
            except OSError:
                # A full disk is no reason to stop serving.
                logger.exception("TETRIS: recording ends here")
                self._file = None
                self._pending.clear()
