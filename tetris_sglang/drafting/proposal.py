"""One step's drafts for a batch, in the numbering that selection, verification and acceptance share.

Numbering: a request's tokens are columns of a grid. Column 0 is the root (the last token known), column 1 + i is node i.
Nodes stand in descending order of survival, shallower ones first among equals. A node never survives without its parent,
so a parent stands before its children, and every batch-wide choice of the C most likely nodes is a prefix of each
request's list: the same `draft_lens` describe chains and trees.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tetris_sglang.selection.survival import as_probability, survival_from_probs


class TreeShape(NamedTuple):
    """How the columns of a grid hang together."""

    parents: Tensor
    """[batch, width] int64, the column of each column's parent; the root is its own."""
    depths: Tensor
    """[batch, width] int64, 0 for the root."""


class Proposal(NamedTuple):
    tokens: Tensor
    """[batch, num_nodes] int64."""
    survival: Tensor
    """[batch, num_nodes] float32 in [0, 1], non-increasing: how likely each token is accepted, with all before it."""
    probs: Tensor
    """[batch, num_nodes] float32, the draft's own probability of each token, given those before it."""
    shape: TreeShape | None = None
    """[batch, num_nodes + 1]; None: chains, node i follows node i - 1."""
    evidence: Tensor | None = None
    """[batch, num_nodes] int64, what texts say of each token, see `texts.match`; None: was not asked."""
    draft_probs: Tensor | None = None
    """[batch, depth, vocab] float32, the laws that each level's tokens were drawn from; None: they were not drawn from them."""
    curves: Tensor | None = None
    """See `capacity.measure_curves`; None: not measured where this was drafted."""

    @property
    def depths(self) -> Tensor:
        """[num_nodes] or [batch, num_nodes] int64, from 1."""
        if self.shape is None:
            return torch.arange(1, self.tokens.shape[1] + 1, device=self.tokens.device)
        return self.shape.depths[:, 1:]


def make_chains(tokens: Tensor, accept_probs: Tensor, probs: Tensor, evidence: Tensor | None = None) -> Proposal:
    """Chains.

    Args:
        tokens: [batch, num_nodes] int64. accept_probs: [batch, num_nodes] float32, how likely each token is accepted, given
            those before it. probs, evidence: as in `Proposal`.
    Sync: none; CUDA-graph safe.
    Example: accept_probs [[.9, .5]] -> survival [[.9, .45]]
    """
    return Proposal(tokens, survival_from_probs(accept_probs), probs, None, evidence)


class Grid(NamedTuple):
    """Roots and drafts together, in rows of a fixed width; roots alone where nothing was drafted."""

    tokens: Tensor
    """[batch, width] int64; columns beyond the proposal's nodes hold 0."""
    max_depth: int
    shape: TreeShape | None = None
    """[batch, width]; None: chains."""


def make_grid(roots: Tensor, proposal: Proposal | None, max_depth: int, width: int) -> Grid:
    """Put the roots before the nodes and widen to what graphs are captured for.

    Args:
        roots: [batch] integers. proposal: None where nothing was drafted: one column.
        max_depth: of any node. width: at least num_nodes + 1.
    Sync: none; CUDA-graph safe.
    """
    pad = torch.nn.functional.pad
    if proposal is None:
        return Grid(roots.to(torch.int64)[:, None], 0)
    unused = width - 1 - proposal.tokens.shape[1]
    tokens = pad(torch.cat((roots.to(torch.int64)[:, None], proposal.tokens), dim=1), (0, unused))
    if proposal.shape is None:
        return Grid(tokens, max_depth)
    # Columns that are no nodes hang below the root; nobody selects them.
    return Grid(tokens, max_depth, TreeShape(*(pad(column, (0, unused)) for column in proposal.shape)))


def drop_leaves(grid: Grid, draft_lens: Tensor) -> Grid:
    """The grid as chains, if what is verified of it are chains: their pass needs no mask. Waits for the lengths: for the CPU.

    Args:
        draft_lens: [batch] integers, nodes verified: columns 1..draft_lens.
    Example: parents [[0, 0, 0, 1]] with draft_lens [1] -> chains; with [2] it stays
    """
    if grid.shape is None:
        return grid
    columns = torch.arange(grid.tokens.shape[1], device=draft_lens.device)
    is_verified = (columns > 0) & (columns <= draft_lens[:, None])
    if (is_verified & (grid.shape.parents != columns - 1)).any():
        return grid
    return grid._replace(shape=None)


def order_nodes(
    tokens: Tensor,
    survival: Tensor,
    parents: Tensor,
    depths: Tensor,
    max_nodes: int,
    probs: Tensor,
    evidence: Tensor | None = None,
) -> Proposal:
    """Put nodes into the order of `Proposal` and keep the first `max_nodes`.

    Args:
        tokens, survival, probs, evidence: [batch, n], level by level, so that a parent stands before its children; survival
            at most the parent's; probs and evidence as in `Proposal`.
        parents: [batch, n] int64, index of the parent, -1 for the root.
        depths: [n] int64, from 1.
    Sync: none; CUDA-graph safe.
    Example: survival [.6, .3, .5, .1], parents [-1, -1, 0, 0], max_nodes 3: nodes 0, 2, 1 with parents in columns 0, 1, 0
    """
    # Stable: at equal survival the order of levels stays, so no child overtakes its parent.
    order = survival.sort(dim=1, descending=True, stable=True).indices
    column = torch.empty_like(order)
    column.scatter_(1, order, torch.arange(1, order.shape[1] + 1, device=order.device).expand_as(order))
    # Index -1, the root, is column 0.
    column = torch.nn.functional.pad(column, (1, 0))
    order = order[:, :max_nodes]
    parent_columns = column.gather(1, parents.gather(1, order) + 1)
    return Proposal(
        tokens.gather(1, order),
        survival.gather(1, order),
        probs.gather(1, order),
        TreeShape(torch.nn.functional.pad(parent_columns, (1, 0)), torch.nn.functional.pad(depths[order], (1, 0))),
        None if evidence is None else evidence.gather(1, order),
    )


def tree_survival(probs: Tensor, parents: Tensor, max_depth: int) -> Tensor:
    """Multiply probabilities along each node's path: `survival_from_probs` for trees.

    Args:
        probs: [batch, num_nodes] float32.
        parents: [batch, num_nodes + 1] int64, as in `TreeShape`.
        max_depth: of any node.
    Returns:
        [batch, num_nodes] float32 in [0, 1], at most the parent's.
    Sync: none; CUDA-graph safe.
    Example: probs [[.6, .3, .5]], parents [[0, 0, 0, 1]], max_depth 2 -> [[.6, .3, .3]]
    """
    own = torch.nn.functional.pad(as_probability(probs), (1, 0), value=1.0)
    survival = own
    for _ in range(max_depth - 1):
        survival = own * survival.gather(1, parents)
    return survival[:, 1:]


def ancestor_mask(parents: Tensor, max_depth: int) -> Tensor:
    """Which columns each column sees in a verify pass: itself and its ancestors.

    Args:
        parents: [batch, width] int64, as in `TreeShape`.
        max_depth: of any column.
    Returns:
        [batch, width, width] bool; row i is what column i sees.
    Sync: none; CUDA-graph safe.
    """
    batch, width = parents.shape
    itself = torch.eye(width, dtype=torch.bool, device=parents.device).expand(batch, -1, -1)
    above = parents[:, :, None].expand(-1, -1, width)
    mask = itself
    for _ in range(max_depth):
        mask = itself | mask.gather(1, above)
    return mask
