"""What the draft's probabilities and a text's evidence are worth: learnt from what verification says (pure torch)."""

from tetris_sglang.estimates.calibration import (
    Calibration,
    Outcomes,
    Reliability,
    ReliabilityBin,
    chain_outcomes,
    tree_outcomes,
)
from tetris_sglang.estimates.offsets import EvidenceOffsets

__all__ = [
    "Calibration",
    "EvidenceOffsets",
    "Outcomes",
    "Reliability",
    "ReliabilityBin",
    "chain_outcomes",
    "tree_outcomes",
]
