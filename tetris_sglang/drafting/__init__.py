"""What a draft proposes: chains, or trees whose nodes stand in the order in which selection takes them."""

from tetris_sglang.drafting.growing import ChainGrower, Grower, TreeGrower
from tetris_sglang.drafting.ngram import propose_by_lookup
from tetris_sglang.drafting.proposal import (
    Grid,
    Proposal,
    TreeShape,
    ancestor_mask,
    count_nodes,
    make_grid,
    merge_branches,
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
    "make_grid",
    "merge_branches",
    "propose_by_lookup",
]
