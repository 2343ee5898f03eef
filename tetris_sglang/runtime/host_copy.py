"""Values of the device that the host reads once they have come in, without waiting for them."""

from __future__ import annotations

import torch
from torch import Tensor


class HostCopy:
    """Tensors on their way to the host. On the CPU they are there, and are not copied."""

    def __init__(self, *tensors: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if tensors[0].is_cuda:
            # torch pins what it copies to without blocking.
            tensors = tuple(tensor.to("cpu", non_blocking=True) for tensor in tensors)
            self._event = torch.cuda.Event()
            self._event.record()
        self.tensors = tensors
        """Not to be read before `is_ready`."""

    @property
    def is_ready(self) -> bool:
        return self._event is None or self._event.query()
