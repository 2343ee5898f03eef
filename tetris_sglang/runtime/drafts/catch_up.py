"""What steps without the draft emitted, per request slot, until the draft runs again."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from tetris_sglang.runtime.drafts.windows import Window
from tetris_sglang.runtime.host_copy import HostCopy
from tetris_sglang.runtime.ranks import Ranks

MEMORY_BYTES = 64 << 20
"""For tokens and, where the draft reads them, the target's states."""
MAX_TOKENS = 1024
_MIN_STEPS = 4
"""For which there is room, whatever that takes."""


class MissedTokens:
    """Tokens that no pass of the draft has seen, behind those of a request's window.

    How many a running request misses is known on the device. The host knows it some steps later, and until then how many they
    are at most; of several ranks the first one's knowledge counts.

    Args:
        num_slots: rows of SGLang's request-to-token table.
        hidden_size, dtype: of the states; None: the draft reads none.
        ranks: that catch up together.
    """

    def __init__(
        self,
        num_slots: int,
        *,
        hidden_size: int | None,
        dtype: torch.dtype,
        device: str | torch.device,
        ranks: Ranks,
    ) -> None:
        state_bytes = 0 if hidden_size is None else hidden_size * dtype.itemsize
        affordable = min(MAX_TOKENS, MEMORY_BYTES // (num_slots * (4 + state_bytes)))
        self._capacity = max(_MIN_STEPS, affordable)
        shape = (num_slots, self._capacity)
        self._tokens = torch.zeros(shape, dtype=torch.int32, device=device)
        self._counts = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self._states = None if hidden_size is None else torch.zeros((*shape, hidden_size), dtype=dtype, device=device)
        # The most of a running request after each step that the host has not read yet.
        self._unread: deque[HostCopy] = deque()
        self._num_read = self._max_read = 0
        # What all ranks go by.
        self._ranks = ranks
        self._num_agreed = self._max_agreed = 0

    @property
    def num_tokens(self) -> int:
        """No running request misses more. Exact on the CPU, where nothing has to come in."""
        self._agree()
        return self._num_agreed

    @property
    def max_tokens(self) -> int:
        """The most that a request was known to miss: as many may be missing at the end of a cached prefix."""
        self._agree()
        return self._max_agreed

    def has_room(self) -> bool:
        """For one more step."""
        if self._num_agreed == self._capacity:
            self._agree()
        return self._num_agreed < self._capacity

    def _read(self) -> None:
        while self._unread and self._unread[0].is_ready:
            self._num_read = int(self._unread.popleft().tensors[0])
            self._max_read = max(self._max_read, self._num_read)

    def _agree(self) -> None:
        if not self._num_agreed:  # on every rank
            return
        self._read()
        known = self._num_read + len(self._unread), self._max_read
        self._num_agreed, self._max_agreed = self._ranks.agree(known)

    def forget_rows(self, rows: Tensor) -> None:
        """These slots [n] belong to requests just prefilled, by the draft, too."""
        # Not by assignment, whose value would come from the host, after a wait (speculative/eagle_utils.py).
        self._counts.index_fill_(0, rows, 0)
        if not self._counts.is_cuda:
            self._agree()
            self._unread.clear()
            self._num_read = self._num_agreed = int(self._counts.max())

    def push(self, rows: Tensor, tokens: Tensor, states: Tensor | None = None) -> None:
        """One step, which emitted one token per request.

        Args:
            rows: [batch] request slots. tokens: [batch] integers. states: [batch, hidden_size], the target's.
        """
        columns = self._counts[rows]
        self._tokens[rows, columns] = tokens.to(torch.int32)
        if self._states is not None:
            self._states[rows, columns] = states.to(self._states.dtype)
        counts = columns + 1
        self._counts[rows] = counts
        self._unread.append(HostCopy(counts.max()))
        self._num_agreed += 1
        self._read()

    def take(self, rows: Tensor) -> Window:
        """What the requests in these slots [batch] missed, aligned to the left; counts may be 0. Forgets everything."""
        counts, width = self._counts[rows], self.num_tokens
        self._max_read = self._max_agreed = max(self._max_agreed, width)
        states = None if self._states is None else self._states[rows, :width]
        missed = Window(self._tokens[rows, :width].to(torch.int64), counts, states)
        self._counts.zero_()
        self._unread.clear()
        self._num_read = self._num_agreed = 0
        return missed
