"""What steps without the draft emitted, per request slot, until the draft runs again."""

from __future__ import annotations

import torch
from torch import Tensor

from tetris_sglang.runtime.drafts.windows import Window
from tetris_sglang.runtime.host_copy import send

MEMORY_BYTES = 64 << 20
"""For tokens and, where the draft reads them, the target's states."""
MAX_TOKENS = 1024
_MIN_STEPS = 4
"""For which there is room, whatever that takes."""


class MissedTokens:
    """Tokens that no pass of the draft has seen, behind those of a request's window.

    How many is known to the host: one more per step without the draft.

    Args:
        num_slots: rows of SGLang's request-to-token table.
        hidden_size, dtype: of the states; None: the draft reads none.
    """

    def __init__(self, num_slots: int, *, hidden_size: int | None, dtype: torch.dtype, device: str | torch.device) -> None:
        state_bytes = 0 if hidden_size is None else hidden_size * dtype.itemsize
        affordable = min(MAX_TOKENS, MEMORY_BYTES // (num_slots * (4 + state_bytes)))
        self._capacity = max(_MIN_STEPS, affordable)
        shape = (num_slots, self._capacity)
        self._tokens = torch.zeros(shape, dtype=torch.int32, device=device)
        self._states = None if hidden_size is None else torch.zeros((*shape, hidden_size), dtype=dtype, device=device)
        self._counts = torch.zeros(num_slots, dtype=torch.int64)
        self.max_tokens = 0
        """The most that a request has missed: as many may be missing at the end of a cached prefix."""

    def num_tokens(self, batch) -> int:
        """The most that a request of this ScheduleBatch misses."""
        return int(self._counts[batch.req_pool_indices_cpu].max())

    def has_room(self, batch) -> bool:
        """For one more step of this ScheduleBatch."""
        return self.num_tokens(batch) < self._capacity

    def forget(self, batch) -> None:
        """These requests have just been prefilled, by the draft, too."""
        self._counts[batch.req_pool_indices_cpu] = 0

    def push(self, batch, tokens: Tensor, states: Tensor | None = None) -> None:
        """One step, which emitted one token per request.

        Args:
            tokens: [batch] integers. states: [batch, hidden_size], the target's.
        """
        rows, counts = batch.req_pool_indices, self._counts[batch.req_pool_indices_cpu]
        columns = send(counts, rows.device)
        self._tokens[rows, columns] = tokens.to(torch.int32)
        if self._states is not None:
            self._states[rows, columns] = states.to(self._states.dtype)
        counts += 1
        self._counts[batch.req_pool_indices_cpu] = counts
        self.max_tokens = max(self.max_tokens, int(counts.max()))

    def take(self, batch) -> Window:
        """What these requests missed, aligned to the left; counts may be 0. Forgets it."""
        rows, width = batch.req_pool_indices, self.num_tokens(batch)
        counts = send(self._counts[batch.req_pool_indices_cpu], rows.device)
        states = None if self._states is None else self._states[rows, :width]
        missed = Window(self._tokens[rows, :width].to(torch.int64), counts, states)
        self.forget(batch)
        return missed
