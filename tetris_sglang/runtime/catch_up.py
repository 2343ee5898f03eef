"""What a draft missed while steps ran without drafting, per request slot, until its KV is caught up."""

from __future__ import annotations

import torch
from torch import Tensor

from tetris_sglang.runtime.windows import Window

MEMORY_BYTES = 64 << 20
"""For tokens and, where the draft reads them, the target's states."""
MOST_STEPS = 1024


class MissedTokens:
    """Tokens that left a request's window before a pass of the draft saw them.

    All running requests take part in every step, so the host knows how many steps were missed; a request that was prefilled
    in between missed the first ones less. So entries are aligned to the right, as in a `Window`.

    Args:
        num_slots: rows of SGLang's request-to-token table. hidden_size, dtype: of the states; None: the draft reads none.
    """

    def __init__(
        self, num_slots: int, *, hidden_size: int | None, dtype: torch.dtype, device: str | torch.device
    ) -> None:
        state_bytes = 0 if hidden_size is None else hidden_size * dtype.itemsize
        self._capacity_steps = max(16, min(MOST_STEPS, MEMORY_BYTES // (num_slots * (4 + state_bytes))))
        shape = (num_slots, self._capacity_steps)
        self._tokens = torch.zeros(shape, dtype=torch.int32, device=device)
        self._counts = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self._states = (
            None if hidden_size is None else torch.zeros((*shape, hidden_size), dtype=dtype, device=device)
        )
        self.num_steps = 0
        """Steps without drafting since the last pass of the draft."""
        self.most_steps = 0
        """The longest such run so far: as many tokens may be missing at the end of a cached prefix."""

    @property
    def is_full(self) -> bool:
        return self.num_steps == self._capacity_steps

    def forget_rows(self, rows: Tensor) -> None:
        """These slots [n] belong to requests just prefilled, by the draft, too."""
        if self.num_steps:
            self._counts[rows] = 0

    def push(self, rows: Tensor, window: Window) -> None:
        """One step: the oldest token of each request's window leaves it.

        Args:
            rows: [batch] request slots.
        """
        self._tokens[rows, self.num_steps] = window.tokens[:, 0].to(torch.int32)
        width = window.tokens.shape[1]
        # A window that is not full yet loses nothing.
        self._counts[rows] += 1 if window.counts is None else window.counts == width
        if self._states is not None:
            self._states[rows, self.num_steps] = window.hidden_states[:, 0].to(self._states.dtype)
        self.num_steps += 1
        self.most_steps = max(self.most_steps, self.num_steps)

    def take(self, rows: Tensor) -> Window:
        """What the requests in these slots [batch] missed, [batch, num_steps]; counts may be 0. Forgets everything."""
        n = self.num_steps
        states = None if self._states is None else self._states[rows, :n]
        missed = Window(self._tokens[rows, :n].to(torch.int64), self._counts[rows], states)
        self._counts.zero_()
        self.num_steps = 0
        return missed
