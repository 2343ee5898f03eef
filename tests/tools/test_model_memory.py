"""What models take, against torch's own count."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file
from transformers import AutoConfig

from tetris_sglang.tools.model_memory import kv_bytes_per_token, weights_bytes

TARGET = Path(__file__).parents[1] / "pair" / "target"


@pytest.mark.parametrize("dtype, item_bytes", [(None, 2), ("float32", 4), ("bfloat16", 2)])
def test_weights(dtype, item_bytes):
    tensors = [tensor for path in TARGET.glob("*.safetensors") for tensor in load_file(path).values()]
    assert weights_bytes(TARGET, dtype) == item_bytes * sum(tensor.numel() for tensor in tensors)
    assert weights_bytes(TARGET.parent, dtype) is None


def test_keys_and_values():
    config = AutoConfig.from_pretrained(TARGET)
    # As SGLang says when it allocates them: 0.08 GB of keys for 32,768 tokens in float32, and as much of values.
    assert kv_bytes_per_token(config, "float32") == pytest.approx(2 * 0.08 * 2**30 / 32768, rel=0.04)
    assert kv_bytes_per_token(config, "fp8_e4m3") * 4 == kv_bytes_per_token(config, "float32")
    plain = SimpleNamespace(num_attention_heads=4, hidden_size=64, num_hidden_layers=3)
    assert kv_bytes_per_token(plain, "bfloat16") == 2 * 3 * 64 * 2
    assert kv_bytes_per_token(plain, "bfloat16", num_layers=1) == 2 * 64 * 2
