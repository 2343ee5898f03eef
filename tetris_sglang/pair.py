"""The model pair that the repository ships, for the demo and the benchmark; an installed package is without it."""

from __future__ import annotations

import importlib.util
import json
import random
import sys
from collections.abc import Collection
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
PAIR = REPOSITORY / "tests" / "pair"


def check_parts(pair: Path, *parts: str) -> None:
    """Raise FileNotFoundError when the pair is incomplete; says where it comes from."""
    for part in parts:
        if not (pair / part).exists():
            raise FileNotFoundError(
                f"{pair / part} is missing. It belongs to the model pair that the repository ships in "
                "tests/pair: run this from a clone, or name a folder made by scripts/train_pair.py."
            )


def read_prompts(pair: Path, kinds: Collection[str] | None = None) -> list[str]:
    """Texts of every kind in turn, short and long ones shuffled, so that any run of consecutive ones is mixed alike.

    Args:
        kinds: only these.
    Raises:
        FileNotFoundError: the pair has no prompts.
    """
    check_parts(pair, "prompts.jsonl")
    by_kind: dict[str, list[str]] = {}
    for line in (pair / "prompts.jsonl").read_text().splitlines():
        if line.strip():
            prompt = json.loads(line)
            by_kind.setdefault(prompt.get("kind", ""), []).append(prompt["text"])
    chosen = [texts for kind, texts in by_kind.items() if kinds is None or kind in kinds]
    for texts in chosen:
        random.Random(0).shuffle(texts)
    return [text for in_turn in zip(*chosen, strict=False) for text in in_turn]


def inflate(small: Path, shape: str, dtype: str = "float32") -> Path:
    """scripts/inflate_model.py's `ensure_inflated`; the script is no part of the package."""
    script = REPOSITORY / "scripts" / "inflate_model.py"
    if not script.exists():
        raise FileNotFoundError(f"{script} is missing: run this from a clone of the repository.")
    spec = importlib.util.spec_from_file_location("inflate_model", script)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module.ensure_inflated(small, shape, dtype)
