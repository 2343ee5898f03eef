"""Linear layers on weights laid out for few rows.

A speculative pass multiplies large weights with few rows. `torch.nn.functional.linear` rearranges the weight for its kernel
in every call, which at such sizes costs as much as the product; oneDNN does it once (docs/lessons.md).
"""

from pathlib import Path

import torch
from sglang.srt.layers.quantization.unquant import UnquantizedEmbeddingMethod
from torch import Tensor

# Below, oneDNN's fixed cost per call (some 10 microseconds) is more than the rearranging.
_MIN_WEIGHTS = 2**18
# The row count that the layout is chosen for; it serves every other one as well.
_TYPICAL_ROWS = 32


def _count_rows_of_torch(cpuinfo: Path = Path("/proc/cpuinfo")) -> int:
    """Up to how many rows torch's own product is the faster one: on Intel's CPUs MKL reads the weight as it lies then."""
    return 3 if cpuinfo.exists() and "GenuineIntel" in cpuinfo.read_text() else 0


_ROWS_OF_TORCH = _count_rows_of_torch()

_generation = 0


class _Packed:
    """A weight in oneDNN's layout, and what it was made from."""

    def __init__(self, weight: Tensor) -> None:
        self._made_from = weight.data_ptr(), _generation
        self.tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _TYPICAL_ROWS)

    def is_of(self, weight: Tensor) -> bool:
        return self._made_from == (weight.data_ptr(), _generation)


def _multiply(layer, x: Tensor, bias: Tensor | None) -> Tensor | None:
    """x [..., in], layer.weight [out, in] -> [..., out]; None: torch's own product is as fast or faster.

    float32 only: without AMX or AVX512-BF16 the layout gains next to nothing in bfloat16. The layer keeps its plain
    weight beside the packed one.
    """
    weight = layer.weight
    if (
        x.dtype != torch.float32
        or weight.dtype != torch.float32
        or weight.numel() < _MIN_WEIGHTS
        or x.numel() <= _ROWS_OF_TORCH * x.shape[-1]
        or not torch.backends.mkldnn.enabled
    ):
        return None
    packed = getattr(layer, "_tetris_packed", None)
    if packed is None or not packed.is_of(weight):
        packed = layer._tetris_packed = _Packed(weight)
    return torch.ops.mkldnn._linear_pointwise(x, packed.tensor, bias, "none", [], "")


def apply(original, self, layer, x, bias=None):
    """Around `UnquantizedLinearMethod.apply`."""
    product = _multiply(layer, x, bias)
    return original(self, layer, x, bias) if product is None else product


def compute_lm_head(original, self, hidden_states, lm_head, embedding_bias=None, out=None):
    """Around `LogitsProcessor._compute_lm_head`: the vocabulary's is most models' largest weight."""
    product = None
    # Not for quantised ones, those with adapters, and precisions that somebody asked for.
    if type(getattr(lm_head, "quant_method", None)) is UnquantizedEmbeddingMethod and self.rl_on_policy_target is None:
        product = _multiply(lm_head, hidden_states, None)
    return original(self, hidden_states, lm_head, embedding_bias, out=out) if product is None else product


def forget_packed(original, *args, **kwargs):
    """Around everything that changes the weights of a running server: the packed ones are made anew when next used."""
    global _generation
    try:
        return original(*args, **kwargs)
    finally:  # a failed update may have changed some
        _generation += 1
