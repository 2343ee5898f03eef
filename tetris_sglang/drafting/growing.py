"""Growing chains and trees level by level, from a draft model's most likely tokens.

A tree grows as EAGLE-2's (arXiv:2406.16858): of each level's nodes the `branches` most likely ones are expanded, each by
its `branches` most likely tokens; the whole tree's most likely nodes are proposed.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from tetris_sglang.drafting.proposal import Calibrate, Proposal, order_nodes, trust
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
        tokens, probs: [batch, 1]. calibrate: what probabilities are worth.
    """

    frontier_rows = None

    def __init__(self, tokens: Tensor, probs: Tensor, calibrate: Calibrate = trust) -> None:
        self.frontier_tokens, self._calibrate = tokens, calibrate
        self._tokens, self._probs = [tokens], [probs]

    def grow(self, tokens: Tensor, probs: Tensor) -> None:
        self.frontier_tokens = tokens[:, 0]
        self._tokens.append(tokens[:, 0])
        self._probs.append(probs[:, 0])

    def finish(self, max_nodes: int) -> Proposal:
        tokens, probs = (torch.cat(levels, dim=1)[:, :max_nodes] for levels in (self._tokens, self._probs))
        scores = self._calibrate(probs, torch.arange(1, probs.shape[1] + 1, device=probs.device))
        return Proposal(tokens, scores, None, probs)


class TreeGrower:
    """Several branches.

    Args:
        tokens, probs: [batch, branches], the most likely first tokens. calibrate: what probabilities are worth.
    """

    frontier_rows: Tensor | None = None

    def __init__(self, tokens: Tensor, probs: Tensor, calibrate: Calibrate = trust) -> None:
        batch, self._branches = tokens.shape
        self.frontier_tokens, self._calibrate = tokens, calibrate
        self._frontier_survival = as_probability(calibrate(probs, 1))
        # Indices of the frontier in the concatenation of all levels.
        self._frontier = torch.arange(self._branches, device=tokens.device).expand(batch, -1)
        self._tokens, self._survival, self._probs = [tokens], [self._frontier_survival], [probs]
        self._parents = [torch.full_like(self._frontier, -1)]

    def grow(self, tokens: Tensor, probs: Tensor) -> None:
        first = sum(level.shape[1] for level in self._tokens)
        # Rounding cannot lift a child above its parent: a product with at most 1 rounds to at most the other factor.
        scores = as_probability(self._calibrate(probs, len(self._tokens) + 1))
        survival = (self._frontier_survival[:, :, None] * scores).flatten(1)
        tokens = tokens.flatten(1)
        self._tokens.append(tokens)
        self._survival.append(survival)
        self._probs.append(probs.flatten(1))
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
            torch.cat(self._probs, dim=1),
        )
