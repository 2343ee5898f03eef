"""Growing chains and trees level by level, from a draft model's most likely tokens.

A tree grows as EAGLE-2's (arXiv:2406.16858): of each level's nodes the `branches` most likely ones are expanded, each by
its `branches` most likely tokens; the whole tree's most likely nodes are proposed.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from tetris_sglang.drafting.proposal import Proposal, order_nodes
from tetris_sglang.selection.survival import as_probability


class Grower(Protocol):
    """What a draft's passes need to know while they run; one row per request and branch."""

    frontier_tokens: Tensor
    """[batch, branches] int64, the tokens to expand next."""
    frontier_rows: Tensor | None
    """[batch, branches] int64, the previous pass's row of each one's parent; None: its own row."""

    def grow(self, tokens: Tensor, probs: Tensor) -> None:
        """Add the children of the frontier and move it down a level.

        Args:
            tokens, probs: [batch, branches, branches], the most likely tokens after each frontier token, different from
                each other, and the draft's probability of each.
        """

    def finish(self, max_nodes: int) -> Proposal: ...


class ChainGrower:
    """One branch: the draft's most likely continuation.

    Args:
        tokens, probs: [batch, 1].
    """

    frontier_rows = None

    def __init__(self, tokens: Tensor, probs: Tensor) -> None:
        self.frontier_tokens = tokens
        self._tokens, self._probs = [tokens], [probs]

    def grow(self, tokens: Tensor, probs: Tensor) -> None:
        self.frontier_tokens = tokens[:, 0]
        self._tokens.append(tokens[:, 0])
        self._probs.append(probs[:, 0])

    def finish(self, max_nodes: int) -> Proposal:
        return Proposal(
            torch.cat(self._tokens, dim=1)[:, :max_nodes], torch.cat(self._probs, dim=1)[:, :max_nodes]
        )


class TreeGrower:
    """Several branches.

    Args:
        tokens, probs: [batch, branches], the most likely first tokens.
    """

    frontier_rows: Tensor | None = None

    def __init__(self, tokens: Tensor, probs: Tensor) -> None:
        batch, self._branches = tokens.shape
        self.frontier_tokens = tokens
        self._frontier_survival = as_probability(probs)
        # Indices of the frontier in the concatenation of all levels.
        self._frontier = torch.arange(self._branches, device=tokens.device).expand(batch, -1)
        self._tokens, self._survival = [tokens], [self._frontier_survival]
        self._parents = [torch.full_like(self._frontier, -1)]

    def grow(self, tokens: Tensor, probs: Tensor) -> None:
        first = sum(level.shape[1] for level in self._tokens)
        # Rounding cannot lift a child above its parent: a product with at most 1 rounds to at most the other factor.
        survival = (self._frontier_survival[:, :, None] * as_probability(probs)).flatten(1)
        tokens = tokens.flatten(1)
        self._tokens.append(tokens)
        self._survival.append(survival)
        self._parents.append(self._frontier.repeat_interleave(self._branches, dim=1))
        self._frontier_survival, chosen = survival.topk(self._branches, dim=1)
        self._frontier = chosen + first
        self.frontier_tokens = tokens.gather(1, chosen)
        self.frontier_rows = chosen // self._branches

    def finish(self, max_nodes: int) -> Proposal:
        sizes = torch.tensor([level.shape[1] for level in self._tokens])
        depths = torch.arange(1, len(self._tokens) + 1).repeat_interleave(sizes)
        return order_nodes(
            torch.cat(self._tokens, dim=1),
            torch.cat(self._survival, dim=1),
            torch.cat(self._parents, dim=1),
            depths.to(self.frontier_tokens.device),
            max_nodes,
        )
