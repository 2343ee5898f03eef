"""Configs and checkpoints of draft heads, as SGLang loads them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from tetris_sglang.tools.distill.heads import DFlareHead, DFlashHead, Eagle3Head, EagleHead, Head, MtpHead
from tetris_sglang.tools.distill.steering import SteeredDraft

MTP_PREFIX = "model.mtp_layers.0."
_KINDS = (SteeredDraft, EagleHead, Eagle3Head, MtpHead, DFlashHead, DFlareHead)
HEADS: dict[str, type[Head]] = {head.kind: head for head in _KINDS}
BLOCKS = (DFlashHead.kind, DFlareHead.kind)
"""Those that draft in one pass."""


def make_head_config(config: LlamaConfig, architecture: str, intermediate: int) -> dict:
    """The config.json of a head of one layer with its target's attention.

    Args:
        config: the target's. intermediate: of the head's MLP.
    """
    kept = (
        "bos_token_id", "eos_token_id", "head_dim", "hidden_act", "hidden_size", "max_position_embeddings",
        "num_attention_heads", "num_key_value_heads", "pad_token_id", "rms_norm_eps", "vocab_size",
    )  # fmt: skip
    return {name: getattr(config, name) for name in kept} | {
        "architectures": [architecture],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "dtype": "bfloat16",
        "intermediate_size": intermediate,
        "mlp_bias": False,
        "model_type": "llama",
        "num_hidden_layers": 1,
        "rope_parameters": dict(config.rope_parameters),
        # SGLang replaces embedding and lm_head by the target's one after the other: they must be two.
        "tie_word_embeddings": False,
    }


def make_eagle3_keys(draft_vocab_size: int, layer_ids: Sequence[int]) -> dict:
    """What an EAGLE-3 head's config has besides; `layer_ids` are the target's layers that it reads."""
    layers = {"eagle_aux_hidden_state_layer_ids": list(layer_ids), "use_aux_hidden_state": True}
    return {"draft_vocab_size": draft_vocab_size, "eagle_config": layers}


def make_dflash_keys(block_size: int, layer_ids: Sequence[int], mask_token: int, num_layers: int) -> dict:
    """What a DFlash draft's config has besides; a block holds the last known token, too."""
    read = {"target_layer_ids": list(layer_ids), "mask_token_id": mask_token}
    return {"block_size": block_size, "dflash_config": read, "num_hidden_layers": num_layers}


def _names_in_checkpoint(head: Head) -> dict[str, str]:
    """The checkpoint's name of every entry of the head's state."""
    if head.kind != "mtp":
        return {name: name for name in head.state_dict()}
    return {name: MTP_PREFIX + name.removeprefix("block.") for name in head.state_dict()}


def save_head(head: Head, folder: Path) -> None:
    """Write config.json and model.safetensors, matrices and norms as bfloat16; `head` stays as it is."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(head.config, indent=2) + "\n")
    state = head.state_dict()
    tensors = {
        there: (state[here].bfloat16() if state[here].is_floating_point() else state[here]).contiguous()
        for here, there in _names_in_checkpoint(head).items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def load_head(folder: Path, target: LlamaForCausalLM) -> Head:
    """The head in float32, on the target's embedding and lm_head.

    An MTP layer may be stored narrower than its config says, whose sizes are the complete checkpoint's.

    Raises:
        ValueError: no such head, or a tensor is missing, unknown or of another size.
    """
    config = json.loads((folder / "config.json").read_text())
    kinds = {head.architecture: head for head in HEADS.values()}
    architecture = config["architectures"][0]
    if architecture not in kinds:
        raise ValueError(f"{folder}: {architecture} is not a head; known are {', '.join(kinds)}")
    tensors = {
        name: t.float() if t.is_floating_point() else t
        for path in sorted(folder.glob("*.safetensors"))
        for name, t in load_file(path).items()
    }
    stored = dict(config)
    if architecture == MtpHead.architecture:
        stored["intermediate_size"] = len(tensors[f"{MTP_PREFIX}mlp.gate_proj.weight"])
    head = kinds[architecture](stored, target.model.embed_tokens.weight.detach(), target.lm_head.weight.detach())
    names = _names_in_checkpoint(head)
    if set(names.values()) != set(tensors):
        raise ValueError(f"{folder}: {sorted(set(names.values()) ^ set(tensors))} missing or unknown")
    head.load_state_dict({here: tensors[there] for here, there in names.items()})
    head.config = config
    return head.eval()
