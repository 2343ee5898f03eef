"""What steps without the draft emitted, per request slot, until the draft runs again."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tetris_sglang.runtime.drafts.windows import Window
from tetris_sglang.runtime.host_copy import send

MEMORY_BYTES = 64 << 20
"""For tokens and, where the draft reads them, the target's states."""
MAX_STEPS = 1024
_MIN_STEPS = 4
"""For which there is room, whatever that takes."""


class _PlainStep(NamedTuple):
    rows_cpu: Tensor
    tokens: Tensor
    states: Tensor | None


class MissedTokens:
    """Tokens that no pass of the draft has seen, behind those of a request's window.

    A plain step costs next to nothing: what it emitted is kept as it came, and put in order when the draft runs again. Every
    running request is in every step.

    Args:
        num_slots: rows of SGLang's request-to-token table.
        state_bytes: of the target's states that the draft reads with a token.
    """

    def __init__(self, num_slots: int, state_bytes: int = 0) -> None:
        self._row_bytes = 8 + state_bytes
        self._steps: list[_PlainStep] = []
        self._bytes = 0
        self._first_steps = torch.zeros(num_slots, dtype=torch.int64)
        """Of each slot's request, among those that are kept."""
        self.max_tokens = 0
        """The most that a request has missed: as many may be missing at the end of a cached prefix."""

    @property
    def has_room(self) -> bool:
        """For one more step."""
        num_steps = len(self._steps)
        return num_steps < _MIN_STEPS or (num_steps < MAX_STEPS and self._bytes < MEMORY_BYTES)

    def num_tokens(self, batch) -> int:
        """The most that a request of this ScheduleBatch misses."""
        # Asked for in every plain step: numpy's calls take a third of torch's.
        return len(self._steps) and len(self._steps) - int(self._first_steps.numpy()[batch.req_pool_indices_cpu.numpy()].min())

    def forget(self, batch) -> None:
        """These requests have just been prefilled, by the draft, too."""
        self._first_steps[batch.req_pool_indices_cpu] = len(self._steps)

    def push(self, batch, tokens: Tensor, states: Tensor | None = None) -> None:
        """One step, which emitted one token per request.

        Args:
            tokens: [batch] int64. states: [batch, size], the target's.
        """
        if states is not None and states.is_cuda:
            states = states.clone()  # the target's graph writes there again
        self._steps.append(_PlainStep(batch.req_pool_indices_cpu, tokens, states))
        self._bytes += len(tokens) * self._row_bytes
        self.max_tokens = max(self.max_tokens, self.num_tokens(batch))

    def take(self, batch) -> Window:
        """What these requests missed, aligned to the left; counts may be 0. Forgets everything."""
        rows, device = batch.req_pool_indices_cpu, batch.req_pool_indices.device
        num_steps = len(self._steps)
        counts = num_steps - self._first_steps[rows]
        tokens = torch.zeros(len(rows), int(counts.max()), dtype=torch.int64, device=device)
        states = None
        if num_steps:
            requests = torch.full_like(self._first_steps, -1)
            requests[rows] = torch.arange(len(rows))
            slots = torch.cat([step.rows_cpu for step in self._steps])
            lens = torch.tensor([len(step.rows_cpu) for step in self._steps])
            columns = torch.arange(num_steps).repeat_interleave(lens) - self._first_steps[slots]
            kept = ((requests[slots] >= 0) & (columns >= 0)).nonzero()[:, 0]
            place = send(requests[slots[kept]], device), send(columns[kept], device)
            kept = send(kept, device)
            tokens[place] = torch.cat([step.tokens for step in self._steps])[kept]
            if self._steps[0].states is not None:
                found = torch.cat([step.states for step in self._steps])[kept]
                states = found.new_zeros(*tokens.shape, found.shape[1])
                states[place] = found
        self._steps, self._bytes = [], 0
        self._first_steps.zero_()
        return Window(tokens, send(counts, device), states)
