"""Device memory is host memory, so a CUDA tensor can be read and written as a CPU tensor of the same bytes."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor


def on_host(value: Any) -> Any:
    """A CUDA tensor as a CPU tensor over the same addresses, which it does not own; anything else as it is."""
    if not isinstance(value, Tensor) or not value.is_cuda:
        return value
    size, stride = value.size(), value.stride()
    if value.numel() == 0:
        return torch.empty_strided(size, stride, dtype=value.dtype)
    extent = 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    octets = (ctypes.c_uint8 * (extent * value.element_size())).from_address(value.data_ptr())
    storage = torch.frombuffer(octets, dtype=torch.uint8).untyped_storage()
    return torch.empty(0, dtype=value.dtype).set_(storage, 0, size, stride)


def on_device(value: Any) -> Any:
    """A CPU tensor as a CUDA tensor with its values and strides; anything else as it is."""
    if not isinstance(value, Tensor) or value.is_cuda:
        return value
    device = empty_like_on_device(value)
    on_host(device).copy_(value)
    return device


def empty_like_on_device(value: Tensor) -> Tensor:
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="cuda")


def poison(tensor: Tensor) -> None:
    """Fill fresh memory [any] on the host's side with what no code may rely on: on a GPU it holds whatever was there."""
    if tensor.is_floating_point():
        tensor.fill_(torch.nan)
    elif tensor.dtype == torch.bool:
        tensor.fill_(True)
    elif not tensor.is_complex():
        tensor.fill_(min(torch.iinfo(tensor.dtype).max, 0x5A5A5A5A))
