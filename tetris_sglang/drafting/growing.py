"""Growing chains and trees level by level, from a draft model's most likely tokens.

A tree grows as EAGLE-2's (arXiv:2406.16858): of each level's nodes the `branches` most likely ones are expanded, each by
its `branches` most likely tokens; the whole tree's most likely nodes are proposed.
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
    """One branch: the draft's most likely continuation, or the match's where that is the likelier one.

    Args:
        tokens, probs: [batch, 1]. calibrate: what probabilities are worth.
        match: as deep as the chains will be; default: none is asked.
    """

    frontier_rows = None

    def __init__(self, tokens: Tensor, probs: Tensor, calibrate: Calibrate = trust, match: Match | None = None) -> None:
        self._calibrate = calibrate
        self._matcher = None if match is None else Matcher(match, calibrate)
        self._is_followed: Any = None if self._matcher is None else self._matcher.exists
        self._levels: list[tuple[Tensor, ...]] = []
        self.grow(tokens[:, None], probs[:, None])

    def grow(self, tokens: Tensor, probs: Tensor) -> None:
        level: tuple[Tensor, ...] = tokens[:, 0], probs[:, 0]
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


class TreeGrower:
    """Several tokens offered after each expanded one.

    Args:
        tokens, probs: [batch, children], the most likely first tokens. calibrate: what probabilities are worth.
        match: as deep as the trees will be; default: none is asked.
        num_expanded: nodes of each level that are expanded, 1 (combs: a chain whose tokens have siblings) to children.
    """

    frontier_rows: Tensor | None = None

    def __init__(
        self,
        tokens: Tensor,
        probs: Tensor,
        calibrate: Calibrate = trust,
        match: Match | None = None,
        num_expanded: int | None = None,
    ) -> None:
        batch, self._children = tokens.shape
        self._num_expanded = num_expanded or self._children
        self._calibrate = calibrate
        self._matcher = None if match is None else Matcher(match, calibrate)
        self._is_followed: Any = None if self._matcher is None else self._matcher.exists
        # Indices of the frontier in the concatenation of all levels.
        self._frontier = torch.full((batch, 1), -1, device=tokens.device)
        self._frontier_survival = probs.new_ones(batch, 1)
        self._tokens: list[Tensor] = []
        self._probs: list[Tensor] = []
        self._survival: list[Tensor] = []
        self._parents: list[Tensor] = []
        self._evidence: list[Tensor] = []
        self._add(tokens[:, None], probs[:, None])
        if self._num_expanded == self._children:
            # The first level's nodes are all expanded, as they stand.
            self._move_to(torch.arange(self._children, device=tokens.device).expand(batch, -1))
        else:
            self._move_to(self._choose())

    def grow(self, tokens: Tensor, probs: Tensor) -> None:
        self._add(tokens, probs)
        chosen = self._choose()
        self._move_to(chosen)
        if self._num_expanded > 1:
            self.frontier_rows = chosen // self._children

    def _choose(self) -> Tensor:
        """[batch, num_expanded], the most likely nodes of the last level."""
        return self._survival[-1].topk(self._num_expanded, dim=1).indices

    def _add(self, tokens: Tensor, probs: Tensor) -> None:
        """Take in the frontier's children [batch, frontier, children]."""
        level = len(self._tokens)
        if self._matcher is None:
            tokens, probs = tokens.flatten(1), probs.flatten(1)
            accept_probs = self._calibrate(probs, level + 1, None)
        else:
            choice = self._matcher.choose(level, tokens, probs, self._is_followed)
            tokens, self._is_followed = choice.tokens, choice.is_followed
            probs, accept_probs, evidence = self._matcher.score(slice(level, level + 1), level + 1, choice, self._children)
            self._evidence.append(evidence)
        # Rounding cannot lift a child above its parent: a product with at most 1 rounds to at most the other factor.
        survival = self._frontier_survival.repeat_interleave(self._children, dim=1) * as_probability(accept_probs)
        self._tokens.append(tokens)
        self._probs.append(probs)
        self._survival.append(survival)
        self._parents.append(self._frontier.repeat_interleave(self._children, dim=1))

    def _move_to(self, chosen: Tensor) -> None:
        """Make these nodes [batch, num_expanded] of the last level the frontier."""
        self._frontier = chosen + sum(level.shape[1] for level in self._tokens[:-1])
        self._frontier_survival = self._survival[-1].gather(1, chosen)
        self.frontier_tokens = self._tokens[-1].gather(1, chosen)
        if self._is_followed is not None:
            self._is_followed = self._is_followed.gather(1, chosen)

    def finish(self, max_nodes: int) -> Proposal:
        # Made on the device: copies from the host end the capture of a CUDA graph.
        depths = torch.cat([level.new_full((level.shape[1],), depth) for depth, level in enumerate(self._tokens, 1)])
        return order_nodes(
            torch.cat(self._tokens, dim=1),
            torch.cat(self._survival, dim=1),
            torch.cat(self._parents, dim=1),
            depths,
            max_nodes,
            torch.cat(self._probs, dim=1),
            torch.cat(self._evidence, dim=1) if self._evidence else None,
        )
