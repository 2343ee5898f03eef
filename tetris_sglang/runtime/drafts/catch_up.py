"""What steps without the draft emitted, per request slot, until the draft runs again."""

from __future__ import annotations

import torch
from torch import Tensor

from tetris_sglang.runtime.drafts.windows import Window

MEMORY_BYTES = 64 << 20
"""For tokens and, where the draft reads them, the target's states."""
MAX_TOKENS = 1024
_MIN_STEPS = 4
"""For which there is room, whatever that takes."""


class MissedTokens:
    """Tokens that no pass of the draft has seen, behind those of a request's window.

    A step without the draft adds one to every running request, so none misses more than there were such steps.

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
        self._counts = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self._states = None if hidden_size is None else torch.zeros((*shape, hidden_size), dtype=dtype, device=device)
        self.num_tokens = 0
        """No running request misses more."""
        self.max_tokens = 0
        """The most that this has been: as many may be missing at the end of a cached prefix."""

    @property
    def has_room(self) -> bool:
        """For one more step."""
        return self.num_tokens < self._capacity

    def forget_rows(self, rows: Tensor) -> None:
        """These slots [n] belong to requests just prefilled, by the draft, too."""
        # Not by assignment, whose value would come from the host, after a wait (speculative/eagle_utils.py).
        self._counts.index_fill_(0, rows, 0)
        if self.num_tokens and not self._counts.is_cuda:
            # Whoever has missed that many may have ended.
            self.num_tokens = int(self._counts.max())

    def push(self, rows: Tensor, tokens: Tensor, states: Tensor | None = None) -> None:
        """One step, which emitted one token per request.

        Args:
            rows: [batch] request slots. tokens: [batch] integers. states: [batch, hidden_size], the target's.
        """
        columns = self._counts[rows]
        self._tokens[rows, columns] = tokens.to(torch.int32)
        if self._states is not None:
            self._states[rows, columns] = states.to(self._states.dtype)
        self._counts[rows] = columns + 1
        self.num_tokens += 1
        self.max_tokens = max(self.max_tokens, self.num_tokens)

    def take(self, rows: Tensor) -> Window:
        """What the requests in these slots [batch] missed, aligned to the left; counts may be 0. Forgets everything."""
        counts, width = self._counts[rows], self.num_tokens
        states = None if self._states is None else self._states[rows, :width]
        missed = Window(self._tokens[rows, :width].to(torch.int64), counts, states)
        self._counts.zero_()
        self.num_tokens = 0
        return missed
