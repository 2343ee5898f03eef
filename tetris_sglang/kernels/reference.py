"""What packing and acceptance return, and the same in torch operations, which the kernels must equal."""

from typing import NamedTuple

import torch
from torch import Tensor

from tetris_sglang.acceptance import accept_chain


class PackedTokens(NamedTuple):
    """The grid cells that the target verifies, row after row."""

    requests: Tensor
    """[num_tokens] int64, the batch row of each packed token."""
    columns: Tensor
    """[num_tokens] int64, its grid column."""
    verify_lens: Tensor
    """[batch] int32, draft_lens + 1."""
    qo_indptr: Tensor
    """[batch + 1] int32, where each request's rows begin; the last entry is where the surplus begins."""
    positions: Tensor
    """[num_tokens] int64."""
    input_ids: Tensor
    """[num_tokens] int64."""
    slots: Tensor
    """[num_tokens] int64, where the target writes the token's KV."""


class AcceptedTokens(NamedTuple):
    """What a step commits."""

    accept_lens: Tensor
    """[batch] int32, draft tokens accepted, without the bonus token."""
    bonus_tokens: Tensor
    """[batch] int64, the target's token after the last accepted one: the next root."""
    last_tokens: Tensor
    """[batch] int64, the token before the bonus: the last accepted draft, or this step's root."""
    new_seq_lens: Tensor
    """[batch] dtype of seq_lens, seq_lens + accept_lens + 1."""
    target_tokens: Tensor
    """[batch, width] int64, the target's tokens in the grid; 0 beyond a request's verified rows."""


def empty_packed_tokens(batch: int, num_tokens: int, device: torch.device) -> PackedTokens:
    """Uninitialised tensors, to be packed into."""

    def empty(length: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(length, dtype=dtype, device=device)

    return PackedTokens(
        requests=empty(num_tokens, torch.int64),
        columns=empty(num_tokens, torch.int64),
        verify_lens=empty(batch, torch.int32),
        qo_indptr=empty(batch + 1, torch.int32),
        positions=empty(num_tokens, torch.int64),
        input_ids=empty(num_tokens, torch.int64),
        slots=empty(num_tokens, torch.int64),
    )


def pack_rows_reference(
    draft_lens: Tensor,
    candidates: Tensor,
    seq_lens: Tensor,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    num_tokens: int,
    padding_slot: int = 0,
) -> PackedTokens:
    """`kernels.pack.pack_rows` in torch operations: same arguments, same result, surplus rows included.

    Sync: none; CUDA-graph safe.
    """
    batch, device = draft_lens.shape[0], draft_lens.device
    verify_lens = draft_lens + 1
    qo_indptr = torch.nn.functional.pad(verify_lens.cumsum(0, dtype=torch.int32), (1, 0))
    rows = torch.arange(num_tokens, device=device)
    surplus = rows >= qo_indptr[-1]
    # The request whose rows have begun last, clamped for the surplus.
    requests = (torch.searchsorted(qo_indptr.long(), rows, right=True) - 1).clamp_(max=batch - 1)
    columns = (rows - qo_indptr[requests]).masked_fill_(surplus, 0)
    positions = (seq_lens[requests] + columns).to(torch.int64)
    slots = req_to_token[req_pool_indices[requests], positions].to(torch.int64)
    return PackedTokens(
        requests=requests,
        columns=columns,
        verify_lens=verify_lens,
        qo_indptr=qo_indptr,
        positions=positions.masked_fill_(surplus, 0),
        input_ids=candidates[requests, columns].masked_fill_(surplus, 0),
        slots=slots.masked_fill_(surplus, padding_slot),
    )


def accept_rows_reference(
    target_tokens: Tensor, qo_indptr: Tensor, candidates: Tensor, seq_lens: Tensor
) -> AcceptedTokens:
    """`kernels.accept.accept_rows` in torch operations: same arguments, same result.

    Sync: none; CUDA-graph safe.
    """
    verify_lens = qo_indptr.diff()
    columns = torch.arange(candidates.shape[1], device=candidates.device)
    rows = (qo_indptr[:-1, None] + columns).clamp_(max=target_tokens.shape[0] - 1)
    verified = columns < verify_lens[:, None]
    grid = target_tokens[rows].to(torch.int64).masked_fill_(~verified, 0)
    accept_lens, bonus_tokens = accept_chain(candidates, grid, verify_lens - 1)
    return AcceptedTokens(
        accept_lens=accept_lens,
        bonus_tokens=bonus_tokens,
        last_tokens=candidates.gather(1, accept_lens.long()[:, None]).squeeze(1),
        new_seq_lens=seq_lens + accept_lens + 1,
        target_tokens=grid,
    )
