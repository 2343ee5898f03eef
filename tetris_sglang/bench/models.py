"""Which models the arms serve: the shipped pair, its target inflated, or a user's own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from tetris_sglang.bench.arms import HEADS, REFERENCE, Arm
from tetris_sglang.bench.settings import Settings
from tetris_sglang.pair import check_parts, inflate


class Models(NamedTuple):
    target: str
    drafts: dict[str, str | None]
    """Those that there are; None for n-grams, which have no model."""

    def find_obstacle(self, arm: Arm) -> str | None:
        """Why the arm has no draft, if so."""
        if arm.family == REFERENCE or arm.draft in self.drafts:
            return None
        return f"there is no {arm.draft} draft for this target: give --draft {arm.draft}=PATH"


def find_models(settings: Settings, pair: Path, needed: Collection[str], folder: Path) -> Models:
    """The target, and the `needed` drafts as far as they exist.

    Args:
        pair: folder with target/, draft/ and perhaps heads; not read with a target of the user's.
        folder: for drafts that are made here.
    Raises:
        FileNotFoundError: the pair, or what inflates it, is missing.
        ValueError: there is no such shape.
    """
    given = dict(text.split("=", 1) for text in settings.draft_paths)
    drafts: dict[str, str | None] = {"ngram": None} | given
    if settings.model_path:
        target = settings.model_path
    else:
        check_parts(pair, "target/config.json")
        target = str(inflate(pair / "target", settings.shape, settings.dtype))
        # The useless draft is made from the standalone one.
        wanted = {"standalone" if name == "useless" else name for name in needed}
        for name in wanted - drafts.keys():
            if path := _find_in_pair(name, settings, pair):
                drafts[name] = str(path)
    if "useless" in needed and "useless" not in drafts and "standalone" in drafts:
        drafts["useless"] = str(make_useless(Path(drafts["standalone"]), folder / "useless-draft"))
    return Models(target, drafts)


def _find_in_pair(name: str, settings: Settings, pair: Path) -> Path | None:
    if name == "perfect":
        return pair / "target"
    if name == "standalone":
        check_parts(pair, "draft/config.json")
        draft = pair / "draft"
        return inflate(draft, settings.draft_shape, settings.dtype) if settings.draft_shape else draft
    if name in HEADS and (pair / name).exists():
        # A head reads the target's states: it has the target's width.
        return inflate(pair / name, settings.shape, settings.dtype)
    return None


def make_useless(draft: Path, out: Path) -> Path:
    """The draft with its output tokens permuted: as sure of its tokens as before, and wrong."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(draft, out)
    weights = load_file(out / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    order = torch.randperm(len(embedding), generator=torch.Generator().manual_seed(0))
    weights["lm_head.weight"] = embedding[order].contiguous()
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((out / "config.json").read_text()) | {"tie_word_embeddings": False}
    (out / "config.json").write_text(json.dumps(config))
    return out
