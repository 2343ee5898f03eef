"""What a draft proposes: chains, or combs and trees whose nodes stand in the order in which selection takes them."""

from tetris_sglang.drafting.growing import ChainGrower, CombGrower, Grower, propose_matches
from tetris_sglang.drafting.prefixes import propose_block
from tetris_sglang.drafting.proposal import (
    Grid,
    Proposal,
    TreeShape,
    ancestor_mask,
    drop_leaves,
    make_chains,
    make_grid,
    tree_survival,
)

__all__ = [
    "ChainGrower",
    "CombGrower",
    "Grid",
    "Grower",
    "Proposal",
    "TreeShape",
    "ancestor_mask",
    "drop_leaves",
    "make_chains",
    "make_grid",
    "propose_block",
    "propose_matches",
    "tree_survival",
]
