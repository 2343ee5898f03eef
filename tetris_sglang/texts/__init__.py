"""What texts say of a draft, the request's own and, if shared, others' (pure torch)."""

from tetris_sglang.texts.index import RecentTexts
from tetris_sglang.texts.match import (
    FIRST_COPIED,
    FIRST_EXTENSION,
    INITIAL_OFFSETS,
    NO_EXTENSION,
    NUM_EVIDENCE,
    Calibrate,
    Match,
    Matcher,
    extension_evidence,
    is_copied,
    is_matching,
    min_passes,
    trust,
    trust_match_lens,
)

__all__ = [
    "FIRST_COPIED",
    "FIRST_EXTENSION",
    "INITIAL_OFFSETS",
    "NO_EXTENSION",
    "NUM_EVIDENCE",
    "Calibrate",
    "Match",
    "Matcher",
    "RecentTexts",
    "extension_evidence",
    "is_copied",
    "is_matching",
    "min_passes",
    "trust",
    "trust_match_lens",
]
