"""Values on their way between the host and the device, which nobody waits for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def send(values: Sequence[float] | Tensor, device: torch.device | str) -> Tensor:
    """Numbers of the host, or a tensor of it, to the device. From memory that is not pinned CUDA would make the host wait."""
    tensor = torch.as_tensor(values)
    if torch.device(device).type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


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
