"""The draft's KV of tokens that steps emitted without it."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod

import torch
from sglang.srt.speculative.eagle_utils import get_draft_input_from_target_hidden_dim
from torch import Tensor

from tetris_sglang.packing import align_right
from tetris_sglang.runtime.drafts.catch_up import MissedTokens
from tetris_sglang.runtime.drafts.kv_only import KVOnlyPasses
from tetris_sglang.runtime.drafts.passes import DraftPasses
from tetris_sglang.runtime.drafts.windows import Window, slide_window
from tetris_sglang.runtime.host_copy import send

_CATCH_UP_ROWS = 4096
"""Rows of one pass that catches up."""


class DraftKV(ABC):
    """Keeps the draft's KV complete: what steps without it emit waits until it drafts again."""

    def __init__(self, passes: DraftPasses) -> None:
        self._passes, self._spec = passes, passes.spec
        runner = passes.runner
        self.state_size = get_draft_input_from_target_hidden_dim(runner) if self._spec.reads_hidden_states else None
        """Values of the target's state that the draft reads with a token; None: it reads none."""
        self._table = runner.req_to_token_pool.req_to_token
        self.missed = MissedTokens(len(self._table), (self.state_size or 0) * runner.model_config.dtype.itemsize)

    @property
    @abstractmethod
    def _has_attention(self) -> bool:
        """Whether catching up attends, and so wants a plan, for which a host may have to wait."""

    def catch_up(self, batch, window: Window) -> Window:
        """The window of the texts' last tokens; writes the draft's KV of those before it.

        Args:
            window: of the last step that drafted.
        """
        if not self.missed.num_tokens(batch):
            return window
        if self._has_attention:
            self._passes.know_lengths(batch)
        left, window = slide_window(window, self.missed.take(batch))
        states = left.hidden_states
        states = None if states is None else align_right(states, left.counts)
        left = Window(align_right(left.tokens, left.counts), left.counts, states)
        change = 1 - self._spec.shift - self._spec.window_width
        ends_cpu = None if batch.seq_lens_cpu is None else batch.seq_lens_cpu + change
        self._write(batch, left, batch.seq_lens + change, ends_cpu)
        return window

    @abstractmethod
    def prefill(self, batch, forward_batch) -> None:
        """Write the draft's KV of an extend batch.

        Args:
            batch: the ScheduleBatch. forward_batch: the draft's.
        """

    @abstractmethod
    def _write(self, batch, missed: Window, ends: Tensor, ends_cpu: Tensor | None) -> None:
        """Write the draft's KV of the last tokens before `ends` [batch], the columns of `missed`; changes `batch`."""


class ModelKV(DraftKV):
    """The draft's own layers make it, of tokens and of what else it reads."""

    def __init__(self, passes: DraftPasses) -> None:
        super().__init__(passes)
        self._kv_only = KVOnlyPasses(passes.runner)

    @property
    def _has_attention(self) -> bool:
        return self._kv_only.has_attention

    def prefill(self, batch, forward_batch) -> None:
        self._redraft_prefixes(batch)
        forward_batch.input_ids = self._passes.read(forward_batch.input_ids)
        self._kv_only.prefill(forward_batch)
        self.missed.forget(batch)

    def _redraft_prefixes(self, batch) -> None:
        """Write the draft's KV of the ends of prefixes from the cache: their requests may have ended without drafting.

        A head would need the target's states there, which nobody keeps.
        """
        max_missed = self.missed.max_tokens
        if self._spec.reads_hidden_states or not max_missed:
            return
        prefix_lens = batch.prefix_lens
        lens = [
            # Of a long prompt's later pieces, the earlier ones are the prefix.
            min(prefix_len, max_missed + self._spec.window_width) if req.extend_batch_idx == 1 else 0
            for req, prefix_len in zip(batch.reqs, prefix_lens, strict=True)
        ]
        if not any(lens):
            return
        tokens = torch.zeros((len(lens), max(lens)), dtype=torch.int64)
        for row, (req, prefix_len, n) in enumerate(zip(batch.reqs, prefix_lens, lens, strict=True)):
            if n:
                tokens[row, -n:] = torch.tensor(req.get_fill_ids()[prefix_len - n : prefix_len])
        device = batch.seq_lens.device
        ends_cpu = torch.tensor(prefix_lens)
        missed = Window(send(tokens, device), send(lens, device))
        batch = copy.copy(batch)
        batch.return_logprob = False
        self._write(batch, missed, send(ends_cpu, device), ends_cpu)

    def _write(self, batch, missed: Window, ends: Tensor, ends_cpu: Tensor | None) -> None:
        batch_size, num_missed = missed.tokens.shape
        table, rows = self._table, batch.req_pool_indices[:, None]
        # A request that does not reach back so far begins at its first token, and ends before the others' last columns.
        starts = (ends - num_missed).clamp(min=0)
        starts_cpu = None if ends_cpu is None else (ends_cpu - num_missed).clamp(min=0)
        width = max(1, _CATCH_UP_ROWS // batch_size)
        for first in range(0, num_missed, width):
            last = min(first + width, num_missed)
            positions = starts[:, None] + torch.arange(first, last, device=ends.device)
            columns = positions - (ends - num_missed)[:, None]
            is_real = (columns >= num_missed - missed.counts[:, None]) & (columns < num_missed)
            slots = torch.where(is_real, table[rows, positions], 0).to(torch.int64)
            columns = columns.clamp_(max=num_missed - 1)
            states = missed.hidden_states
            if states is not None:
                states = states.gather(1, columns[:, :, None].expand(-1, -1, states.shape[2]))
            part = Window(missed.tokens.gather(1, columns), None, states)
            forward_batch = self._passes.plan_window(
                batch,
                part,
                positions,
                slots,
                starts + last,
                None if starts_cpu is None else starts_cpu + last,
                self._has_attention,
            )
            forward_batch.input_ids = part.tokens.reshape(-1)
            forward_batch.positions = positions.reshape(-1)
            forward_batch.out_cache_loc = slots.reshape(-1)
            self._kv_only.write(forward_batch, self._passes.forward)
