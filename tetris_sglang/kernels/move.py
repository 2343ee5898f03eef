"""Moving key-value rows within each request of a batch, all layers in one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tetris_sglang.kernels.checks import INT64, check_device, check_tensor

LARGEST_NUM_ROWS = 1024
"""Of a request: what one program still keeps in registers, two words of each."""
WORD_BYTES = 8
_WORDS_AT_ONCE = 2**11


def move_rows(data_ptrs: Tensor, row_bytes: Tensor, max_bytes: int, target: Tensor, source: Tensor) -> None:
    """Copy row source[r, i] to row target[r, i] of every buffer, as if all of a request's were read before any is written.

    SGLang's own move (kernels/ops/kvcache/cache_move.py) promises that for up to 256 rows in one launch, but lets one warp
    write while another still reads; here a barrier lies in between.

    Args:
        data_ptrs: [buffers] uint64, addresses of the buffers, rows one after the other.
        row_bytes: [buffers] int64, bytes of one row, multiples of WORD_BYTES (not checked: that would need a sync).
            max_bytes: at least the largest of them.
        target, source: [batch, n] int64, n <= LARGEST_NUM_ROWS. Requests share no rows, but for those that nobody reads.
    Raises:
        ValueError: wrong shapes, dtypes or devices, or too many rows.
    Sync: none; CUDA-graph safe.
    Example: one buffer with rows a b c d, target [[0, 1]], source [[1, 2]] -> b c c d
    """
    check_device(target)
    if target.ndim != 2 or not target.shape[1] <= LARGEST_NUM_ROWS:
        raise ValueError(f"target must be [batch, n <= {LARGEST_NUM_ROWS}], got {list(target.shape)}")
    check_tensor("target", target, tuple(target.shape), INT64, target)
    check_tensor("source", source, tuple(target.shape), INT64, target)
    check_tensor("data_ptrs", data_ptrs, (data_ptrs.numel(),), (torch.uint64,), target)
    check_tensor("row_bytes", row_bytes, (data_ptrs.numel(),), INT64, target)
    batch, num_rows = target.shape
    if target.numel() == 0:
        return
    rows, block = plan_move(num_rows)
    move_kernel[(data_ptrs.numel(), batch, triton.cdiv(max_bytes, block * WORD_BYTES))](
        data_ptrs, row_bytes, target, source, num_rows, ROWS=rows, BLOCK=block
    )


def plan_move(num_rows: int) -> tuple[int, int]:
    """The program's rows (a power of two), and its words of each."""
    rows = triton.next_power_of_2(num_rows)
    return rows, min(64, _WORDS_AT_ONCE // rows)


@triton.jit(do_not_specialize=["num_rows"])
def move_kernel(data_ptrs, row_bytes, target, source, num_rows, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    buffer, request, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = tl.load(data_ptrs + buffer).to(tl.pointer_type(tl.int64))
    width = tl.load(row_bytes + buffer) // 8  # WORD_BYTES
    rows = tl.arange(0, ROWS)
    is_row = rows < num_rows
    place = request.to(tl.int64) * num_rows + rows
    columns = block * BLOCK + tl.arange(0, BLOCK)
    inside = is_row[:, None] & (columns < width)[None, :]

    read = tl.load(source + place, mask=is_row, other=0)
    values = tl.load(start + read[:, None] * width + columns[None, :], mask=inside, other=0)
    tl.debug_barrier()
    written = tl.load(target + place, mask=is_row, other=0)
    tl.store(start + written[:, None] * width + columns[None, :], values, mask=inside)
