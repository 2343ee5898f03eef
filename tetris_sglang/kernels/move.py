"""Moving the keys and values of accepted tree nodes to where a chain would have them, all layers in one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tetris_sglang.kernels.checks import INT32, INT64, check_device, check_tensor

LARGEST_DEPTH = 1023
"""Of a node: what one program still keeps in registers, two words of each row."""
WORD_BYTES = 8
_WORDS_AT_ONCE = 2**11


def move_paths(
    data_ptrs: Tensor,
    row_bytes: Tensor,
    max_bytes: int,
    slots: Tensor,
    qo_indptr: Tensor,
    path: Tensor,
    num_accepted: Tensor,
) -> None:
    """Copy the row of every accepted node to the slot of its depth, as if all of a request's were read before any is written.

    SGLang's own move (kernels/ops/kvcache/cache_move.py) promises that for up to 256 rows in one launch, but lets one warp
    write while another still reads; here a barrier lies in between.

    Args:
        data_ptrs: [buffers] uint64, addresses of the buffers, rows one after the other.
        row_bytes: [buffers] int64, bytes of one row, multiples of WORD_BYTES (not checked: that would need a sync).
            max_bytes: at least the largest of them.
        slots, qo_indptr: as in `PackedTokens`: of request r's column c the slot is slots[qo_indptr[r] + c].
        path: [batch, max_depth + 1] int64, see `accept_tree`; max_depth <= LARGEST_DEPTH. num_accepted: [batch] int32.
    Raises:
        ValueError: wrong shapes, dtypes or devices, or too deep.
    Sync: none; CUDA-graph safe.
    Example: one buffer with rows a b c d, slots [0, 1, 2, 3], path [[0, 2, 3]], num_accepted [2] -> a c d d
    """
    check_device(slots)
    if path.ndim != 2 or not 1 <= path.shape[1] <= LARGEST_DEPTH + 1:
        raise ValueError(f"path must be [batch, max_depth + 1 <= {LARGEST_DEPTH + 1}], got {list(path.shape)}")
    batch, num_columns = path.shape
    check_tensor("slots", slots, tuple(slots.shape), INT64, slots)
    check_tensor("qo_indptr", qo_indptr, (batch + 1,), INT32, slots)
    check_tensor("path", path, (batch, num_columns), INT64, slots)
    check_tensor("num_accepted", num_accepted, (batch,), INT32, slots)
    check_tensor("data_ptrs", data_ptrs, (data_ptrs.numel(),), (torch.uint64,), slots)
    check_tensor("row_bytes", row_bytes, (data_ptrs.numel(),), INT64, slots)
    if batch == 0:
        return
    rows, block = plan_move(num_columns)
    move_kernel[(data_ptrs.numel(), batch, triton.cdiv(max_bytes, block * WORD_BYTES))](
        data_ptrs, row_bytes, slots, qo_indptr, path, num_accepted, num_columns, ROWS=rows, BLOCK=block
    )


def plan_move(num_columns: int) -> tuple[int, int]:
    """The program's rows (a power of two), and its words of each."""
    rows = triton.next_power_of_2(num_columns)
    return rows, min(64, _WORDS_AT_ONCE // rows)


@triton.jit(do_not_specialize=["num_columns"])
def move_kernel(
    data_ptrs,
    row_bytes,
    slots,
    qo_indptr,
    path,
    num_accepted,
    num_columns,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    buffer, request, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = tl.load(data_ptrs + buffer).to(tl.pointer_type(tl.int64))
    width = tl.load(row_bytes + buffer) // 8  # WORD_BYTES
    depths = tl.arange(0, ROWS)
    first = tl.load(qo_indptr + request)
    is_accepted = (depths <= tl.load(num_accepted + request)) & (depths < num_columns)
    nodes = tl.load(path + request.to(tl.int64) * num_columns + depths, mask=is_accepted, other=0)
    moves = is_accepted & (nodes != depths)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    inside = moves[:, None] & (columns < width)[None, :]

    read = tl.load(slots + first + nodes, mask=moves, other=0)
    values = tl.load(start + read[:, None] * width + columns[None, :], mask=inside, other=0)
    tl.debug_barrier()
    written = tl.load(slots + first + depths, mask=moves, other=0)
    tl.store(start + written[:, None] * width + columns[None, :], values, mask=inside)
