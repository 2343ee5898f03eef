"""What a draft proposes: chains, or trees whose nodes stand in the order in which selection takes them; n-gram drafts; and
what the request's own text says of a draft."""

from tetris_sglang.drafting.growing import ChainGrower, Grower, TreeGrower
from tetris_sglang.drafting.ngram import (
    LEAST_PROB,
    PRIOR,
    Lookup,
    NgramProposal,
    Prior,
    estimate_probs,
    look_up,
    propose_by_lookup,
)
from tetris_sglang.drafting.ngram_reference import (
    ReferenceBranch,
    look_up_reference,
    propose_by_lookup_reference,
)
from tetris_sglang.drafting.precedent import (
    FIRST_COPIED,
    INITIAL_OFFSETS,
    NUM_EVIDENCE,
    Counsel,
    Precedent,
    find_precedent,
)
from tetris_sglang.drafting.proposal import (
    Calibrate,
    CalibrateRequests,
    Grid,
    Proposal,
    TreeShape,
    ancestor_mask,
    count_nodes,
    make_grid,
    merge_branches,
    tree_survival,
    trust,
    trust_all,
)

__all__ = [
    "FIRST_COPIED",
    "INITIAL_OFFSETS",
    "LEAST_PROB",
    "NUM_EVIDENCE",
    "PRIOR",
    "Calibrate",
    "CalibrateRequests",
    "ChainGrower",
    "Counsel",
    "Grid",
    "Grower",
    "Lookup",
    "NgramProposal",
    "Precedent",
    "Prior",
    "Proposal",
    "ReferenceBranch",
    "TreeGrower",
    "TreeShape",
    "ancestor_mask",
    "count_nodes",
    "estimate_probs",
    "find_precedent",
    "look_up",
    "look_up_reference",
    "make_grid",
    "merge_branches",
    "propose_by_lookup",
    "propose_by_lookup_reference",
    "tree_survival",
    "trust",
    "trust_all",
]
