"""The lengths of a ragged pass, as FlashInfer reads them, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tetris_sglang.kernels.checks import INT32, INTEGERS, check_device, check_tensor


def lay_out_rows(
    verify_lens: Tensor,
    prefix_lens: Tensor,
    num_rows: int,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    mask_indptr: Tensor | None = None,
) -> None:
    """Write where each request's query rows, its keys and the bytes of its mask begin.

    Args:
        verify_lens: [batch] int32, query rows; their sum is at most num_rows.
        prefix_lens: [batch or more] integers, keys before these rows. Below zero where the first rows are not real.
        num_rows: that the pass has. Those that no request has are the next one's, which has no other keys.
        qo_indptr, kv_indptr, mask_indptr: [requests + 1] int32, written; requests > batch. See `pack_tree_mask`.
    Raises:
        ValueError: shapes, dtypes or devices that do not fit.
    Sync: none; CUDA-graph safe; one launch.
    Example: verify_lens [2, 1], prefix_lens [5, 3], 4 rows of 3 requests
        -> qo_indptr [0, 2, 3, 4], kv_indptr [0, 7, 11, 12], mask_indptr [0, 2, 3, 4]
    """
    check_device(verify_lens)
    batch, requests = verify_lens.shape[0], qo_indptr.shape[0] - 1
    if not 0 < batch < requests or prefix_lens.shape[0] < batch:
        raise ValueError(f"{batch} requests have {prefix_lens.shape[0]} prefixes and {requests} places, one must be spare")
    check_tensor("verify_lens", verify_lens, (batch,), INT32, verify_lens)
    check_tensor("prefix_lens", prefix_lens, tuple(prefix_lens.shape), INTEGERS, verify_lens)
    outputs = {"qo_indptr": qo_indptr, "kv_indptr": kv_indptr, "mask_indptr": mask_indptr}
    for name, output in outputs.items():
        if output is not None:
            check_tensor(name, output, (requests + 1,), INT32, verify_lens)
    row_layout_kernel[(1,)](
        verify_lens,
        prefix_lens,
        num_rows,
        batch,
        requests,
        qo_indptr,
        kv_indptr,
        mask_indptr,
        HAS_MASK=mask_indptr is not None,
        BLOCK=triton.next_power_of_2(requests),
    )


def lay_out_rows_reference(verify_lens: Tensor, prefix_lens: Tensor, num_rows: int, requests: int) -> tuple[Tensor, ...]:
    """qo_indptr, kv_indptr and mask_indptr in torch."""
    batch = len(verify_lens)
    rows = torch.zeros(requests, dtype=torch.int64, device=verify_lens.device)
    rows[:batch] = verify_lens
    rows[batch] = num_rows - verify_lens.sum()
    lens = rows.clone()
    lens[:batch] += prefix_lens[:batch]
    return tuple(
        torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32) for counts in (rows, lens, (rows * lens + 7) // 8)
    )


@triton.jit(do_not_specialize=["num_rows", "batch", "requests"])
def row_layout_kernel(
    verify_lens,
    prefix_lens,
    num_rows,
    batch,
    requests,
    qo_indptr,
    kv_indptr,
    mask_indptr,
    HAS_MASK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request = tl.arange(0, BLOCK)
    is_real = request < batch
    rows = tl.load(verify_lens + request, mask=is_real, other=0)
    prefix = tl.load(prefix_lens + request, mask=is_real, other=0).to(tl.int32)
    rows = tl.where(request == batch, num_rows - tl.sum(rows, axis=0), rows)
    lens = rows + prefix
    exists = request < requests
    tl.store(qo_indptr, 0)
    tl.store(kv_indptr, 0)
    tl.store(qo_indptr + 1 + request, tl.cumsum(rows, axis=0), mask=exists)
    tl.store(kv_indptr + 1 + request, tl.cumsum(lens, axis=0), mask=exists)
    if HAS_MASK:
        tl.store(mask_indptr, 0)
        tl.store(mask_indptr + 1 + request, tl.cumsum((rows * lens + 7) // 8, axis=0), mask=exists)
