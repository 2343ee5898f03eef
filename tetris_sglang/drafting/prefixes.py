"""Trees from one pass: the most likely prefixes of a block whose places were drafted apart (DDTree, arXiv:2604.12989).

What a draft offers at a place is the same behind every prefix, so a prefix is as likely as the product of its tokens, and any
token may be followed by any of the next place. DDTree takes the best prefixes from a heap, one after the other; here each level
keeps its `max_nodes` best, which holds them: of the `max_nodes` best prefixes none has more above it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tetris_sglang.drafting.proposal import Proposal, order_nodes
from tetris_sglang.selection.survival import as_probability
from tetris_sglang.texts.match import Calibrate, Match, Matcher, trust


def propose_block(
    tokens: Tensor, probs: Tensor, max_nodes: int, calibrate: Calibrate = trust, match: Match | None = None
) -> Proposal:
    """The `max_nodes` prefixes that are most likely accepted.

    Where a prefix is the match's, the match's next token is offered instead of the last one, if that is worth less.

    Args:
        tokens, probs: [batch, depth, children], at each place the most likely first, different from each other.
        calibrate, match: as `ChainGrower`'s.
    Sync: none; CUDA-graph safe.
    Example: tokens [[[3, 4], [5, 6]]], probs [[[.6, .3], [.9, .1]]], max_nodes 4 -> 3, 3 5, 4, 4 5
    """
    batch, depth, num_children = tokens.shape
    matcher = None if match is None else Matcher(match, calibrate)
    nobody = torch.zeros((batch, 1), dtype=torch.bool, device=tokens.device)
    # Of the prefixes that go on: what they are likely, whether they are the match's, where they stand among all nodes.
    survival, is_followed = probs.new_ones(batch, 1), nobody if matcher is None else matcher.exists
    index = torch.full((batch, 1), -1, device=tokens.device)
    levels: list[tuple[Tensor, ...]] = []
    first = 0
    for level in range(depth):
        offered = _offer(level, tokens[:, level], probs[:, level], calibrate, matcher, nobody)
        if matcher is not None:
            matched = _offer(level, tokens[:, level], probs[:, level], calibrate, matcher, matcher.exists)
            # [batch, prefixes, children]
            offered = tuple(
                torch.where(is_followed[:, :, None], one[:, None], other[:, None])
                for one, other in zip(matched, offered, strict=True)
            )
        else:
            offered = tuple(part[:, None].expand(-1, survival.shape[1], -1) for part in offered)
        accept_probs, level_tokens, *others = offered
        # Rounding cannot lift a child above its parent: a product with at most 1 rounds to at most the other factor.
        grown = (survival[:, :, None] * as_probability(accept_probs)).flatten(1)
        survival, best = grown.topk(min(max_nodes, grown.shape[1]), dim=1)
        parents = best // num_children
        level_tokens, *others = (part.flatten(1).gather(1, best) for part in (level_tokens, *others))
        levels.append((level_tokens, survival, index.gather(1, parents), *others))
        if match is not None:
            is_followed = is_followed.gather(1, parents) & (level_tokens == match.tokens[:, level, None])
        index = torch.arange(first, first + best.shape[1], device=tokens.device).expand(batch, -1)
        first += best.shape[1]
    # Made on the device: copies from the host end the capture of a CUDA graph.
    depths = torch.cat([part[0].new_full((part[0].shape[1],), number) for number, part in enumerate(levels, 1)])
    nodes, survival, parents, *others = (torch.cat(part, dim=1) for part in zip(*levels, strict=True))
    return order_nodes(nodes, survival, parents, depths, max_nodes, *others)


def _offer(
    level: int, tokens: Tensor, probs: Tensor, calibrate: Calibrate, matcher: Matcher | None, was_followed: Tensor
) -> tuple[Tensor, ...]:
    """What goes on behind a prefix that is the match's, or is not: each [batch, children].

    Returns: accept_probs, tokens, the draft's probs, and the evidence if there is a matcher.
    """
    if matcher is None:
        return calibrate(probs, level + 1, None), tokens, probs
    choice = matcher.choose(level, tokens, probs, was_followed)
    probs, accept_probs, evidence = matcher.score(slice(level, level + 1), level + 1, choice)
    return accept_probs, choice.tokens, probs, evidence
