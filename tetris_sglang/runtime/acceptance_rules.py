"""Which verified drafts are kept, by `--speculative-tetris-acceptance`, and what the draft draws with for it."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from tetris_sglang.acceptance import RequestNoise, accept_block, accept_recursively, derive_seeds, exponentials
from tetris_sglang.drafting import Grid, Proposal
from tetris_sglang.packing import AcceptedTokens, PackedTokens, keep_drafts
from tetris_sglang.runtime.operations import Operations
from tetris_sglang.runtime.requests.seeds import NoiseSampler, request_noise

_DRAFT, _COINS, _RESIDUAL = 0x3C6EF372FE94F82B, 0x1F83D9ABFB41BD6B, 0x5BE0CD19137E2179
"""What the random numbers are for: fractional parts of square roots, as hash functions have them."""


class Acceptance(Protocol):
    def draft_noise(self, batch) -> RequestNoise | None:
        """What a decode batch's drafts are drawn with; None: all requests are greedy."""

    def accept(self, batch, tokens: Tensor, packed: PackedTokens, grid: Grid, proposal: Proposal | None) -> AcceptedTokens:
        """Keep drafts of the grid.

        Args:
            tokens: [num_tokens], the target's draws in the packed rows.
        """


class CoupledAcceptance:
    """Draft and target draw with the same noise, and a draft is kept iff it is the target's own draw."""

    def __init__(self, operations: Operations) -> None:
        self._operations = operations

    def draft_noise(self, batch) -> RequestNoise | None:
        return request_noise(batch.sampling_info)

    def accept(self, batch, tokens: Tensor, packed: PackedTokens, grid: Grid, proposal: Proposal | None) -> AcceptedTokens:
        return self._operations.accept_grid(tokens, packed, grid, batch.seq_lens)


class DrawnAcceptance:
    """Drafts are drawn from the draft's own law, with random numbers new in every step, and judged by a rule for such.

    Greedy requests have laws of one token, for which every rule is equality.

    Args:
        is_block: block verification, of chains; else (recursive) rejection.
        sampler: the target's, which keeps its laws. num_children: drafts of a position.
    """

    def __init__(self, operations: Operations, sampler: NoiseSampler, is_block: bool, num_children: int) -> None:
        self._operations, self._sampler = operations, sampler
        self._is_block, self._num_children = is_block, num_children
        self._greedy = CoupledAcceptance(operations)

    def draft_noise(self, batch) -> RequestNoise | None:
        noise = request_noise(batch.sampling_info)
        return None if noise is None else noise._replace(seeds=derive_seeds(noise.seeds, batch.seq_lens, _DRAFT))

    def accept(self, batch, tokens: Tensor, packed: PackedTokens, grid: Grid, proposal: Proposal | None) -> AcceptedTokens:
        if batch.sampling_info.is_all_greedy or proposal is None:
            return self._greedy.accept(batch, tokens, packed, grid, proposal)
        q, roots, seeds = proposal.draft_probs, batch.seq_lens, batch.sampling_info.sampling_seed
        p, first_rows, draft_lens = self._sampler.laws, packed.qo_indptr[:-1].long(), packed.verify_lens - 1
        candidates = grid.tokens[:, : proposal.tokens.shape[1] + 1]
        coins = torch.arange(q.shape[1] * self._num_children, device=q.device)
        uniforms = -torch.expm1(-exponentials(derive_seeds(seeds, roots, _COINS), roots, coins))
        residual_seeds = derive_seeds(seeds, roots, _RESIDUAL)

        def draw(weights: Tensor) -> Tensor:
            return self._operations.draw(weights, residual_seeds, roots)

        if self._is_block:
            kept = accept_block(candidates, draft_lens, p, first_rows, q, uniforms, draw)
            return keep_drafts(grid, batch.seq_lens, kept.num_accepted, kept.bonus_tokens)
        parents = (torch.arange(candidates.shape[1], device=q.device) - 1).clamp(min=0).expand_as(candidates)
        if grid.shape is not None:
            parents = grid.shape.parents[:, : candidates.shape[1]]
        uniforms = uniforms.unflatten(1, (q.shape[1], self._num_children))
        kept = accept_recursively(candidates, parents, draft_lens, p, first_rows, q, uniforms, draw)
        return keep_drafts(grid, batch.seq_lens, kept.num_accepted, kept.bonus_tokens, kept.path)
