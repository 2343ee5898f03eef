"""What learns from a step that drafted, as one CUDA graph per batch size: some hundred small launches become one."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import torch
from torch import Tensor

from tetris_sglang.capacity import StepPlan
from tetris_sglang.drafting import Grid, Proposal, TreeShape
from tetris_sglang.observers import Observer, StepRecord
from tetris_sglang.packing import AcceptedTokens, empty_packed_tokens
from tetris_sglang.runtime.cuda.graphs import capture_sizes
from tetris_sglang.runtime.request_texts import RequestTexts

NOT_A_REQUEST = -1
"""Drafts accepted in a row that only fills the batch up to a captured size: nothing was emitted, nothing is learnt."""


class CapturedObservers:
    """An `Observer` around others. Steps without drafts, and batches beyond the captured sizes, they see themselves.

    Args:
        observers: whose `observe` never waits, keeps its state in place on the device, and does the same whatever it is shown.
        texts: among them, or not; plain steps that wait in it are written down before a step that drafted.
        batch_sizes: to capture. width: columns of the grid, the root's included. max_depth: of any node.
        has_combs, has_evidence: of the proposals.
    """

    def __init__(
        self,
        observers: Sequence[Observer],
        texts: RequestTexts,
        *,
        batch_sizes: Sequence[int],
        width: int,
        max_depth: int,
        has_combs: bool,
        has_evidence: bool,
        device: torch.device | str,
    ) -> None:
        self._observers, self._texts = list(observers), texts
        self._batch_sizes = sorted(batch_sizes)
        size, num_nodes = self._batch_sizes[-1], width - 1

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(size, *shape, dtype=dtype, device=device)

        self._rows, self._seq_lens = zeros(), zeros()
        self._num_accepted, self._verify_lens = zeros(dtype=torch.int32), zeros(dtype=torch.int32)
        self._target_tokens = zeros(width)
        self._probs = zeros(num_nodes, dtype=torch.float32)
        self._evidence = zeros(num_nodes) if has_evidence else None
        self._parents, self._depths = (zeros(width) if has_combs else None for _ in range(2))
        self._path = zeros(max_depth + 1) if has_combs else None
        self._max_depth = max_depth
        self._fill(0, size)
        self._graphs = capture_sizes(lambda size: self._observe(self._make_record(size)), self._batch_sizes)

    def begin(self, batch, next_token_ids: Tensor) -> None:
        for observer in self._observers:
            observer.begin(batch, next_token_ids)

    def observe(self, record: StepRecord) -> None:
        batch_size = len(record.batch.reqs)
        if record.proposal is None or batch_size > self._batch_sizes[-1]:
            self._observe(record)
            return
        self._texts.flush()
        size = next(size for size in self._batch_sizes if size >= batch_size)
        if size != batch_size:
            self._fill(batch_size, size)
        self._take_over(record, batch_size)
        self._graphs[size].replay()

    def _observe(self, record: StepRecord) -> None:
        for observer in self._observers:
            observer.observe(record)

    def _fill(self, start: int, end: int) -> None:
        """Rows that are no requests: SGLang's padding slot 0, whose text nobody reads."""
        self._rows[start:end] = 0
        self._seq_lens[start:end] = 0
        self._num_accepted[start:end] = NOT_A_REQUEST
        self._verify_lens[start:end] = 1

    def _take_over(self, record: StepRecord, batch_size: int) -> None:
        """Copy what is learnt from to where the graphs read it; columns that a shallower step lacks are out of reach."""
        proposal, accepted = record.proposal, record.accepted
        assert proposal is not None
        num_nodes = proposal.tokens.shape[1]
        rows, seq_lens, tokens = record.batch.req_pool_indices, record.batch.seq_lens, accepted.target_tokens
        static, values = [self._rows, self._seq_lens, self._target_tokens], [rows, seq_lens, tokens]
        if self._parents is not None:
            static += [self._parents, self._depths]
            values += list(record.grid.shape)
        # Of one type each: one launch.
        torch._foreach_copy_([each[:batch_size] for each in static], values)
        static = [self._num_accepted, self._verify_lens]
        torch._foreach_copy_([each[:batch_size] for each in static], [accepted.num_accepted, record.packed.verify_lens])
        self._probs[:batch_size, :num_nodes] = proposal.probs
        if self._evidence is not None:
            self._evidence[:batch_size, :num_nodes] = proposal.evidence
        if self._path is not None:
            self._path[:batch_size, : accepted.path.shape[1]] = accepted.path

    def _make_record(self, size: int) -> StepRecord:
        """A step that reads the static tensors, with every node that may be drafted."""
        shape = None if self._parents is None else TreeShape(self._parents[:size], self._depths[:size])
        proposal = Proposal(
            tokens=torch.zeros_like(self._target_tokens[:size, 1:]),
            survival=self._probs.new_full((), float("nan")).expand_as(self._probs[:size]),  # not copied: who reads it would see
            probs=self._probs[:size],
            shape=shape,
            evidence=None if self._evidence is None else self._evidence[:size],
        )
        packed = empty_packed_tokens(size, size, self._rows.device)._replace(verify_lens=self._verify_lens[:size])
        accepted = AcceptedTokens(
            num_accepted=self._num_accepted[:size],
            bonus_tokens=self._rows[:size],
            last_tokens=self._rows[:size],
            new_seq_lens=self._seq_lens[:size],
            target_tokens=self._target_tokens[:size],
            path=None if self._path is None else self._path[:size],
        )
        batch = SimpleNamespace(req_pool_indices=self._rows[:size], seq_lens=self._seq_lens[:size], reqs=())
        num_nodes = self._probs.shape[1]
        return StepRecord(
            batch,
            StepPlan(self._max_depth, size * num_nodes),
            proposal,
            Grid(self._target_tokens[:size], self._max_depth, shape),
            packed,
            accepted,
            num_nodes,
        )
