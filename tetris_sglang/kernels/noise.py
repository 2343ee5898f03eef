"""Shared noise on a GPU: logits perturbed in one launch, and tokens drawn in one; see acceptance/noise.py."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tetris_sglang.acceptance import noise as reference
from tetris_sglang.acceptance.noise import RequestNoise
from tetris_sglang.kernels.checks import INT64, check_device, check_tensor

BLOCK = 1024
"""Columns of one program."""
# Triton reads a module's variables only if they are declared as constants.
_GOLDEN_64 = tl.constexpr(reference.GOLDEN_64)
_MIX_64_A, _MIX_64_B = tl.constexpr(reference.MIX_64_A), tl.constexpr(reference.MIX_64_B)
_MIX_32_A, _MIX_32_B = tl.constexpr(reference.MIX_32_A), tl.constexpr(reference.MIX_32_B)
_MASK_31, _LARGEST_UNIFORM = tl.constexpr(reference.MASK_31), tl.constexpr(reference.LARGEST_UNIFORM)
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def perturb(logits: Tensor, noise: RequestNoise, positions: Tensor, token_ids: Tensor | None = None) -> Tensor:
    """As `acceptance.noise.perturb`; its logarithms may differ in the last places, but for a draft and its target alike.

    Args:
        logits: [rows, n] float32, bfloat16 or float16, columns next to each other.
        noise, positions: [rows]. token_ids: [n] int64; default: 0..n - 1.
    Returns:
        [rows, n] float32.
    Raises:
        ValueError: wrong shapes, dtypes or devices.
    Sync: none; CUDA-graph safe.
    """
    check_device(logits)
    _check_columns("logits", logits, _FLOATS)
    rows, columns = logits.shape
    check_tensor("seeds", noise.seeds, (rows,), INT64, logits)
    check_tensor("scales", noise.scales, (rows,), (torch.float32,), logits)
    check_tensor("positions", positions, (rows,), INT64, logits)
    if token_ids is not None:
        check_tensor("token_ids", token_ids, (columns,), INT64, logits)
    perturbed = torch.empty((rows, columns), dtype=torch.float32, device=logits.device)
    if perturbed.numel():
        perturb_kernel[(rows, triton.cdiv(columns, BLOCK))](
            logits,
            noise.seeds,
            noise.scales,
            positions,
            token_ids,
            perturbed,
            logits.stride(0),
            columns,
            HAS_TOKEN_IDS=token_ids is not None,
            BLOCK=BLOCK,
        )
    return perturbed


def draw(weights: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """As `acceptance.noise.draw`, but for the last places of the arrivals.

    Args:
        weights: [rows, vocab] float32, >= 0, columns next to each other. seeds, positions: [rows] int64.
    Returns:
        [rows] int64.
    Raises, Sync: as `perturb`.
    """
    check_device(weights)
    _check_columns("weights", weights, (torch.float32,))
    rows, columns = weights.shape
    check_tensor("seeds", seeds, (rows,), INT64, weights)
    check_tensor("positions", positions, (rows,), INT64, weights)
    blocks = triton.cdiv(columns, BLOCK)
    best = torch.empty((rows, blocks), dtype=torch.float32, device=weights.device)
    tokens = torch.empty((rows, blocks), dtype=torch.int64, device=weights.device)
    if best.numel():
        draw_kernel[(rows, blocks)](
            weights,
            seeds,
            positions,
            best,
            tokens,
            weights.stride(0),
            columns,
            blocks,
            BLOCK=BLOCK,
        )
    return tokens.gather(1, best.argmax(dim=1, keepdim=True)).squeeze(1)


def _check_columns(name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    if tensor.ndim != 2 or tensor.dtype not in dtypes or tensor.stride(1) != 1:
        raise ValueError(
            f"{name} must be [rows, n] of {' or '.join(map(str, dtypes))} with columns next to each other, got "
            f"{tensor.dtype} {list(tensor.shape)} with strides {tensor.stride()}"
        )


@triton.jit(do_not_specialize=["logits_stride", "columns"])
def perturb_kernel(
    logits,
    seeds,
    scales,
    positions,
    token_ids,
    perturbed,
    logits_stride,
    columns,
    HAS_TOKEN_IDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    value = tl.load(logits + row * logits_stride + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(scales + row)
    if scale != 0.0:
        if HAS_TOKEN_IDS:
            token = tl.load(token_ids + column, mask=inside, other=0).to(tl.int32)
        else:
            token = column
        arrival = _arrive(tl.load(seeds + row), tl.load(positions + row), token)
        value -= scale * tl.log(arrival)
    tl.store(perturbed + row * columns + column, value, mask=inside)


@triton.jit(do_not_specialize=["weights_stride", "columns", "blocks"])
def draw_kernel(
    weights,
    seeds,
    positions,
    best,
    tokens,
    weights_stride,
    columns,
    blocks,
    BLOCK: tl.constexpr,
):
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    weight = tl.load(weights + row * weights_stride + column, mask=inside, other=0.0)
    arrival = _arrive(tl.load(seeds + row), tl.load(positions + row), column)
    earliness = tl.where(inside, weight / arrival, -1.0)
    tl.store(best + row * blocks + block, tl.max(earliness, axis=0))
    tl.store(tokens + row * blocks + block, (block * BLOCK + tl.argmax(earliness, axis=0)).to(tl.int64))


@triton.jit
def _arrive(seed, position, token):
    key = seed + position * _GOLDEN_64
    key = (key ^ _shift_64(key, 30)) * _MIX_64_A
    key = (key ^ _shift_64(key, 27)) * _MIX_64_B
    key = key ^ _shift_64(key, 31)
    bits = (key >> 32).to(tl.int32) + (key | 1).to(tl.int32) * token
    bits = (bits ^ _shift_32(bits, 16)) * _MIX_32_A
    bits = (bits ^ _shift_32(bits, 15)) * _MIX_32_B
    bits = bits ^ _shift_32(bits, 16)
    uniform = ((bits & _MASK_31).to(tl.float32) + 0.5) * 4.656612873077393e-10  # 2^-31
    uniform = tl.minimum(uniform, _LARGEST_UNIFORM)
    # 1 - uniform has lost the small ones' last places: these are what wins.
    series = 1 + uniform * (1 / 2 + uniform * (1 / 3 + uniform * (1 / 4 + uniform * (1 / 5))))
    return tl.where(uniform < 0.03125, uniform * series, -tl.log(1 - uniform))


@triton.jit
def _shift_64(bits, BY: tl.constexpr):
    return (bits.to(tl.uint64, bitcast=True) >> BY).to(tl.int64, bitcast=True)


@triton.jit
def _shift_32(bits, BY: tl.constexpr):
    return (bits.to(tl.uint32, bitcast=True) >> BY).to(tl.int32, bitcast=True)
