"""What packing and acceptance return, and the same in torch operations, which the kernels must equal."""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from tetris_sglang.acceptance import accept_chain, accept_tree
from tetris_sglang.drafting import Grid


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

    num_accepted: Tensor
    """[batch] int32, draft tokens accepted, without the bonus token."""
    bonus_tokens: Tensor
    """[batch] int64, the target's token after the last accepted one: the next root."""
    last_tokens: Tensor
    """[batch] int64, the token before the bonus: the last accepted draft, or this step's root."""
    new_seq_lens: Tensor
    """[batch] dtype of seq_lens, seq_lens + num_accepted + 1."""
    target_tokens: Tensor
    """[batch, width] int64, the target's tokens in the grid, what is emitted first: chains as they stand (0 beyond a
    request's verified rows), trees along the accepted path (0 beyond it, or with other rules anything)."""
    path: Tensor | None = None
    """[batch, max_depth + 1] int64, the grid columns of an accepted path, see `accept_tree`; None: chains."""


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
    depths: Tensor | None = None,
) -> PackedTokens:
    """`kernels.pack.pack_rows` in torch operations: same arguments, same result, surplus rows included.

    Args:
        depths: [batch, width] int64 of trees: a token's position is its depth after seq_lens, its slot still its column.
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
    if depths is not None:
        positions = (seq_lens[requests] + depths[requests, columns]).to(torch.int64)
    return PackedTokens(
        requests=requests,
        columns=columns,
        verify_lens=verify_lens,
        qo_indptr=qo_indptr,
        positions=positions.masked_fill_(surplus, 0),
        input_ids=candidates[requests, columns].masked_fill_(surplus, 0),
        slots=slots.masked_fill_(surplus, 0),
    )


# The same for every step of as many requests, and only read. Not in a CUDA graph, whose memory they would be in.
@functools.lru_cache(maxsize=4096)
def constant(batch: int, value: int, device: torch.device) -> Tensor:
    """[batch] int32."""
    return torch.full((batch,), value, dtype=torch.int32, device=device)


@functools.lru_cache(maxsize=1024)
def _plain_layout(batch: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """qo_indptr, requests and columns where each request has one row."""
    ends = torch.arange(batch + 1, device=device)
    return ends.to(torch.int32), ends[:-1], torch.zeros(batch, dtype=torch.int64, device=device)


def pack_roots(roots: Tensor, seq_lens: Tensor, req_to_token: Tensor, req_pool_indices: Tensor) -> PackedTokens:
    """`pack_rows_reference` where nothing was drafted: one row per request, no surplus.

    Args:
        roots: [batch] int64.
    Sync: none. Not in a CUDA graph, see `constant`.
    """
    positions = seq_lens.to(torch.int64)
    ends, starts, zeros = _plain_layout(len(roots), roots.device)
    return PackedTokens(
        requests=starts,
        columns=zeros,
        verify_lens=constant(len(roots), 1, roots.device),
        qo_indptr=ends,
        positions=positions,
        input_ids=roots,
        slots=req_to_token[req_pool_indices, positions].to(torch.int64),
    )


def accept_roots(target_tokens: Tensor, roots: Tensor, seq_lens: Tensor) -> AcceptedTokens:
    """`accept_rows_reference` where nothing was drafted: one column.

    Args:
        target_tokens: [batch].
    Sync: none. Not in a CUDA graph, see `constant`.
    """
    tokens = target_tokens.to(torch.int64)
    return AcceptedTokens(
        num_accepted=constant(len(tokens), 0, tokens.device),
        bonus_tokens=tokens,
        last_tokens=roots,
        new_seq_lens=seq_lens + 1,
        target_tokens=tokens[:, None],
    )


def accept_rows_reference(
    target_tokens: Tensor,
    qo_indptr: Tensor,
    candidates: Tensor,
    seq_lens: Tensor,
    parents: Tensor | None = None,
    max_depth: int = 0,
) -> AcceptedTokens:
    """`kernels.accept.accept_rows` in torch operations: same arguments, same result.

    Sync: none; CUDA-graph safe.
    """
    width = candidates.shape[1]
    verify_lens, grid = _scatter_rows(target_tokens, qo_indptr, width)
    if parents is None:
        num_accepted, bonus_tokens = accept_chain(candidates, grid, verify_lens - 1)
        last, path = num_accepted.long()[:, None], None
    else:
        num_accepted, bonus_tokens, path = accept_tree(candidates, parents, grid, verify_lens - 1, max_depth)
        last = path.gather(1, num_accepted.long()[:, None])
        is_beyond = torch.arange(max_depth + 1, device=path.device) > num_accepted[:, None]
        grid = torch.nn.functional.pad(grid.gather(1, path).masked_fill_(is_beyond, 0), (0, width - path.shape[1]))
    return AcceptedTokens(
        num_accepted=num_accepted,
        bonus_tokens=bonus_tokens,
        last_tokens=candidates.gather(1, last).squeeze(1),
        new_seq_lens=seq_lens + num_accepted + 1,
        target_tokens=grid,
        path=path,
    )


def keep_drafts(
    grid: Grid, seq_lens: Tensor, num_accepted: Tensor, bonus_tokens: Tensor, path: Tensor | None = None
) -> AcceptedTokens:
    """What a step commits that keeps drafts which need not be the target's own draws.

    Args:
        num_accepted: [batch] integers. bonus_tokens: [batch] int64. path: as in `accept_tree`; None: the grid holds chains.
    Sync: none; CUDA-graph safe.
    """
    width = grid.tokens.shape[1]
    drafts = grid.tokens if path is None or grid.shape is None else grid.tokens.gather(1, path)
    last = num_accepted.long()[:, None]
    emitted = torch.nn.functional.pad(drafts[:, 1:], (0, width - drafts.shape[1] + 1)).scatter(1, last, bonus_tokens[:, None])
    return AcceptedTokens(
        num_accepted=num_accepted.to(torch.int32),
        bonus_tokens=bonus_tokens,
        last_tokens=drafts.gather(1, last).squeeze(1),
        new_seq_lens=seq_lens + num_accepted + 1,
        target_tokens=emitted,
        path=None if grid.shape is None else path,
    )


def keep_windows_reference(
    accepted: AcceptedTokens, qo_indptr: Tensor, hidden_states: Tensor | None, width: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`kernels.hand_over.keep_windows` in torch operations: what each request emitted, aligned to the right.

    Args:
        hidden_states: [num_tokens, size], of the packed rows; None: nobody reads them.
    Returns:
        tokens [batch, width] int64, counts [batch] int32, and the states [batch, width, size] that go with the tokens; only
        the last `counts` of a row are real.
    Sync: none; CUDA-graph safe.
    """
    counts = accepted.num_accepted + 1
    tokens = align_right(accepted.target_tokens[:, :width], counts)
    if hidden_states is None:
        return tokens, counts, None
    columns = torch.arange(width, device=counts.device) if accepted.path is None else accepted.path
    rows = align_right((qo_indptr[:-1, None] + columns).long(), counts)
    return tokens, counts, hidden_states[rows.clamp_(max=hidden_states.shape[0] - 1)]


def align_right(values: Tensor, counts: Tensor) -> Tensor:
    """Shift each row so that its first `counts` entries stand last; what comes before them is arbitrary.

    Args:
        values: [batch, width, ...]. counts: [batch] integers, 0..width.
    Sync: none; CUDA-graph safe.
    Example: [[1, 2, 0, 0]], [2] -> [[.., .., 1, 2]]
    """
    width = values.shape[1]
    index = torch.arange(width, device=values.device) - (width - counts[:, None])
    rows = torch.arange(values.shape[0], device=values.device)[:, None]
    return values[rows, index.clamp_(min=0)]


def _scatter_rows(target_tokens: Tensor, qo_indptr: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """verify_lens [batch] int32, and the packed rows' tokens as a grid [batch, width] int64, 0 where nothing was verified."""
    verify_lens = qo_indptr.diff()
    columns = torch.arange(width, device=qo_indptr.device)
    rows = (qo_indptr[:-1, None] + columns).clamp_(max=target_tokens.shape[0] - 1)
    verified = columns < verify_lens[:, None]
    return verify_lens, target_tokens[rows].to(torch.int64).masked_fill_(~verified, 0)
