"""The random numbers that a target and its draft share, so that they draw the same token wherever they nearly agree.

A token is drawn as the winner of a race: token t arrives after E_t / p_t, with E_t exponential of mean 1, and is first with
probability p_t. (In logarithms that is the Gumbel-max trick.) Let the target race with p and the draft with q over *the same*
E: the draft's winner is then the target's with probability sum_t 1 / sum_s max(p_s / p_t, q_s / q_t), at least
(1 - d) / (1 + d) for total variation d (Daliri, Musco, Suresh, "Coupling without Communication and Drafter-Invariant
Speculative Decoding", arXiv:2408.07978).

E is a function of the request's seed, the position and the token. So a request's text is a function of its seed and the
target alone: whatever is drafted, selected or verified, nothing of it can show in the output.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

MASK_31 = 2**31 - 1
LARGEST_UNIFORM = 1 - 2.0**-24
"""The next float32 is 1, whose logarithm is infinite."""
# A finaliser and an increment of 64 bits (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014), and
# one of 32 bits (C. Wellons, "Prospecting for hash functions", 2018), as signed numbers.
GOLDEN_64, MIX_64_A, MIX_64_B = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15
MIX_32_A, MIX_32_B = 0x7FEB352D, -0x7B935975


class RequestNoise(NamedTuple):
    """How each row's request draws."""

    seeds: Tensor
    """[rows] int64."""
    scales: Tensor
    """[rows] float32, the temperature; 0: greedy, the noise does nothing."""


def exponentials(seeds: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """E for every row and token.

    Args:
        seeds, positions: [rows] int64; the position of the token after which is drawn. token_ids: [n] int64, below 2**31.
    Returns:
        [rows, n] float32, in (2e-10, 17).
    Sync: none; CUDA-graph safe.
    """
    key = _mix(seeds + positions * GOLDEN_64)
    # Every row walks over the tokens with a stride (odd, so no two meet) and a start of its own.
    strides, starts = ((key << 32 >> 32) | 1).to(torch.int32), (key >> 32).to(torch.int32)
    bits = (strides[:, None] * token_ids.to(torch.int32)).add_(starts[:, None])
    for shift, factor in ((16, MIX_32_A), (15, MIX_32_B)):
        bits ^= (bits >> shift).bitwise_and_(2 ** (32 - shift) - 1)
        bits *= factor
    bits ^= (bits >> 16).bitwise_and_(2**16 - 1)
    uniforms = bits.bitwise_and_(MASK_31).float().add_(0.5).mul_(2.0**-31).clamp_(max=LARGEST_UNIFORM)
    # -log(1 - u) to the last places of a small u, as log(1 - u) / (-u) is nearly the same for u and for what 1 - (1 - u) has
    # left of it. torch's log1p does that, too, ten times as slowly on CPUs.
    rest = 1 - uniforms
    slopes = rest.log().div_(rest.sub_(1)).nan_to_num_(nan=1.0)
    return uniforms.mul_(slopes)


def perturb(logits: Tensor, noise: RequestNoise, positions: Tensor, token_ids: Tensor | None = None) -> Tensor:
    """Logits whose largest belongs to the winner of the race, at the request's temperature.

    In units of the logits themselves, so how far the winner is ahead means much the same at any temperature
    (docs/lessons.md).

    Args:
        logits: [rows, n] floats. positions: [rows] int64, as for `exponentials`.
        token_ids: [n] int64, the tokens that the columns stand for; default: 0..n - 1.
    Returns:
        [rows, n] float32.
    Sync: none; CUDA-graph safe.
    """
    if token_ids is None:
        token_ids = torch.arange(logits.shape[1], device=logits.device)
    lead = exponentials(noise.seeds, positions, token_ids).log_()
    return torch.addcmul(logits.float(), lead, noise.scales[:, None], value=-1)


def draw(weights: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Draw one token per row; one of weight 0 never is.

    Args:
        weights: [rows, vocab] floats >= 0, each row with a positive sum. seeds, positions: as for `exponentials`.
    Returns:
        [rows] int64.
    Sync: none; CUDA-graph safe.
    """
    arrivals = exponentials(seeds, positions, torch.arange(weights.shape[1], device=weights.device))
    return (weights / arrivals).argmax(dim=1)


def derive_seeds(seeds: Tensor, positions: Tensor, purpose: int) -> Tensor:
    """Seeds for random numbers that have nothing to do with the seeds' own, nor with those of other positions or purposes.

    Args:
        seeds, positions: [rows] int64. purpose: below 2**63.
    Returns:
        [rows] int64.
    Sync: none; CUDA-graph safe.
    """
    return _mix((seeds ^ purpose) + positions * GOLDEN_64)


def _mix(key: Tensor) -> Tensor:
    key = (key ^ _shift(key, 30)) * MIX_64_A
    key = (key ^ _shift(key, 27)) * MIX_64_B
    return key ^ _shift(key, 31)


def _shift(bits: Tensor, by: int) -> Tensor:
    """To the right, zeros coming in from the left: int64."""
    return (bits >> by) & ((1 << (64 - by)) - 1)
