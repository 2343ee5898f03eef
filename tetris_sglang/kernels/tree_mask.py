"""FlashInfer's packed custom mask for ragged trees, from lengths that only the device knows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tetris_sglang.kernels.checks import INT32, INT64, check_device, check_tensor

# Programs per request; each strides over the request's bytes, so that no length is needed on the host.
_STRIPES = 16
_BLOCK_BYTES = 64


def pack_tree_mask(
    parents: Tensor, max_depth: int, qo_indptr: Tensor, kv_indptr: Tensor, packed: Tensor, mask_indptr: Tensor
) -> None:
    """Write which keys each verified node may see: its request's committed tokens, its ancestors and itself.

    The mask of a request is a [rows, kv_len] matrix of bits in row-major order, the lowest bit of a byte first; each
    request begins at a byte of its own (FlashInfer 0.7.2, quantization.segment_packbits with bitorder "little").

    Args:
        parents: [batch, width] int64, see `TreeShape`. Nodes are listed so that a request's verified nodes are its first ones.
        max_depth: of any node.
        qo_indptr, kv_indptr: [requests + 1] int32, requests >= batch. A request's last rows keys are its verified nodes.
            Requests from `batch` on are padding: each of their rows sees every key.
        packed: [bytes] uint8, written; at least sum(ceil(rows * kv_len / 8)) (not checked: that would need a sync; what
            lies beyond is left out).
        mask_indptr: [requests + 1] int32, where each request's bytes begin (`lay_out_rows`).
    Raises:
        ValueError: shapes, dtypes or devices that do not fit.
    Sync: none; CUDA-graph safe.
    """
    check_device(parents)
    if parents.ndim != 2:
        raise ValueError(f"parents must be [batch, width], got {list(parents.shape)}")
    batch, width = parents.shape
    requests = qo_indptr.shape[0] - 1
    if requests < max(1, batch):
        raise ValueError(f"qo_indptr holds {requests} requests, parents {batch}")
    check_tensor("parents", parents, (batch, width), INT64, parents)
    for name, tensor in (("qo_indptr", qo_indptr), ("kv_indptr", kv_indptr), ("mask_indptr", mask_indptr)):
        check_tensor(name, tensor, (requests + 1,), INT32, parents)
    check_tensor("packed", packed, (packed.shape[0],), (torch.uint8,), parents)

    tree_mask_kernel[(requests, _STRIPES)](
        parents,
        max_depth,
        qo_indptr,
        kv_indptr,
        mask_indptr,
        packed,
        packed.shape[0],
        batch,
        width,
        STRIPES=_STRIPES,
        BLOCK_BYTES=_BLOCK_BYTES,
    )


def pack_tree_mask_reference(parents: Tensor, rows: list[int], kv_lens: list[int]) -> list[int]:
    """The packed bytes of all requests, in plain Python."""

    def sees(request: int, row: int, node: int) -> bool:
        while row > node:
            row = int(parents[request, row])
        return row == node

    packed = []
    for request, (num_rows, kv_len) in enumerate(zip(rows, kv_lens, strict=True)):
        committed = kv_len - num_rows
        bits = [
            request >= len(parents) or key < committed or sees(request, row, key - committed)
            for row in range(num_rows)
            for key in range(kv_len)
        ]
        for start in range(0, len(bits), 8):
            packed.append(sum(bit << place for place, bit in enumerate(bits[start : start + 8])))
    return packed


@triton.jit(do_not_specialize=["max_depth", "num_packed", "batch", "width"])
def tree_mask_kernel(
    parents,
    max_depth,
    qo_indptr,
    kv_indptr,
    mask_indptr,
    packed,
    num_packed,
    batch,
    width,
    STRIPES: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
):
    request = tl.program_id(0)
    rows = tl.load(qo_indptr + request + 1) - tl.load(qo_indptr + request)
    kv_len = tl.load(kv_indptr + request + 1) - tl.load(kv_indptr + request)
    first = tl.load(mask_indptr + request)
    num_bytes = tl.load(mask_indptr + request + 1) - first
    committed = kv_len - rows
    is_real = request < batch
    divisor = tl.maximum(kv_len, 1)

    start = tl.program_id(1) * BLOCK_BYTES
    places = tl.arange(0, 8)[None, :]
    while start < num_bytes:
        octets = start + tl.arange(0, BLOCK_BYTES)
        bits = octets[:, None] * 8 + places
        row, key = bits // divisor, bits % divisor
        exists = bits < rows * kv_len
        node = key - committed
        in_tree = exists & is_real & (node >= 0) & (row < width) & (node < width)
        # Up from the row's node; where no byte of the block has a node of the tree, nobody walks.
        at, seen = row, node == row
        first_cell = parents + request.to(tl.int64) * width
        for _ in range(tl.max(tl.max(tl.where(in_tree, max_depth, 0), axis=1), axis=0)):
            at = tl.load(first_cell + at, mask=in_tree, other=0).to(tl.int32)
            seen = seen | (node == at)
        visible = exists & ((node < 0) | (request >= batch) | (in_tree & seen))
        value = tl.sum(visible.to(tl.int32) << places, axis=1)
        write = (octets < num_bytes) & (first + octets < num_packed)
        tl.store(packed + first + octets, value.to(tl.uint8), mask=write)
        start += STRIPES * BLOCK_BYTES
