"""What a step hands to the next one's draft: accepted tokens and the target's states of them, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tetris_sglang.kernels.checks import INT32, INT64, INTEGERS, check_device, check_tensor
from tetris_sglang.packing import AcceptedTokens

_BLOCK = 1024


def keep_windows(
    accepted: AcceptedTokens,
    qo_indptr: Tensor,
    hidden_states: Tensor | None,
    states: Tensor | None,
    slots: Tensor,
    width: int,
) -> tuple[Tensor, Tensor]:
    """Align each request's emitted tokens to the right, and keep the target's states that go with them.

    Args:
        accepted: fewer than `width` drafts of each request. qo_indptr: as in `PackedTokens`.
        hidden_states: [num_tokens, size], of the packed rows; None: nobody reads them.
        states: [slots, width, size], written: a request's in its slot, aligned as the tokens; what is not real stays.
        slots: [batch] integers. width: of a window.
    Returns:
        tokens [batch, width] int64, 0 where nothing is real, and counts [batch, 1] float32.
    Raises:
        ValueError: wrong shapes, dtypes or devices.
    Sync: none; CUDA-graph safe.
    Example: target_tokens [[5, 6, 0]], num_accepted [1], width 3 -> [[0, 5, 6]], [[2.]]
    """
    target_tokens, path = accepted.target_tokens, accepted.path
    check_device(target_tokens)
    batch, stride = target_tokens.shape
    check_tensor("target_tokens", target_tokens, (batch, stride), INT64, target_tokens)
    check_tensor("num_accepted", accepted.num_accepted, (batch,), INT32, target_tokens)
    check_tensor("qo_indptr", qo_indptr, (batch + 1,), INT32, target_tokens)
    check_tensor("slots", slots, (batch,), INTEGERS, target_tokens)
    size = 0
    if path is not None:
        check_tensor("path", path, (batch, path.shape[1]), INT64, target_tokens)
    if hidden_states is not None:
        size = hidden_states.shape[1]
        check_tensor("hidden_states", hidden_states, (len(hidden_states), size), (hidden_states.dtype,), target_tokens)
        check_tensor("states", states, (len(states), width, size), (states.dtype,), target_tokens)
    tokens = target_tokens.new_empty((batch, width))
    counts = torch.empty((batch, 1), dtype=torch.float32, device=target_tokens.device)
    if batch == 0:
        return tokens, counts
    window_kernel[(batch, width, max(1, triton.cdiv(size, _BLOCK)))](
        target_tokens,
        accepted.num_accepted,
        qo_indptr,
        path,
        hidden_states,
        states,
        slots,
        tokens,
        counts,
        stride,
        0 if path is None else path.shape[1],
        size,
        width,
        HAS_PATH=path is not None,
        HAS_STATES=hidden_states is not None,
        BLOCK=_BLOCK,
    )
    return tokens, counts


@triton.jit(do_not_specialize=["stride", "path_stride", "width"])
def window_kernel(
    target_tokens,
    num_accepted,
    qo_indptr,
    path,
    hidden_states,
    states,
    slots,
    tokens,
    counts,
    stride,
    path_stride,
    size,
    width,
    HAS_PATH: tl.constexpr,
    HAS_STATES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request, column, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    count = tl.load(num_accepted + request) + 1
    place = column - (width - count)
    is_real = place >= 0
    if block == 0:
        token = tl.load(target_tokens + request * stride + place, mask=is_real, other=0)
        tl.store(tokens + request * width + column, token)
        tl.store(counts + request, count.to(tl.float32))
    if HAS_STATES:
        node = place.to(tl.int64)
        if HAS_PATH:
            node = tl.load(path + request * path_stride + place, mask=is_real, other=0)
        row = tl.load(qo_indptr + request) + node
        slot = tl.load(slots + request).to(tl.int64)
        columns = block * BLOCK + tl.arange(0, BLOCK)
        inside = (columns < size) & is_real
        values = tl.load(hidden_states + row * size + columns, mask=inside, other=0.0)
        tl.store(states + (slot * width + column) * size + columns, values, mask=inside)
