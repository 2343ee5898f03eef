"""Looking up what followed in the requests' texts as one CUDA graph per batch size: some seventy launches become one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tetris_sglang.capacity import measure_curves
from tetris_sglang.drafting import Proposal
from tetris_sglang.runtime.cuda.graphs import capture_sizes


class NgramGraphs:
    """Chains to the full depth, of which a shallower step takes the beginning.

    Args:
        look_up: (rows [batch], depth) -> chains; never waits, and does the same whatever it is shown.
        batch_sizes: to capture. depth: the full one. shares: as in `Draft.capture`.
    """

    def __init__(
        self,
        look_up: Callable[[Tensor, int], Proposal],
        batch_sizes: Sequence[int],
        depth: int,
        shares: Sequence[float] | None,
        device: torch.device | str,
    ) -> None:
        self._batch_sizes = sorted(batch_sizes)
        self._rows = torch.zeros(self._batch_sizes[-1], dtype=torch.int64, device=device)
        self._shares = None if shares is None else torch.tensor(shares, dtype=torch.float32, device=device)
        self._kept: dict[int, Proposal] = {}
        """By batch size, where its graph leaves the chains."""

        def run(size: int) -> None:
            rows = self._rows[:size]
            made = look_up(rows, depth)
            if self._shares is not None:
                # No request is in row 0.
                made = made._replace(curves=measure_curves(made.survival, made.depths, depth, self._shares, rows > 0))
            parts = {name: part for name, part in made._asdict().items() if part is not None}
            if size not in self._kept:
                self._kept[size] = Proposal(**{name: torch.empty_like(part) for name, part in parts.items()})
            for name, part in parts.items():
                getattr(self._kept[size], name).copy_(part)

        self._graphs = capture_sizes(run, self._batch_sizes)

    def can_run(self, batch_size: int) -> bool:
        return batch_size <= self._batch_sizes[-1]

    def replay(self, rows: Tensor, depth: int) -> Proposal:
        """Args: rows: [batch], the requests' slots. Returns: overwritten by the next one of this size."""
        batch_size = len(rows)
        size = next(size for size in self._batch_sizes if size >= batch_size)
        self._rows[:batch_size] = rows
        if size != batch_size:
            self._rows[batch_size:size] = 0
        self._graphs[size].replay()
        parts = {name: part for name, part in self._kept[size]._asdict().items() if part is not None}
        curves = parts.pop("curves", None)
        return Proposal(
            **{name: part[:batch_size, :depth] for name, part in parts.items()},
            curves=None if curves is None else curves[: depth + 1],
        )
