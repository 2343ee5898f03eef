"""Tensor-parallel ranks must do the same in every step: what the first one decides holds for all.

Every rank runs the scheduler, the draft and the selection for itself. Passes of unlike sizes would wait for each other for
ever, and passes over unlike tokens add up to nonsense. So whatever may differ between ranks is the first one's: what depends
on a clock or on when the host reads a value (`agree`), and what comes from floating-point numbers (`share`). SGLang's DSPARK
does likewise (speculative/spec_tp_sync.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class Ranks:
    """The ranks that serve together with this one.

    Args:
        group: SGLang's GroupCoordinator of the tensor-parallel ranks; None: this process serves alone.
    """

    def __init__(self, group: Any = None) -> None:
        self._group = group if group is not None and group.world_size > 1 else None

    @property
    def count(self) -> int:
        return 1 if self._group is None else self._group.world_size

    @property
    def is_first(self) -> bool:
        return self._group is None or self._group.rank_in_group == 0

    def require_alike(self, value: Any, what: str) -> None:
        """All ranks have to ask.

        Raises:
            ValueError: on every rank, if their values differ.
        """
        if self._group is None:
            return
        values = self._group.all_gather_object(value)
        if any(other != value for other in values):
            raise ValueError(
                f"{what} differ between the ranks of --tp-size {self.count}: {values}. Give every node the same flags and "
                f"SGLANG_TETRIS_* variables."
            )

    def agree(self, value: T) -> T:
        """The first rank's `value`, which can be pickled; all ranks have to ask. Does not wait for the device."""
        if self._group is None:
            return value
        # Not over SGLang's message queue (`broadcast_object`): a rank that is gone would be waited for without end there.
        values = [value]
        torch.distributed.broadcast_object_list(values, src=self._group.first_rank, group=self._group.cpu_group)
        return values[0]

    def share(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The first rank's integers, in one broadcast on the device; shapes and types are those of every rank's own.

        Sync: none.
        """
        if self._group is None:
            return list(tensors)
        joined = torch.cat([tensor.flatten().to(torch.int64) for tensor in tensors])
        self._group.broadcast(joined, src=0)
        parts = joined.split([tensor.numel() for tensor in tensors])
        return [part.view(tensor.shape).to(tensor.dtype) for part, tensor in zip(parts, tensors, strict=True)]
