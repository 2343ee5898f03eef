#!/usr/bin/env python
"""Join a Llama target and a trained MTP layer to one MiMoForCausalLM checkpoint, as SGLang's MTP support reads it.

    python scripts/mtp_checkpoint.py tests/pair/target tests/pair/mtp /some/folder

MiMo's layers are Qwen2's, and those are Llama's plus a bias on queries, keys and values: with zero biases the
checkpoint is the target's function exactly. The target may be an inflated one; the MTP layer is then embedded in
its sizes in the same way. SGLang finds the layer in the checkpoint itself (`--speculative-algorithm EAGLE`
without a draft path, or with the target's own path).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import torch
import typer
from inflate_model import RECORD_FILE, TARGET, InflatedShape, _inflate_norm, _layer_tensors, _Small, _widen
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

MTP_ARCHITECTURE = "MiMoForCausalLM"
MTP_PREFIX = "model.mtp_layers.0."
MTP_FILE = "model-mtp.safetensors"


def make_mtp_checkpoint(target: Path | str, mtp_weights: Path | str, out: Path | str, seed: int = 0) -> None:
    """Write the joined checkpoint in the target's dtype.

    Args:
        target: folder of the LlamaForCausalLM that the layer was trained for, or of that model inflated.
        mtp_weights: folder with the layer's config.json and safetensors.
        out: a folder that does not exist, or is empty.
        seed: of weights without effect, where the target is larger than the layer.
    Raises:
        ValueError: target and layer do not belong together.
        FileExistsError: `out` is not empty.
    """
    base, mtp, out = (
        _Small(Path(target), (TARGET,)),
        _Small(Path(mtp_weights), (MTP_ARCHITECTURE,)),
        Path(out),
    )
    for key in ("head_dim", "vocab_size", "max_position_embeddings", "rope_parameters", "hidden_act"):
        if base.config[key] != mtp.config[key]:
            raise ValueError(f"{key} is {base.config[key]} in {target} and {mtp.config[key]} in {mtp_weights}")
    if base.heads * mtp.kv_heads != mtp.heads * base.kv_heads or base.hidden < mtp.hidden:
        raise ValueError(f"{mtp_weights} does not fit into {target}: other head groups, or a smaller hidden size")
    if out.exists() and any(out.iterdir()):
        raise FileExistsError(f"{out} is not empty: name another folder")
    out.mkdir(parents=True, exist_ok=True)

    weight_map, total_bytes, dtype = {}, 0, None
    for path in base.weight_files:
        shutil.copyfile(path, out / path.name)
        with safe_open(path, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a dict
                tensor = opened.get_tensor(name)
                weight_map[name], dtype = path.name, tensor.dtype
                total_bytes += tensor.numel() * tensor.element_size()
    added = {name: t.to(dtype).contiguous() for name, t in _added_tensors(base, mtp, seed)}
    save_file(added, out / MTP_FILE, metadata={"format": "pt"})
    weight_map |= dict.fromkeys(added, MTP_FILE)
    total_bytes += sum(t.numel() * t.element_size() for t in added.values())
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")

    of_target = (
        "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size",
        "rms_norm_eps", "tie_word_embeddings", "dtype",
    )  # fmt: skip
    config = mtp.config | {key: base.config[key] for key in of_target}
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for path in sorted(base.folder.glob("*.json")) + sorted(base.folder.glob("*.jinja")):
        if path.name not in ("config.json", "model.safetensors.index.json", RECORD_FILE):
            shutil.copyfile(path, out / path.name)


def _added_tensors(base: _Small, mtp: _Small, seed: int) -> Iterator[tuple[str, Tensor]]:
    """The layer in the target's sizes, and all biases: an absent one would be served uninitialised."""
    shape = InflatedShape(base.hidden, base.layers, base.heads, base.intermediate)
    yield from _layer_tensors(mtp, shape, MTP_PREFIX, seed)
    for short_name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        name = f"{MTP_PREFIX}{short_name}.weight"
        yield name, _inflate_norm(mtp, shape, name, False, seed)
    name = f"{MTP_PREFIX}input_proj.weight"
    sizes = (shape.hidden, 2 * shape.hidden)
    yield name, _widen(mtp, name, sizes, seed, writes_residual=True, parts=2)
    for prefix in (*(f"model.layers.{i}." for i in range(base.layers)), MTP_PREFIX):
        for short_name, heads in (("q", base.heads), ("k", base.kv_heads), ("v", base.kv_heads)):
            yield f"{prefix}self_attn.{short_name}_proj.bias", torch.zeros(heads * base.head_dim)


app = typer.Typer(add_completion=False)


@app.command(help=__doc__)
def main(
    target: Annotated[Path, typer.Argument(help="Folder of the target.")],
    mtp_weights: Annotated[Path, typer.Argument(help="Folder of the MTP layer.")],
    out: Annotated[Path, typer.Argument(help="Folder to write; must not hold anything.")],
) -> None:
    try:
        make_mtp_checkpoint(target, mtp_weights, out)
    except (ValueError, FileExistsError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    typer.echo(f"{out}: {MTP_ARCHITECTURE} with its MTP layer")


if __name__ == "__main__":
    app()
