"""What texts say of a draft, the request's own and, if shared, others' (pure torch)."""

from tetris_sglang.texts.index import RecentTexts
from tetris_sglang.texts.match import (
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

__all__ = [
    "Counsel",
    "FIRST_CONTINUED",
    "FIRST_COPIED",
    "INITIAL_OFFSETS",
    "NOT_CONTINUED",
    "NUM_EVIDENCE",
    "Precedent",
    "RecentTexts",
    "continued_evidence",
    "is_copied",
    "is_precedents",
    "least_passes",
    "trust_match_lens",
]
