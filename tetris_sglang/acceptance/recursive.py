"""Recursive rejection sampling over chains and combs: drafts drawn from q, without replacement, tried one after the other.

Rejection sampling (Leviathan, Kalman, Matias, "Fast Inference from Transformers via Speculative Decoding", arXiv:2211.17192)
keeps a draft x drawn from q with probability min(1, p(x) / q(x)) and draws from the residual (p - q)+ otherwise. Where the
draft is rejected, a second one, drawn from q without the first, can be tried against that residual (Jeon et al., "Recursive
Speculative Decoding", arXiv:2402.14160): with p_1 = p, q_1 = q, draft k is kept with probability min(1, p_k(x) / q_k(x)), and

    p_(k+1) = (p_k - q_k)+ normalised,      q_(k+1) = q_k without draft k, normalised.

Each stage turns "draw from q_k" into "draw from p_k", and what is left over is p_(k+1): so what is emitted has the law p, for
any number of drafts. With one draft a position it is rejection sampling.

Unlike acceptance by shared noise, this is exact only if what decides whether draft j is verified depends on the tokens before
it alone: not on the drawn token, nor on anything drawn after it (`runtime/drafts/passes.py` gives selection nothing else),
and if the draft's draws and the uniforms are new in every step.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tetris_sglang.acceptance.tree import TreeAcceptResult


def accept_recursively(
    tokens: Tensor,
    parents: Tensor,
    draft_lens: Tensor,
    target_probs: Tensor,
    first_rows: Tensor,
    draft_probs: Tensor,
    uniforms: Tensor,
    draw: Callable[[Tensor], Tensor],
) -> TreeAcceptResult:
    """Accept along the first choices; where one is rejected, try its siblings.

    Args:
        tokens: [batch, width] int64, the grid. A column's children stand in the order in which they were drawn, and only the
            first one has children.
        parents: [batch, width] int64, as in `TreeShape`. draft_lens: [batch] integers, columns verified after the root.
        target_probs: [rows, vocab] float32, p after each verified column. first_rows: [batch] integers, a request's rows begin
            there: of column c it is row first_rows + c.
        draft_probs: [batch, depth, vocab] float32, q that drew the tokens of each level.
        uniforms: [batch, depth, max_children] float32 in [0, 1), new in every step.
        draw: weights [batch, vocab], not normalised, to one token [batch] int64 each; random numbers new in every step.
    Sync: none.
    """
    batch, width = tokens.shape
    depth, max_children = uniforms.shape[1:]
    requests, columns = torch.arange(batch, device=tokens.device), torch.arange(width, device=tokens.device)
    is_verified = (columns > 0) & (columns <= draft_lens[:, None])
    at = torch.zeros(batch, dtype=torch.int64, device=tokens.device)
    going = torch.ones(batch, dtype=torch.bool, device=tokens.device)
    num_accepted, steps = torch.zeros_like(at), [at]
    for level in range(depth):
        children = is_verified & (parents == at[:, None])
        child = children.int().argmax(dim=1)
        token = tokens[requests, child]
        kept = uniforms[:, level, 0] * draft_probs[requests, level, token] < target_probs[first_rows + at, token]
        going = going & children.any(dim=1) & kept
        at = torch.where(going, child, at)
        num_accepted = num_accepted + going
        steps.append(torch.where(going, at, width - 1))
    # The first choice that was rejected, if any, and its siblings.
    levels = num_accepted.clamp(max=depth - 1)
    children = is_verified & (parents == at[:, None])
    open_ = children.any(dim=1)
    left, q = target_probs[first_rows + at], draft_probs[requests, levels]
    for k in range(max_children):
        child = children.int().argmax(dim=1)
        exists = open_ & children.any(dim=1)
        token = tokens[requests, child]
        if k:
            kept = exists & (uniforms[requests, levels, k] * q[requests, token] < left[requests, token])
            at, open_ = torch.where(kept, child, at), open_ & ~kept
            num_accepted = num_accepted + kept
            exists = exists & ~kept
        rest = (left - q).clamp(min=0)
        total = rest.sum(dim=1, keepdim=True)
        # Nothing is left where the laws are equal but for rounding.
        left = torch.where(exists[:, None] & (total > 0), rest / total, left)
        q = q.scatter(1, token[:, None], 0.0)
        q = q / q.sum(dim=1, keepdim=True).clamp(min=torch.finfo(q.dtype).tiny)
        children = children.scatter(1, child[:, None], False)
    # After a sibling that was kept: the target's own law there.
    left = torch.where(open_[:, None], left, target_probs[first_rows + at])
    path = torch.stack(steps, dim=1).scatter(1, num_accepted[:, None], at[:, None])
    return TreeAcceptResult(num_accepted.to(torch.int32), draw(left), path)
