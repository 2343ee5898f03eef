"""What drafts: a standalone model, one that reads the target's states, or n-grams. Found out once, at start-up."""

from __future__ import annotations

import os
from typing import Any

from tetris_sglang.config import DRAFT_KINDS

VARIABLE = "SGLANG_TETRIS_DRAFT_KIND"
"""Where the answer stands for every process of the server."""

STANDALONE, STEERED, EAGLE, EAGLE3, MTP, DFLASH, NGRAM = DRAFT_KINDS
HEADS = (STEERED, EAGLE, EAGLE3, MTP, DFLASH)
"""Those that read the target's hidden states."""
OF_LAYERS = (STEERED, EAGLE3, DFLASH)
"""Of several layers."""


def current_kind() -> str:
    """As found out by `find_kind`; a standalone model before that."""
    return os.environ.get(VARIABLE, STANDALONE)


def find_kind(chosen: str, target: Any, draft_path: str | None, draft: Any | None) -> str:
    """One of `DRAFT_KINDS`.

    Args:
        chosen: the setting: "auto" or one of `DRAFT_KINDS`.
        target, draft: the models' text configs; draft None where draft_path is.
    Raises:
        ValueError: the setting contradicts the models.
    """
    has_own_layers = bool(getattr(target, "num_nextn_predict_layers", 0))
    if draft_path is None:
        possible = (MTP, NGRAM) if has_own_layers else (NGRAM,)
    elif chosen == MTP or _architecture(draft).endswith(("mtp", "nextn")):
        possible = (MTP,)
    else:
        possible = (_kind_of(draft),)
    kind = possible[0] if chosen == "auto" else chosen
    if kind in possible:
        return kind
    given = "no --speculative-draft-model-path" if draft_path is None else draft_path
    raise ValueError(
        f"--speculative-tetris-draft {chosen} contradicts {given}, with which TETRIS drafts by {' or '.join(possible)}. Leave "
        f"the flag out, or give the draft that it needs."
    )


def _kind_of(draft: Any) -> str:
    name = _architecture(draft)
    if is_block(draft):
        return DFLASH
    if name.startswith("steered"):
        return STEERED
    return EAGLE3 if "eagle3" in name else EAGLE if "eagle" in name else STANDALONE


def is_block(draft: Any) -> bool:
    """Whether a draft with this config drafts a block in one pass: DFlash, DFlare."""
    return any(name in _architecture(draft) for name in ("dflash", "dflare"))


def _architecture(config: Any) -> str:
    return (getattr(config, "architectures", None) or [""])[0].lower()
