"""Acceptance over ragged trees: a node is accepted iff it is the target's own token after its accepted parent."""

from typing import NamedTuple

import torch
from torch import Tensor


class TreeAcceptResult(NamedTuple):
    num_accepted: Tensor
    """[batch] int32, draft tokens accepted: the depth of the last accepted node."""
    bonus_tokens: Tensor
    """[batch] int64, the target's token after the last accepted node."""
    path: Tensor
    """[batch, max_depth + 1] int64, the columns of the root and of the accepted nodes; beyond num_accepted the last column."""


def accept_tree(
    candidates: Tensor, parents: Tensor, target_tokens: Tensor, draft_lens: Tensor, max_depth: int
) -> TreeAcceptResult:
    """Follow the target's own tokens from the root as far as verified nodes go.

    The exactness argument is that of `accept_chain`: target_tokens[r, c] is drawn after column c with the noise of its depth's
    place in the text, so what is emitted is the target's draw at the root, at its child with that token, and so on. Among
    siblings at most one is the draw, so trying several changes how far a step gets and nothing else.

    Args:
        candidates: [batch, width] int64, tokens of the grid (drafting.proposal); siblings differ.
        parents: [batch, width] int64, column of the parent, smaller than the node's own; the root is its own.
        target_tokens: [batch, width] int64, the target's token after each verified column.
        draft_lens: [batch] integers in 0..width - 1, nodes verified: columns 1..draft_lens.
        max_depth: of any node.
    Raises:
        ValueError: shapes that do not fit together.
    Sync: none; CUDA-graph safe.
    Example: candidates [[7, 1, 2, 5]], parents [[0, 0, 1, 0]], target_tokens [[1, 2, 9, 4]], draft_lens [3]: columns 1 and
        2 -> num_accepted [2], bonus_tokens [9], path [[0, 1, 2]]
    """
    batch, width = candidates.shape
    if not parents.shape == target_tokens.shape == (batch, width) or draft_lens.shape != (batch,):
        raise ValueError(
            f"candidates {tuple(candidates.shape)} need parents and target_tokens of the same shape and draft_lens "
            f"[{batch}], got {tuple(parents.shape)}, {tuple(target_tokens.shape)} and {tuple(draft_lens.shape)}"
        )
    columns = torch.arange(width, device=candidates.device)
    matches = (candidates == target_tokens.gather(1, parents)) & (columns <= draft_lens[:, None])
    matches[:, 0] = True
    accepted = (columns == 0).expand(batch, -1)
    for _ in range(max_depth):
        accepted = matches & accepted.gather(1, parents)
    # A node's column is larger than its parent's, so ascending columns are the path.
    path = torch.where(accepted, columns, width - 1).sort(dim=1).values[:, : max_depth + 1]
    num_accepted = accepted.sum(dim=1) - 1
    last = path.gather(1, num_accepted[:, None])
    return TreeAcceptResult(num_accepted.to(torch.int32), target_tokens.gather(1, last).squeeze(1), path.contiguous())
