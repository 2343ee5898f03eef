"""Embed a trained small Llama exactly into a larger architecture: the same function at a larger model's cost.

What is added never reaches the residual stream that the small model uses:

- residual dimensions: zero in the embedding and in the output rows of o_proj and down_proj;
- RMSNorm over H instead of h dimensions, the added ones zero: weights times sqrt(h/H), eps times h/H;
- heads: random, with zero columns in o_proj; MLP rows: random, with zero columns in down_proj;
- layers: random, with o_proj and down_proj zero.

An EAGLE-3 head follows its inflated target, whose hidden states keep their first h dimensions and are
zero in the others: every input made of hidden states or embeddings is widened, and the shape's other sizes are
the target's alone, so that a head stays a few percent of the model, as heads are.

Head size and query/key-value group size stay. Weights that have no effect are random rather than zero, so no
kernel can profit from them. Where H/h is a power of 4 the scaling is exact in every dtype, otherwise to the
dtype's rounding.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from tetris_sglang.cache import cache_folder

RECORD_FILE = "inflation.json"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
TARGET, EAGLE3 = ARCHITECTURES = ("LlamaForCausalLM", "LlamaForCausalLMEagle3")
_FORMAT = 2  # part of the cache key: raise it when the weights written for the same arguments change


@dataclass(frozen=True)
class InflatedShape:
    """The size to reach; key-value heads follow from the small model's group size."""

    hidden: int
    layers: int
    heads: int
    intermediate: int


NAMED_SHAPES = {
    # Three query heads per key-value head, as SmolLM2-135M has.
    "smollm2-8b": InflatedShape(hidden=4608, layers=32, heads=72, intermediate=12288),
}


def parse_shape(text: str) -> InflatedShape:
    """Read `NAME` or `hidden=...,layers=...,heads=...,intermediate=...`.

    Raises:
        ValueError: an unknown name or key, a missing key, or a value that is not a positive integer.
    """
    if text in NAMED_SHAPES:
        return NAMED_SHAPES[text]
    keys = [f.name for f in fields(InflatedShape)]
    expected = f"give one of {', '.join(NAMED_SHAPES)}, or {','.join(f'{k}=N' for k in keys)}"
    values: dict[str, int] = {}
    for part in text.split(","):
        key, equals, value = part.strip().partition("=")
        if not equals or key not in keys or key in values or not value.isdecimal() or int(value) == 0:
            raise ValueError(f"shape {text!r}: cannot use {part.strip()!r}; {expected}")
        values[key] = int(value)
    if missing := [k for k in keys if k not in values]:
        raise ValueError(f"shape {text!r}: {', '.join(missing)} missing; {expected}")
    return InflatedShape(**values)


class _Small:
    """The model to embed: its configuration and lazily read tensors."""

    def __init__(self, folder: Path):
        if not (folder / "config.json").is_file():
            raise ValueError(f"{folder} is not a model folder: it has no config.json")
        self.folder = folder
        self.config = json.loads((folder / "config.json").read_text())
        self.architecture = (self.config.get("architectures") or [None])[0]
        if self.architecture not in ARCHITECTURES:
            raise ValueError(f"{folder}: only {', '.join(ARCHITECTURES)} can be embedded, not {self.architecture}")
        for key in ("attention_bias", "mlp_bias"):
            if self.config.get(key):
                raise ValueError(f"{folder}: {key} is set; biases cannot be embedded")
        self.weight_files = sorted(folder.glob("*.safetensors"))
        if not self.weight_files:
            raise ValueError(f"{folder} holds no safetensors weights")
        self._file_of: dict[str, Path] = {}
        for path in self.weight_files:
            with safe_open(path, "pt") as opened:
                self._file_of |= dict.fromkeys(opened.keys(), path)
        self.hidden = self.config["hidden_size"]
        self.layers = self.config["num_hidden_layers"]
        self.heads = self.config["num_attention_heads"]
        self.kv_heads = self.config.get("num_key_value_heads") or self.heads
        self.head_dim = self.config.get("head_dim") or self.hidden // self.heads
        self.intermediate = self.config["intermediate_size"]

    def tensor(self, name: str) -> Tensor:
        """Float32, except for integers and truth values."""
        with safe_open(self._file_of[name], "pt") as opened:
            tensor = opened.get_tensor(name)
        return tensor.float() if tensor.is_floating_point() else tensor

    @property
    def names(self) -> list[str]:
        return list(self._file_of)

    def __contains__(self, name: str) -> bool:
        return name in self._file_of


def _check_shape(small: _Small, shape: InflatedShape) -> None:
    for field in fields(shape):
        wanted, had = getattr(shape, field.name), getattr(small, field.name)
        if wanted < had:
            raise ValueError(f"shape {field.name}={wanted} is smaller than the source's {had}: give {had} or more")
    group = small.heads // small.kv_heads
    if shape.heads % group:
        raise ValueError(
            f"shape heads={shape.heads} does not divide into groups of {group} query heads per key-value "
            f"head, as the source has: give a multiple of {group}"
        )
    if shape.hidden % shape.heads:
        raise ValueError(
            f"shape hidden={shape.hidden} is not a multiple of heads={shape.heads}, which transformers "
            "requires whatever the head size: change one of them"
        )


