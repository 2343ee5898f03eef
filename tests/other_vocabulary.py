"""The pair's draft as if it had been trained with another tokenizer."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

PADDING = 40
"""Rows of the vocabulary without a token."""
NUM_MISSING = 64
"""Of the target's tokens, the rarest."""


def make_other_vocabulary(draft: Path, out: Path) -> Path:
    """Copy a draft folder with its token ids shuffled, more rows and fewer tokens."""
    shutil.copytree(draft, out)
    config = json.loads((draft / "config.json").read_text())
    tokenizer = json.loads((draft / "tokenizer.json").read_text())
    size = config["vocab_size"] + PADDING
    new_ids = random.Random(0).sample(range(size), config["vocab_size"])

    model = tokenizer["model"]
    missing = {"".join(merge if isinstance(merge, list) else merge.split(" ")) for merge in model["merges"][-NUM_MISSING:]}
    model["merges"] = model["merges"][:-NUM_MISSING]
    model["vocab"] = {token: new_ids[token_id] for token, token_id in model["vocab"].items() if token not in missing}
    for token in tokenizer["added_tokens"]:
        token["id"] = new_ids[token["id"]]
    (out / "tokenizer.json").write_text(json.dumps(tokenizer))

    config["vocab_size"] = size
    for role in ("bos", "pad"):
        config[f"{role}_token_id"] = new_ids[config[f"{role}_token_id"]]
    config["eos_token_id"] = [new_ids[token_id] for token_id in config["eos_token_id"]]
    (out / "config.json").write_text(json.dumps(config))

    weights = load_file(out / "model.safetensors")
    for name, weight in weights.items():
        if weight.shape[0] == len(new_ids):
            weights[name] = weight.new_zeros(size, weight.shape[1]).index_copy_(0, torch.tensor(new_ids), weight)
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    return out
