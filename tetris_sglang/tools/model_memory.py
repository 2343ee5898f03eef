"""What a model takes: read from its configuration and from the headers of its weights, without loading them."""

from __future__ import annotations

import json
import struct
from math import prod
from pathlib import Path
from typing import Any

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_FLOATS = ("F64", "F32", "BF16", "F16")
_STORED_BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "I64": 8, "I32": 4, "I16": 2}
"""Of safetensors' types; others take a byte."""


def weights_bytes(folder: Path, dtype: str | None) -> int | None:
    """Bytes of a folder's weights, those in floating point as `dtype` (None: as stored); None where there are none."""
    total = 0
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            header = json.loads(opened.read(length))
        for name, tensor in header.items():
            if name != "__metadata__":
                stored = tensor["dtype"]
                as_served = ITEM_BYTES.get(dtype or "") if stored in _FLOATS else None
                total += prod(tensor["shape"]) * (as_served or _STORED_BYTES.get(stored, 1))
    return total or None


def kv_bytes_per_token(config: Any, dtype: str, num_layers: int | None = None) -> int:
    """Keys and values of one token.

    Args:
        config: the model's text configuration. dtype: of keys and values.
        num_layers: instead of all of them.
    """
    num_heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    num_kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
    return 2 * (num_layers or config.num_hidden_layers) * num_kv_heads * head_dim * ITEM_BYTES.get(dtype, 1)
