"""The real model of the demo and the benchmarks: SmolLM2-135M-Instruct, from a package, made once.

The package holds a 4-bit GGUF file (Apache-2.0); `transformers` dequantises it to a float32 folder that SGLang serves like
any other model's.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from tetris_sglang.cache import cache_folder
from tetris_sglang.tools.fetch import SMOLLM2, NotFetched, fetch

REPOSITORY = Path(__file__).resolve().parents[2]
HEAD = Path(__file__).parents[1] / "data" / "smollm2-135m-eagle3"
"""The EAGLE-3 head that the package ships for it."""


def ensure_target(cache: Path | None = None) -> Path:
    """The model's folder, made if it is not there yet: 93 MB to fetch, 540 MB to keep, some ten seconds.

    Args:
        cache: default: `cache_folder()`.
    Raises:
        NotFetched: the package cannot be had, or what reads it is not installed.
    """
    cache = cache or cache_folder()
    folder = cache / "models" / f"smollm2-135m-instruct-{SMOLLM2.sha256[:8]}"
    if not folder.exists():
        packed = fetch(SMOLLM2, cache)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".making-") as name:
            partial = Path(name) / folder.name
            _dequantise(packed, partial)
            os.replace(partial, folder)
    return folder


def _dequantise(packed: Path, out: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        model = AutoModelForCausalLM.from_pretrained(packed.parent, gguf_file=packed.name, dtype=torch.float32)
    except ImportError as error:
        raise NotFetched(f"{packed.name} cannot be read: {error}. pip install gguf accelerate, or run make env") from error
    # What is saved is an ordinary model: nothing of it is quantised any more.
    del model.config.quantization_config
    model.hf_quantizer = None
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(packed.parent, gguf_file=packed.name).save_pretrained(out)
