#!/usr/bin/env python
"""A standalone draft of some of a model's own layers, to be distilled: for targets that have no smaller relative.

python scripts/prune_model.py --layers 0,1,2,29 --out pruned               # of SmolLM2-135M-Instruct
tetris-sglang distill --draft pruned --prompts sharegpt --rate 0.001 --out draft
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer

from tetris_sglang.tools.real_model import ensure_target


def prune(model: Path, layers: list[int], out: Path) -> None:
    """Write `model` with these of its layers, in this order.

    Raises:
        ValueError: it has no such layer, or is no Llama.
    """
    made = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    if made.config.model_type != "llama":
        raise ValueError(f"--model {model}: a {made.config.model_type}, and a llama is wanted")
    if not layers or not all(0 <= layer < len(made.model.layers) for layer in layers):
        raise ValueError(f"--layers {layers}: {model} has 0 to {len(made.model.layers) - 1}")
    made.model.layers = torch.nn.ModuleList([made.model.layers[layer] for layer in layers])
    made.config.num_hidden_layers = len(layers)
    made.save_pretrained(out)
    AutoTokenizer.from_pretrained(model).save_pretrained(out)


def main(
    out: Annotated[Path, typer.Option(help="The draft's folder.")],
    layers: Annotated[str, typer.Option(help="Of the model, from 0.")],
    model: Annotated[Path | None, typer.Option(help="A Llama.", show_default="SmolLM2-135M-Instruct")] = None,
) -> None:
    """A standalone draft of some of a model's own layers."""
    prune(model or ensure_target(), [int(layer) for layer in layers.split(",")], out)


if __name__ == "__main__":
    typer.run(main)
