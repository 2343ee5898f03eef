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


def know_lengths(batch) -> None:
    """Let the host have a ScheduleBatch's lengths, for attention that it plans; waits for the device unless it knows them."""
    if batch.seq_lens_cpu is None:
        batch.seq_lens_cpu = batch.seq_lens.cpu()
        batch.seq_lens_sum = int(batch.seq_lens_cpu.sum())


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
