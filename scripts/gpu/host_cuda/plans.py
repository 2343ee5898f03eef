"""FlashInfer's real `plan`, compiled alone (plan.cpp), in the form of its modules' functions."""

from __future__ import annotations

import ctypes
from functools import cache

from torch import Tensor

_MAX_NUMBERS = 32


@cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL("libhost_plan.so")


def _call(function: str, workspaces: tuple[Tensor, Tensor, Tensor], *arguments: int | Tensor) -> list[int]:
    floats, ints, pinned = workspaces
    out = (ctypes.c_int64 * _MAX_NUMBERS)()
    values = [ctypes.c_void_p(a.data_ptr()) if isinstance(a, Tensor) else ctypes.c_int64(a) for a in arguments]
    count = getattr(_library(), function)(
        ctypes.c_void_p(floats.data_ptr()),
        ctypes.c_size_t(floats.nbytes),
        ctypes.c_void_p(ints.data_ptr()),
        ctypes.c_void_p(pinned.data_ptr()),
        ctypes.c_size_t(ints.nbytes),
        *values,
        out,
    )
    if count < 0:
        raise RuntimeError(f"{function} failed; the log says why")
    return list(out[:count])


def plan_prefill(
    floats: Tensor, ints: Tensor, pinned: Tensor, qo_indptr: Tensor, kv_indptr: Tensor, kv_lens: Tensor, rows: int,
    batch: int, heads: int, kv_heads: int, page_size: int, has_graph: bool, head_dim_qk: int, head_dim_vo: int,
    causal: bool, window_left: int, fixed_split_size: int, disable_split_kv: bool, colocated_ctas: int = 0,
    uniform_q_len: int = 0,
) -> list[int]:  # fmt: skip
    """Args: as of `plan` in csrc/batch_prefill.cu; indptrs on the host."""
    return _call(
        "host_cuda_plan_prefill", (floats, ints, pinned), qo_indptr, kv_indptr, rows, batch, heads, kv_heads, page_size,
        int(has_graph), head_dim_qk, head_dim_vo, window_left, fixed_split_size, int(disable_split_kv), colocated_ctas,
        uniform_q_len,
    )  # fmt: skip


def plan_decode(
    floats: Tensor, ints: Tensor, pinned: Tensor, indptr: Tensor, batch: int, heads: int, kv_heads: int, page_size: int,
    has_graph: bool, window_left: int, soft_cap: float, head_dim_qk: int, head_dim_vo: int, *_,
) -> list[int]:  # fmt: skip
    """Args: as of `plan` in csrc/batch_decode.cu; indptr on the host."""
    return _call(
        "host_cuda_plan_decode", (floats, ints, pinned), indptr, batch, heads, kv_heads, page_size, int(has_graph), head_dim_qk
    )
