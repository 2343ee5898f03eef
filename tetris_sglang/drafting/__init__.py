"""What a draft proposes: chains, or trees whose nodes stand in the order in which selection takes them; and what
texts say of a draft, the request's own and others'."""

from tetris_sglang.drafting.growing import ChainGrower, Grower, TreeGrower, propose_matches
from tetris_sglang.drafting.proposal import (
    Grid,
    Proposal,
    TreeShape,
    ancestor_mask,
    count_nodes,
    drop_leaves,
    make_chains,
    make_grid,
    tree_survival,
)

__all__ = [
    "ChainGrower",
    "Grid",
    "Grower",
    "Proposal",
    "TreeGrower",
    "TreeShape",
    "ancestor_mask",
    "count_nodes",
    "drop_leaves",
    "make_chains",
    "make_grid",
    "propose_matches",
    "tree_survival",
]
