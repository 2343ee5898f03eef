"""Join the tests' target and its MTP layer to one MiMoForCausalLM checkpoint, as SGLang's MTP support reads it.

MiMo's layers are Qwen2's, and those are Llama's plus a bias on queries, keys and values: with zero biases the
checkpoint is the target's function exactly. SGLang finds the layer in the checkpoint itself.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from tetris_sglang.tools.distill.head_files import MTP_PREFIX
from tetris_sglang.tools.distill.heads import MtpHead

MTP_FILE = "model-mtp.safetensors"
_INDEX = "model.safetensors.index.json"
_ALIKE = (
    "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings",
    "rope_parameters", "hidden_act",
)  # fmt: skip
_OF_TARGET = ("num_hidden_layers", "intermediate_size", "rms_norm_eps", "tie_word_embeddings", "dtype")


def make_mtp_checkpoint(target: Path, mtp: Path, out: Path) -> None:
    """Write the joined checkpoint in the layer's dtype.

    Args:
        target: folder of the LlamaForCausalLM that the layer was trained for. mtp: folder of the layer, whose MLP may be
            narrower.
        out: a folder that does not exist.
    Raises:
        ValueError: target and layer do not belong together.
        FileExistsError: `out` is there.
    """
    base, config = (json.loads((folder / "config.json").read_text()) for folder in (target, mtp))
    if config["architectures"] != [MtpHead.architecture]:
        raise ValueError(f"{mtp}: only {MtpHead.architecture} has such a layer, not {config['architectures']}")
    if unlike := [key for key in _ALIKE if base[key] != config[key]]:
        raise ValueError(f"{mtp} does not fit into {target}: {', '.join(f'{k} {config[k]}, {base[k]}' for k in unlike)}")
    shutil.copytree(target, out)
    added = {
        name: _widen(name, tensor, base["intermediate_size"]) for name, tensor in load_file(mtp / "model.safetensors").items()
    }
    dtype = next(iter(added.values())).dtype
    sizes = {"q": base["num_attention_heads"], "k": base["num_key_value_heads"], "v": base["num_key_value_heads"]}
    # An absent bias would be served uninitialised.
    for prefix in (*(f"model.layers.{i}." for i in range(base["num_hidden_layers"])), MTP_PREFIX):
        for name, heads in sizes.items():
            added[f"{prefix}self_attn.{name}_proj.bias"] = torch.zeros(heads * base["head_dim"], dtype=dtype)
    save_file(added, out / MTP_FILE, metadata={"format": "pt"})
    weight_map = dict.fromkeys(load_file(out / "model.safetensors"), "model.safetensors") | dict.fromkeys(added, MTP_FILE)
    (out / _INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}, indent=1) + "\n")
    joined = config | {key: base[key] for key in _OF_TARGET}
    (out / "config.json").write_text(json.dumps(joined, indent=2) + "\n")


def _widen(name: str, tensor: torch.Tensor, intermediate: int) -> torch.Tensor:
    """An MLP's matrix with zeros for what the layer's own lacks."""
    if name.endswith(("gate_proj.weight", "up_proj.weight")):
        return F.pad(tensor, (0, 0, 0, intermediate - len(tensor)))
    return F.pad(tensor, (0, intermediate - tensor.shape[1])) if name.endswith("down_proj.weight") else tensor
