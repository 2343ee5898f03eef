"""Drafts that need no model: n-grams looked up in the request's own text."""

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

__all__ = [
    "LEAST_PROB",
    "PRIOR",
    "Lookup",
    "NgramProposal",
    "Prior",
    "ReferenceBranch",
    "estimate_probs",
    "look_up",
    "look_up_reference",
    "propose_by_lookup",
    "propose_by_lookup_reference",
]
