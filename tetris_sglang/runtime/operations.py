"""The small steps between the two models' passes, in the form that suits the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from tetris_sglang.kernels.reference import (
    AcceptedTokens,
    PackedTokens,
    accept_rows_reference,
    pack_rows_reference,
)
from tetris_sglang.selection import Selector, get_selector, survival_from_probs

# Selection must fill its capacity, so that the host knows the number of verified tokens without a sync: a survival
# that underflows to 0 is still selectable, after every other.
_SMALLEST_SURVIVAL = torch.finfo(torch.float32).tiny


class Operations(NamedTuple):
    select: Callable[[Tensor, int], Tensor]
    """(draft_probs [batch, depth] float32, capacity_tokens) -> draft_lens [batch] int32, sum = capacity_tokens"""
    pack: Callable[..., PackedTokens]
    """As kernels.pack.pack_rows."""
    accept: Callable[..., AcceptedTokens]
    """As kernels.accept.accept_rows."""


def get_operations(device: str, selection: str) -> Operations:
    """One Triton launch each on CUDA, torch operations elsewhere; the same results.

    Args:
        selection: "tetris", or a baseline, which is torch everywhere.
    """
    if device != "cuda":
        select = _select_by_survival(get_selector("torch" if selection == "tetris" else selection))
        return Operations(select, pack_rows_reference, accept_rows_reference)
    from tetris_sglang.kernels.accept import accept_rows
    from tetris_sglang.kernels.pack import pack_rows
    from tetris_sglang.kernels.select import select_drafts

    select = select_drafts if selection == "tetris" else _select_by_survival(get_selector(selection))
    return Operations(select, pack_rows, accept_rows)


def _select_by_survival(selector: Selector) -> Callable[[Tensor, int], Tensor]:
    def select(draft_probs: Tensor, capacity_tokens: int) -> Tensor:
        return selector(survival_from_probs(draft_probs).clamp_(min=_SMALLEST_SURVIVAL), capacity_tokens)

    return select
