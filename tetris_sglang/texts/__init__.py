"""What texts say of a draft, the request's own and, if shared, others' (pure torch)."""

from tetris_sglang.texts.index import RecentTexts
from tetris_sglang.texts.match import (
    FIRST_COPIED,
    FIRST_TEXT_ONLY,
    INITIAL_OFFSETS,
    NO_DRAFT,
    NUM_EVIDENCE,
    Calibrate,
    Match,
    Matcher,
    is_copied,
    text_evidence,
    trust,
    trust_match_lens,
)

__all__ = [
    "FIRST_COPIED",
    "FIRST_TEXT_ONLY",
    "INITIAL_OFFSETS",
    "NO_DRAFT",
    "NUM_EVIDENCE",
    "Calibrate",
    "Match",
    "Matcher",
    "RecentTexts",
    "is_copied",
    "text_evidence",
    "trust",
    "trust_match_lens",
]
