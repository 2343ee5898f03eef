"""Growing chains and combs level by level, from a draft model's most likely tokens.

A comb offers more than one token a level and goes on from the likeliest; its most likely nodes are proposed. (Trees as
EAGLE-2's, arXiv:2406.16858, expand several nodes of a level: docs/lessons.md says what that was worth.)
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from tetris_sglang.drafting.proposal import Proposal, make_chains, order_nodes
from tetris_sglang.selection.survival import as_probability
from tetris_sglang.texts.match import (
    COPIED_PROB,
    Calibrate,
    Choice,
    Match,
    Matcher,
    text_evidence,
    trust,
)


class Grower(Protocol):
    """What a draft's passes need to know while they run."""

    frontier_tokens: Tensor
    """[batch, 1] int64, the tokens to expand next."""

    def grow(self, tokens: Tensor, probs: Tensor) -> None:
        """Add the children of the frontier and move it down a level.

        Args:
            tokens, probs: [batch, children], the most likely tokens after each frontier token, different from each other, and
                the draft's probability of each.
        """

    def finish(self, max_nodes: int) -> Proposal: ...


class ChainGrower:
    """The draft's most likely continuation, or the match's where that is the likelier one.

    Args:
        tokens, probs: [batch, 1]. calibrate: what probabilities are worth.
        match: as deep as the chains will be; default: none is asked.
    """

    def __init__(self, tokens: Tensor, probs: Tensor, calibrate: Calibrate = trust, match: Match | None = None) -> None:
        self._calibrate = calibrate
        self._matcher = None if match is None else Matcher(match, calibrate)
        self._is_followed: Any = None if self._matcher is None else self._matcher.exists
        self._levels: list[tuple[Tensor, ...]] = []
        self.grow(tokens, probs)

    def grow(self, tokens: Tensor, probs: Tensor) -> None:
        level: tuple[Tensor, ...] = tokens, probs
        if self._matcher is not None:
            choice = self._matcher.choose(len(self._levels), tokens, probs, self._is_followed)
            level, self._is_followed = choice, choice.is_followed
        self._levels.append(level)
        self.frontier_tokens = level[0]

    def finish(self, max_nodes: int) -> Proposal:
        parts = [torch.cat(part, dim=1)[:, :max_nodes] for part in zip(*self._levels, strict=True)]
        tokens, probs = parts[:2]
        depths = torch.arange(1, tokens.shape[1] + 1, device=tokens.device)
        if self._matcher is None:
            return make_chains(tokens, self._calibrate(probs, depths, None), probs)
        probs, accept_probs, evidence = self._matcher.score(slice(0, len(depths)), depths, Choice(*parts))
        return make_chains(tokens, accept_probs, probs, evidence)


def propose_matches(match: Match, calibrate: Calibrate, probs: Tensor | float = COPIED_PROB) -> Proposal:
    """Chains that are the matches themselves: no draft was asked.

    Args:
        probs: [batch, depth] float32, or one for all: what to believe of their tokens without calibration.
    Example: match tokens [[3, 9, 1]], match_lens [2] -> tokens [[3, 9, 1]]; match_lens [0] -> survival [[0, 0, 0]]
    """
    depths = torch.arange(1, match.tokens.shape[1] + 1, device=match.tokens.device)
    evidence = text_evidence(match)
    exists = (match.match_lens > 0)[:, None].expand(evidence.shape)
    probs = probs * exists.to(torch.float32)
    return make_chains(match.tokens, calibrate(probs, depths, evidence) * exists, probs, evidence)


class CombGrower:
    """A chain that offers runners-up beside each of its tokens: leaves, behind which nothing is drafted.

    Args:
        tokens, probs: [batch, children], the most likely first tokens. calibrate: what probabilities are worth.
        match: as deep as the chains will be; default: none is asked.
    """

    def __init__(self, tokens: Tensor, probs: Tensor, calibrate: Calibrate = trust, match: Match | None = None) -> None:
        self._calibrate = calibrate
        self._matcher = None if match is None else Matcher(match, calibrate)
        self._is_followed: Any = None if self._matcher is None else self._matcher.exists
        # Of the chain's last token, its index in the concatenation of all levels.
        self._last = torch.full((len(tokens), 1), -1, device=tokens.device)
        self._last_survival = probs.new_ones(len(tokens), 1)
        self._levels: list[tuple[Tensor, ...]] = []
        self.grow(tokens, probs)

    def grow(self, tokens: Tensor, probs: Tensor) -> None:
        level, num_children = len(self._levels), tokens.shape[1]
        evidence: list[Tensor] = []
        if self._matcher is None:
            accept_probs = self._calibrate(probs, level + 1, None)
            # Rounding must not turn around what was drawn in this order (acceptance/recursive.py).
            is_ordered = (probs[:, 1:] <= probs[:, :-1]).all(dim=1, keepdim=True)
            accept_probs = torch.where(is_ordered, accept_probs.cummin(dim=1).values, accept_probs)
        else:
            choice = self._matcher.choose(level, tokens, probs, self._is_followed)
            tokens, self._is_followed = choice.tokens, choice.is_followed
            probs, accept_probs, *evidence = self._matcher.score(slice(level, level + 1), level + 1, choice)
        # Rounding cannot lift a child above its parent: a product with at most 1 rounds to at most the other factor.
        survival = self._last_survival * as_probability(accept_probs)
        self._levels.append((tokens, survival, self._last.expand(-1, num_children), probs, *evidence))
        best = survival.argmax(dim=1, keepdim=True)
        self._last, self._last_survival = best + level * num_children, survival.gather(1, best)
        self.frontier_tokens = tokens.gather(1, best)
        if self._is_followed is not None:
            self._is_followed = self._is_followed.gather(1, best)

    def finish(self, max_nodes: int) -> Proposal:
        # Made on the device: copies from the host end the capture of a CUDA graph.
        depths = torch.cat([level[0].new_full((level[0].shape[1],), depth) for depth, level in enumerate(self._levels, 1)])
        tokens, survival, parents, *others = (torch.cat(part, dim=1) for part in zip(*self._levels, strict=True))
        return order_nodes(tokens, survival, parents, depths, max_nodes, *others)
