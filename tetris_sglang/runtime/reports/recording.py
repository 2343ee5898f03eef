"""What every step drafted, verified and accepted, written to a file while serving."""

from __future__ import annotations

import itertools
import logging
from collections import deque
from importlib.metadata import version
from typing import IO, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tetris_sglang import __version__
from tetris_sglang.config import TetrisConfig
from tetris_sglang.drafting import tree_survival
from tetris_sglang.estimates.estimator import judge_nodes
from tetris_sglang.observers import StepRecord
from tetris_sglang.runtime.host_copy import HostCopy
from tetris_sglang.runtime.requests.values import RequestValues
from tetris_sglang.selection import survival_from_probs
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
    accepted: Tensor


class StepRecorder:
    """An `Observer` that writes a trace (tetris_sglang/trace.py): rows, once they have come in.

    Args:
        config: says where to, and how the server speculates.
        draft: its kind.
        num_nodes: most that a request drafts.
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
        num_nodes: int,
        num_slots: int,
        device: str,
    ) -> None:
        self._file: IO[bytes] | None = open_for_writing(
            config.record,
            num_nodes,
            draft=draft,
            **{name: getattr(config, name) for name in _DESCRIBED},
            sglang=version("sglang"),
            tetris_sglang=__version__,
        )
        self._file.flush()
        self._row_type = row_type(num_nodes)
        self._num_steps = 0
        numbers = itertools.count()
        self._numbers = RequestValues(lambda req: next(numbers), num_slots, device)
        self._pending: deque[tuple[int, int, HostCopy]] = deque()

    def begin(self, batch, next_token_ids: Tensor) -> None:
        """Number the requests."""
        self._numbers.add_prefilled(batch.reqs, batch.req_pool_indices)

    def observe(self, record: StepRecord) -> None:
        """Take in one step. Sync: none."""
        step, proposal = self._num_steps, record.proposal
        self._num_steps += 1
        if proposal is None or self._file is None:
            return
        if proposal.shape is None:
            raw = survival_from_probs(proposal.probs)
        else:
            raw = tree_survival(proposal.probs, proposal.shape.parents, record.grid.max_depth)
        judged = judge_nodes(record)
        rows = _Rows(
            self._numbers.at(record.batch.req_pool_indices),
            record.packed.verify_lens - 1,
            raw.half(),
            proposal.survival.half(),
            judged.depths.to(torch.uint8),
            judged.accepted,
        )
        self._pending.append((step, record.plan.depth, HostCopy(*rows)))

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
