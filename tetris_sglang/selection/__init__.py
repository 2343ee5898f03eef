"""Which draft tokens a step verifies: survivals, their calibration, TETRIS's selection, and baselines."""

from typing import Protocol

from torch import Tensor

from tetris_sglang.selection.baselines import select_oracle, select_random, select_uniform
from tetris_sglang.selection.batched import fill_capacity, select_prefixes
from tetris_sglang.selection.reference import select_prefixes_reference
from tetris_sglang.selection.survival import SMALLEST_SURVIVAL, survival_from_probs

__all__ = [
    "SMALLEST_SURVIVAL",
    "Selector",
    "fill_capacity",
    "get_selector",
    "select_oracle",
    "select_prefixes",
    "select_prefixes_reference",
    "select_random",
    "select_uniform",
    "survival_from_probs",
]


class Selector(Protocol):
    """A rule that chooses draft_lens [batch] int32; see `select_prefixes`."""

    def __call__(self, survival: Tensor, capacity_tokens: int, max_draft_lens: Tensor | None = None) -> Tensor: ...


def get_selector(name: str) -> Selector:
    """Look up a selection rule.

    Args:
        name: "tetris" (the one to serve with), "uniform" or "random" (baselines).
    Raises:
        ValueError: unknown name.
    """
    if name not in _SELECTORS:
        raise ValueError(f"unknown selector {name!r}; choose one of {', '.join(_SELECTORS)}")
    return _SELECTORS[name]


_SELECTORS: dict[str, Selector] = {"tetris": select_prefixes, "uniform": select_uniform, "random": select_random}
