"""Which models the arms serve: SmolLM2-135M-Instruct and the head that the repository ships for it, or a user's own."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from tetris_sglang.tools.bench.arms import Arm
from tetris_sglang.tools.bench.settings import Settings
from tetris_sglang.tools.real_model import HEAD, ensure_target


class Models(NamedTuple):
    target: str
    drafts: dict[str, str | None]
    """Those that there are; None for n-grams, which have no model."""

    def find_obstacle(self, arm: Arm) -> str | None:
        """Why the arm has no draft, if so."""
        if not arm.speculates or arm.draft in self.drafts:
            return None
        return f"there is no {arm.draft} draft for this target: give --draft {arm.draft}=PATH"


def find_models(settings: Settings, needed: Collection[str], folder: Path) -> Models:
    """The target, and the `needed` drafts as far as they exist.

    Args:
        folder: for drafts that are made here.
    Raises:
        FileNotFoundError: the weights that the useless draft is made of are missing.
        NotFetched: the target cannot be had.
    """
    drafts = list_drafts(asdict(settings))
    missing = set(needed) - drafts.keys()
    if "useless" in missing and "eagle3" in drafts:
        drafts["useless"] = str(make_useless(Path(drafts["eagle3"]), folder / "useless-draft"))
    return Models(settings.model_path or str(ensure_target()), drafts)


def list_drafts(settings: Mapping[str, Any]) -> dict[str, str | None]:
    """Each draft's folder, None for n-grams, of the settings as results have them."""
    drafts: dict[str, str | None] = {"ngram": None} if settings["model_path"] else {"ngram": None, "eagle3": str(HEAD)}
    return drafts | dict(path.split("=", 1) for path in settings["draft_paths"])


def make_useless(head: Path, out: Path) -> Path:
    """The EAGLE-3 head with the rows of its output permuted: as sure of its tokens as before, and wrong.

    Raises:
        FileNotFoundError: it is no folder with model.safetensors.
        ValueError: it has no output of its own.
    """
    import torch
    from safetensors.torch import load_file, save_file

    if not (head / "model.safetensors").exists():
        raise FileNotFoundError(
            f"--drafts useless: it is made of the eagle3 head, and {head} has no model.safetensors. Give "
            "--draft eagle3=FOLDER with one, or --draft useless=PATH."
        )
    weights = load_file(head / "model.safetensors")
    if (rows := weights.get("lm_head.weight")) is None:
        raise ValueError(f"--drafts useless: {head} has no lm_head of its own. Give --draft useless=PATH.")
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    shutil.copytree(head, out)
    save_file(weights | {"lm_head.weight": rows[order].contiguous()}, out / "model.safetensors")
    return out
