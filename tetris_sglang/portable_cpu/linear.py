"""Linear layers on weights laid out for few rows.

A speculative pass multiplies large weights with few rows. `torch.nn.functional.linear` rearranges the weight for its kernel
in every call, which at such sizes costs as much as the product; oneDNN does it once (docs/lessons.md).
"""

import torch
from torch import Tensor

# Below, oneDNN's fixed cost per call (10 to 50 microseconds) is more than the rearranging.
_MIN_WEIGHTS = 2**19
# The row count that the layout is chosen for; it serves every other one as well.
_TYPICAL_ROWS = 32

_generation = 0


class _Packed:
    """A weight in oneDNN's layout, and the generation of weights it was made from."""

    def __init__(self, weight: Tensor) -> None:
        self.generation = _generation
        self.tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _TYPICAL_ROWS)


def apply(original, self, layer, x, bias=None):
    """Around `UnquantizedLinearMethod.apply`: x [..., in], layer.weight [out, in] -> [..., out].

    float32 only: without AMX or AVX512-BF16 the layout gains next to nothing in bfloat16. The layer keeps its plain
    weight beside the packed one.
    """
    weight = layer.weight
    if (
        x.dtype != torch.float32
        or weight.dtype != torch.float32
        or weight.numel() < _MIN_WEIGHTS
        or not torch.backends.mkldnn.enabled
    ):
        return original(self, layer, x, bias)
    packed = getattr(layer, "_tetris_packed", None)
    if packed is None or packed.generation != _generation:
        packed = layer._tetris_packed = _Packed(weight.detach())
    return torch.ops.mkldnn._linear_pointwise(x, packed.tensor, bias, "none", [], "")


def forget_packed(original, *args, **kwargs):
    """Around everything that changes the weights of a running server: the packed ones are made anew when next used."""
    global _generation
    try:
        return original(*args, **kwargs)
    finally:  # a failed update may have changed some
        _generation += 1
