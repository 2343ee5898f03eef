"""What a draft missed while steps ran without it, per request slot, until its KV is caught up."""

from __future__ import annotations

import torch
from torch import Tensor

from tetris_sglang.runtime.windows import Window, align_right

MEMORY_BYTES = 64 << 20
"""For tokens and, where the draft reads them, the target's states."""
MOST_TOKENS = 1024
_LEAST_STEPS = 4
"""For which there is room, whatever that takes."""


class MissedTokens:
    """Tokens that left a request's window before a pass of the draft saw them.

    How many a step emits is known on the device; the host knows how many they are at most.

    Args:
        num_slots: rows of SGLang's request-to-token table. most_emitted: tokens per request and step.
        hidden_size, dtype: of the states; None: the draft reads none.
    """

    def __init__(
        self,
        num_slots: int,
        *,
        most_emitted: int,
        hidden_size: int | None,
        dtype: torch.dtype,
        device: str | torch.device,
    ) -> None:
        state_bytes = 0 if hidden_size is None else hidden_size * dtype.itemsize
        affordable = min(MOST_TOKENS, MEMORY_BYTES // (num_slots * (4 + state_bytes)))
        self._capacity = max(_LEAST_STEPS * most_emitted, affordable)
        shape = (num_slots, self._capacity)
        self._tokens = torch.zeros(shape, dtype=torch.int32, device=device)
        self._counts = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self._states = (
            None if hidden_size is None else torch.zeros((*shape, hidden_size), dtype=dtype, device=device)
        )
        self._narrows = torch.device(device).type == "cpu"
        self.num_tokens = 0
        """At most so many of a request have been missed since the last pass of the draft."""
        self._most = 0

    def has_room(self, emitted: int) -> bool:
        """For a step that emits so many tokens per request at most."""
        return self.num_tokens + emitted <= self._capacity

    def find_most(self) -> int:
        """The most that a request has missed so far, at most: as many may be missing at the end of a cached prefix.

        On the CPU no more than it was.
        """
        if self.num_tokens:
            now = int(self._counts.max()) if self._narrows else self.num_tokens
            self._most = max(self._most, now)
        return self._most

    def forget_rows(self, rows: Tensor) -> None:
        """These slots [n] belong to requests just prefilled, by the draft, too."""
        if self.num_tokens:
            self._counts[rows] = 0

    def push(self, rows: Tensor, left: Window) -> None:
        """One step.

        Args:
            rows: [batch] request slots. left: what has left their windows, from `slide_window`.
        """
        width = left.tokens.shape[1]
        counts = self._counts[rows]
        # What is not real is overwritten by what comes next.
        columns = counts[:, None]
        if width > 1:
            columns = columns + torch.arange(width, device=counts.device)
        self._tokens[rows[:, None], columns] = left.tokens.to(torch.int32)
        if self._states is not None:
            self._states[rows[:, None], columns] = left.hidden_states.to(self._states.dtype)
        self._counts[rows] = counts + (1 if left.counts is None else left.counts)
        self.num_tokens += width

    def take(self, rows: Tensor) -> Window:
        """What the requests in these slots [batch] missed, aligned to the right; counts may be 0. Forgets everything.

        On the CPU no wider than it has to be.
        """
        self.find_most()
        counts, width = self._counts[rows], self.num_tokens
        if self._narrows and width:
            width = int(counts.max())
        states = None if self._states is None else align_right(self._states[rows, :width], counts)
        missed = Window(align_right(self._tokens[rows, :width], counts).to(torch.int64), counts, states)
        self._counts.zero_()
        self.num_tokens = 0
        return missed