def _random(name: str, sizes: tuple[int, ...]) -> Tensor:
    """Noise that depends on the tensor's name alone, at the scale of trained weights."""
    digest = hashlib.sha256(name.encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    return torch.randn(sizes, generator=generator).mul_(0.02)


def _widen(
    small: _Small,
    name: str,
    sizes: tuple[int, int],
    *,
    writes_residual: bool = False,
    parts: int = 1,
    is_added: bool = False,
) -> Tensor:
    """A matrix of the large model.

    Args:
        sizes: [outputs, inputs] in the large model.
        writes_residual: the outputs are residual dimensions, of which the added ones stay zero.
        parts: hidden states or embeddings that make up the input, side by side.
        is_added: there is no such matrix in the small model.
    """
    large = torch.zeros(sizes) if writes_residual else _random(name, sizes)
    if is_added:
        return large
    # The first heads stay the first: query head i keeps key-value head i // group.
    weight = small.tensor(name)
    for index, part in enumerate(weight.chunk(parts, dim=1)):
        start = index * (sizes[1] // parts)
        large[: len(part), start : start + part.shape[1]] = part
    return large


def _layer_tensors(
    small: _Small,
    shape: InflatedShape,
    prefix: str,
    *,
    is_added: bool = False,
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm"),
    input_parts: int = 1,
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of one layer of the large model, float32.

    Args:
        prefix: of their names, "model.layers.0." for example.
        input_parts: the attention reads so many hidden states side by side.
    """
    kv_heads = shape.heads * small.kv_heads // small.heads
    q_rows, kv_rows = shape.heads * small.head_dim, kv_heads * small.head_dim
    # name: (sizes in the large model, whether the output goes to the residual stream, parts of the input)
    matrices = {
        "self_attn.q_proj": ((q_rows, input_parts * shape.hidden), False, input_parts),
        "self_attn.k_proj": ((kv_rows, input_parts * shape.hidden), False, input_parts),
        "self_attn.v_proj": ((kv_rows, input_parts * shape.hidden), False, input_parts),
        "self_attn.o_proj": ((shape.hidden, q_rows), True, 1),
        "mlp.gate_proj": ((shape.intermediate, shape.hidden), False, 1),
        "mlp.up_proj": ((shape.intermediate, shape.hidden), False, 1),
        "mlp.down_proj": ((shape.hidden, shape.intermediate), True, 1),
    }
    for short_name, (sizes, writes_residual, parts) in matrices.items():
        name = f"{prefix}{short_name}.weight"
        options = {"writes_residual": writes_residual, "parts": parts, "is_added": is_added}
        yield name, _widen(small, name, sizes, **options)
    for short_name in norms:
        name = f"{prefix}{short_name}.weight"
        yield name, _inflate_norm(small, shape, name, is_added)


def _inflate_norm(small: _Small, shape: InflatedShape, name: str, is_added: bool) -> Tensor:
    scale = math.sqrt(small.hidden / shape.hidden)
    large = (1 + _random(name, (shape.hidden,))) * scale
    if not is_added:
        large[: small.hidden] = small.tensor(name) * scale
    return large


def _outer_tensors(small: _Small, shape: InflatedShape) -> Iterator[tuple[str, Tensor]]:
    """Embedding, final norm and an untied head, float32."""
    name = "model.embed_tokens.weight"
    embedding = small.tensor(name)
    large = torch.zeros(embedding.shape[0], shape.hidden)
    large[:, : small.hidden] = embedding
    yield name, large
    yield "model.norm.weight", _inflate_norm(small, shape, "model.norm.weight", False)
    name = "lm_head.weight"
    if name in small and not small.config.get("tie_word_embeddings"):
        yield name, _widen(small, name, (len(small.tensor(name)), shape.hidden))


def _outer_head_tensors(small: _Small, shape: InflatedShape) -> Iterator[tuple[str, Tensor]]:
    """What an EAGLE-3 head has outside its layer."""
    parts = small.tensor("fc.weight").shape[1] // small.hidden
    sizes = (shape.hidden, parts * shape.hidden)
    yield "fc.weight", _widen(small, "fc.weight", sizes, writes_residual=True, parts=parts)
    yield "norm.weight", _inflate_norm(small, shape, "norm.weight", False)
    rows = len(small.tensor("lm_head.weight"))
    yield "lm_head.weight", _widen(small, "lm_head.weight", (rows, shape.hidden))
    for name in ("d2t", "t2d"):
        yield name, small.tensor(name)


def _shard_tensors(small: _Small, shape: InflatedShape, number: int) -> Iterator[tuple[str, Tensor]]:
    """The tensors of one file of the large model; the first holds what is outside the layers."""
    if small.architecture == TARGET:
        if number == 0:
            return _outer_tensors(small, shape)
        is_added = number > small.layers
        return _layer_tensors(small, shape, f"model.layers.{number - 1}.", is_added=is_added)
    if number == 0:
        return _outer_head_tensors(small, shape)
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    return _layer_tensors(small, shape, "midlayer.", norms=norms, input_parts=2)


def inflate(small_folder: Path | str, out: Path | str, shape: InflatedShape, dtype: str = "float32") -> None:
    """Write the large model to `out`, holding about one layer per processor core in memory at a time.

    Args:
        small_folder: a Hugging Face folder of a LlamaForCausalLM, or of an EAGLE-3 head of one, with safetensors
            weights.
        out: a folder that does not exist, or is empty.
        shape: the size to reach; for a head, the shape of its target.
        dtype: of the weights written: float32 or bfloat16.
    Raises:
        ValueError: the shape cannot hold the small model, or the small model is of another kind.
        FileExistsError: `out` is not empty.
    """
    small, out = _Small(Path(small_folder)), Path(out)
    if small.architecture != TARGET:
        if small.layers != 1:
            raise ValueError(f"{small_folder}: only heads of one layer can be embedded, not of {small.layers}")
        shape = replace(shape, layers=1, heads=small.heads, intermediate=small.intermediate)
    _check_shape(small, shape)
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype}: give one of {', '.join(DTYPES)}")
    if out.exists() and any(out.iterdir()):
        raise FileExistsError(f"{out} is not empty: name another folder")
    out.mkdir(parents=True, exist_ok=True)

    total_shards, weight_map, total_bytes, parameters = shape.layers + 1, {}, 0, 0
    missing = set(small.names)

    def write_shard(number: int) -> tuple[str, list[str], int, int]:
        shard = {
            name: tensor.to(DTYPES[dtype] if tensor.is_floating_point() else tensor.dtype).contiguous()
            for name, tensor in _shard_tensors(small, shape, number)
        }
        file_name = f"model-{number + 1:05d}-of-{total_shards:05d}.safetensors"
        save_file(shard, out / file_name, metadata={"format": "pt"})
        num_bytes = sum(t.numel() * t.element_size() for t in shard.values())
        num_parameters = sum(t.numel() for t in shard.values() if t.is_floating_point())
        return file_name, list(shard), num_bytes, num_parameters

    # Drawing random numbers takes one core and most of the time.
    with ThreadPoolExecutor(min(os.cpu_count() or 1, 16)) as pool:
        written = pool.map(write_shard, range(total_shards))
        for done in tqdm(written, total=total_shards, desc="inflate", unit="layer"):
            file_name, names, num_bytes, num_parameters = done
            weight_map |= dict.fromkeys(names, file_name)
            total_bytes += num_bytes
            parameters += num_parameters
            missing -= set(names)
    if missing and small.architecture != TARGET:
        raise ValueError(f"{small_folder}: no place for {', '.join(sorted(missing))}")
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")

    config = small.config | {
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads * small.kv_heads // small.heads,
        "head_dim": small.head_dim,
        "intermediate_size": shape.intermediate,
        "rms_norm_eps": small.config["rms_norm_eps"] * small.hidden / shape.hidden,
    }
    config |= {key: dtype for key in ("dtype", "torch_dtype") if key in config}
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for path in sorted(small.folder.glob("*.json")) + sorted(small.folder.glob("*.jinja")):
        if path.name not in ("config.json", "model.safetensors.index.json", RECORD_FILE):
            shutil.copyfile(path, out / path.name)
    record = {
        "source_sha256": _content_hash(small),
        "source_shape": asdict(InflatedShape(small.hidden, small.layers, small.heads, small.intermediate)),
        "shape": asdict(shape),
        "dtype": dtype,
        "parameters": parameters,
        "format": _FORMAT,
    }
    (out / RECORD_FILE).write_text(json.dumps(record, indent=2) + "\n")


def _content_hash(small: _Small) -> str:
    """SHA-256 over the names and contents of everything that goes into the large model."""
    digest = hashlib.sha256()
    for path in sorted([*small.weight_files, *small.folder.glob("*.json"), *small.folder.glob("*.jinja")]):
        digest.update(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def ensure_inflated(
    small_folder: Path | str,
    shape: str | InflatedShape,
    dtype: str = "float32",
) -> Path:
    """The folder of the inflated model, made on the first call for this content, shape and dtype.

    Args:
        small_folder, dtype: as for `inflate`.
        shape: an InflatedShape, or text as for `parse_shape`.
    Returns:
        A complete folder, also when several processes ask at once: each builds its own, the first done wins.
    """
    small = _Small(Path(small_folder))
    shape = parse_shape(shape) if isinstance(shape, str) else shape
    cache = cache_folder()
    key = json.dumps([_FORMAT, _content_hash(small), asdict(shape), dtype])
    folder = cache / f"inflated-{hashlib.sha256(key.encode()).hexdigest()[:20]}"
    if folder.exists():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=".inflating-", dir=cache))
    try:
        inflate(small.folder, partial, shape, dtype)
        try:
            partial.rename(folder)
        except OSError:
            if not folder.exists():  # otherwise another process was faster, with the same content
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder
