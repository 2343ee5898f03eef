"""The small steps between the two models' passes, in the form that suits the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from tetris_sglang.acceptance import draw, perturb
from tetris_sglang.drafting import Grid, drop_leaves
from tetris_sglang.packing import (
    AcceptedTokens,
    PackedTokens,
    accept_roots,
    accept_rows_reference,
    constant,
    pack_roots,
    pack_rows_reference,
)
from tetris_sglang.runtime.kv_moves import commit_paths
from tetris_sglang.runtime.requests.options import LARGEST_WEIGHT
from tetris_sglang.selection import fill_capacity, get_selector


class Operations(NamedTuple):
    select: Callable[..., Tensor]
    """As selection.fill_capacity."""
    pack: Callable[..., PackedTokens]
    """As kernels.pack.pack_rows."""
    accept: Callable[..., AcceptedTokens]
    """As kernels.accept.accept_rows."""
    perturb: Callable[..., Tensor]
    """As acceptance.noise.perturb."""
    draw: Callable[[Tensor, Tensor, Tensor], Tensor]
    """As acceptance.noise.draw."""
    drop_leaves: Callable[[Grid, Tensor], Grid]
    """As drafting.drop_leaves, where that waits for nothing."""

    def select_drafts(self, survival: Tensor, capacity_tokens: int, weights: Tensor | None = None) -> Tensor:
        """draft_lens [batch] int32, sum = capacity_tokens.

        Args:
            survival: [batch, num_nodes], as in `Proposal`.
            capacity_tokens: at most all drafts of the requests with a weight above 0.
            weights: [batch] float32 in [0, LARGEST_WEIGHT], what the requests' survivals are multiplied
                with; None: all alike. The baselines heed only zeros.
        """
        # In [0, 1], as selection wants it.
        if weights is not None:
            weights = weights / LARGEST_WEIGHT
        return self.select(survival.contiguous(), capacity_tokens, weights)

    def pack_grid(
        self,
        draft_lens: Tensor | None,
        grid: Grid,
        seq_lens: Tensor,
        req_to_token: Tensor,
        rows: Tensor,
        num_tokens: int,
    ) -> PackedTokens:
        """`draft_lens` None: nothing was drafted."""
        if draft_lens is None and num_tokens == len(seq_lens):
            return pack_roots(grid.tokens[:, 0], seq_lens, req_to_token, rows)
        if draft_lens is None:
            draft_lens = constant(len(seq_lens), 0, seq_lens.device)
        depths = None if grid.shape is None else grid.shape.depths
        return self.pack(draft_lens, grid.tokens, seq_lens, req_to_token, rows, num_tokens, depths=depths)

    def accept_grid(self, target_tokens: Tensor, packed: PackedTokens, grid: Grid, seq_lens: Tensor) -> AcceptedTokens:
        if grid.max_depth == 0:
            return accept_roots(target_tokens, grid.tokens[:, 0], seq_lens)
        parents = None if grid.shape is None else grid.shape.parents
        return self.accept(target_tokens, packed.qo_indptr, grid.tokens, seq_lens, parents, grid.max_depth)


def warm_up(
    operations: Operations,
    max_batch_size: int,
    num_drafted: Sequence[int],
    width: int,
    has_combs: bool,
    req_to_token: Tensor,
    kv_pool,
) -> None:
    """Run every operation once for each power of two up to the largest batch: Triton compiles for each.

    Args:
        num_drafted: tokens that a request may draft in a step. width: columns of the grid.
        has_combs: whether runners-up are drafted.
        req_to_token: SGLang's table. kv_pool: the target's. Both are only read.
    """
    device = req_to_token.device
    for exponent in range(max(1, max_batch_size - 1).bit_length() + 1):
        batch_size = min(2**exponent, max_batch_size)
        capacity_tokens = batch_size
        candidates = torch.zeros((batch_size, width), dtype=torch.int64, device=device)
        seq_lens = torch.ones(batch_size, dtype=torch.int64, device=device)
        rows = torch.zeros_like(seq_lens)
        for num_drafts in num_drafted:
            survival = torch.full((batch_size, num_drafts), 0.5, device=device)
            draft_lens = operations.select(survival, capacity_tokens)
            operations.select(survival, capacity_tokens, torch.ones(batch_size, device=device))
        num_tokens = batch_size + capacity_tokens
        packed = operations.pack(draft_lens, candidates, seq_lens, req_to_token, rows, num_tokens)
        operations.pack(torch.zeros_like(draft_lens), candidates[:, :1].contiguous(), seq_lens, req_to_token, rows, num_tokens)
        parents = torch.zeros_like(candidates)
        if has_combs:
            operations.pack(draft_lens, candidates, seq_lens, req_to_token, rows, num_tokens, depths=parents)
        # Greedy tokens and sampled ones.
        for dtype in (torch.int64, torch.int32):
            tokens = packed.input_ids.to(dtype)
            operations.accept(tokens, packed.qo_indptr, candidates, seq_lens)
            if has_combs:  # what is accepted stands at its depth: nothing moves
                accepted = operations.accept(tokens, packed.qo_indptr, candidates, seq_lens, parents, 1)
                commit_paths(kv_pool, packed, accepted)
    # Drafts compile what they need while their graphs are captured.
    operations.draw(torch.ones((1, 2), device=device), rows[:1], rows[:1])


def get_operations(device: str, selection: str) -> Operations:
    """One Triton launch each on CUDA, torch operations elsewhere; the same results.

    Args:
        selection: "tetris", or a baseline, which is torch everywhere.
    """
    select = partial(fill_capacity, select=get_selector(selection))
    if device != "cuda":
        return Operations(select, pack_rows_reference, accept_rows_reference, perturb, draw, drop_leaves)
    from tetris_sglang.kernels import noise
    from tetris_sglang.kernels.accept import accept_rows
    from tetris_sglang.kernels.pack import pack_rows
    from tetris_sglang.kernels.select import select_drafts

    return Operations(
        select_drafts if selection == "tetris" else select,
        pack_rows,
        accept_rows,
        noise.perturb,
        noise.draw,
        lambda grid, draft_lens: grid,
    )
