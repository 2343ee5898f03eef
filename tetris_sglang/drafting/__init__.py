"""What a draft proposes: chains, or trees whose nodes stand in the order in which selection takes them; and what
texts say of a draft, the request's own and others'."""

from tetris_sglang.drafting.growing import ChainGrower, Grower, TreeGrower, continue_texts
from tetris_sglang.drafting.precedent import (
    FIRST_CONTINUED,
    FIRST_COPIED,
    INITIAL_OFFSETS,
    NOT_CONTINUED,
    NUM_EVIDENCE,
    Counsel,
    Precedent,
    continued_evidence,
    is_copied,
    is_precedents,
    least_passes,
    trust_match_lens,
)
from tetris_sglang.drafting.proposal import (
    Calibrate,
    Grid,
    Proposal,
    TreeShape,
    ancestor_mask,
    count_nodes,
    make_grid,
    tree_survival,
    trust,
)
from tetris_sglang.drafting.recent_texts import RecentTexts

__all__ = [
    "FIRST_CONTINUED",
    "FIRST_COPIED",
    "INITIAL_OFFSETS",
    "NOT_CONTINUED",
    "NUM_EVIDENCE",
    "Calibrate",
    "ChainGrower",
    "Counsel",
    "Grid",
    "Grower",
    "Precedent",
    "Proposal",
    "RecentTexts",
    "TreeGrower",
    "TreeShape",
    "ancestor_mask",
    "continue_texts",
    "continued_evidence",
    "count_nodes",
    "is_copied",
    "is_precedents",
    "least_passes",
    "make_grid",
    "tree_survival",
    "trust",
    "trust_match_lens",
]
