"""What every kernel's host side checks: shapes, dtypes and devices, never a value."""

import torch
import triton
from torch import Tensor

INT32 = (torch.int32,)
INT64 = (torch.int64,)
INTEGERS = (torch.int32, torch.int64)


def check_device(tensor: Tensor) -> None:
    """Raise ValueError unless a kernel can run on the tensor's device."""
    if not tensor.is_cuda and not triton.knobs.runtime.interpret:
        raise ValueError(
            f"the Triton kernels need CUDA tensors, got {tensor.device}; on a CPU use the torch versions "
            "(tetris_sglang.selection, .packing), or set TRITON_INTERPRET=1 before importing Triton"
        )


def check_tensor(name: str, tensor: Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], like: Tensor) -> None:
    """Raise ValueError unless the tensor is contiguous and has this shape, dtype and `like`'s device."""
    if tensor.shape != shape or tensor.dtype not in dtypes or tensor.device != like.device:
        expected = " or ".join(str(dtype) for dtype in dtypes)
        raise ValueError(
            f"{name} must be {expected} {list(shape)} on {like.device}, got {tensor.dtype} "
            f"{list(tensor.shape)} on {tensor.device}"
        )
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()}")
