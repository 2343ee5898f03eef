"""Seeds of the running requests, and SGLang's sampler drawing with them; see acceptance/noise.py for what that is good for."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import torch
from sglang.srt.layers.sampler import Sampler
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from torch import Tensor

from tetris_sglang.acceptance import RequestNoise
from tetris_sglang.runtime.requests.values import RequestValues

_FILTERS = ("top_ks", "top_ps", "min_ps")
_ROWS_AT_ONCE = 256
"""Rows that are filtered together: with 150 thousand tokens a tensor of them takes 150 MB, and filters make some three."""


class RequestSeeds(RequestValues):
    """Every running request's seed: the one it asks for (`sampling_seed`, OpenAI's `seed`), or one of its own.

    Samples of one request (n > 1) share their parameters, so each has one of its own, whatever the request asks for.

    Args:
        num_slots: of requests.
        random_seed: the server's, the same on all ranks. replica: which of the servers with that seed (--dp-size).
    Raises:
        ValueError: no seed, so that ranks would draw differently.
    """

    def __init__(self, num_slots: int, random_seed: int, replica: int | None, device: str | torch.device) -> None:
        if random_seed is None:
            raise ValueError("random_seed=None: the seeds of requests need the server's, as SGLang resolved it")
        generator = random.Random(f"{random_seed}/{replica}")

        def make(req) -> int:
            params = req.sampling_params
            own = generator.getrandbits(63)
            return own if params.sampling_seed is None or params.n > 1 else params.sampling_seed

        super().__init__(make, num_slots, device)

    def give(self, batch) -> None:
        """Put the requests' seeds where SGLang's sampler and the draft look for them.

        Args:
            batch: a ScheduleBatch inside SGLang's forward isolation: its sampling_info is a copy.
        """
        if not batch.sampling_info.is_all_greedy:
            batch.sampling_info.sampling_seed = self.at(batch.req_pool_indices)


def request_noise(sampling_info: SamplingBatchInfo) -> RequestNoise | None:
    """How the requests of a batch draw; None: all are greedy."""
    seeds = sampling_info.sampling_seed
    if seeds is None:
        return None
    # SGLang sets a greedy request's top-k to 1, and its temperature, too.
    scales = torch.where(sampling_info.top_ks == 1, 0.0, sampling_info.temperatures[:, 0])
    return RequestNoise(seeds, scales)


class NoiseSampler(Sampler):
    """SGLang's sampler, its filters included; rows with a seed draw with the noise that their drafts share.

    SGLang's own seeded draws are not used: FlashInfer has none, those in torch come out of float64 over the whole
    vocabulary and, filtered, depend on a token's rank instead of the token.

    Args:
        draw: as acceptance.noise.draw, for the device. keeps_laws: for acceptance that looks at them.
    """

    laws: Tensor | None = None
    """[rows, vocab] float32, what the last call drew from; stays as it is where all requests are greedy."""

    def __init__(self, draw: Callable[[Tensor, Tensor, Tensor], Tensor], keeps_laws: bool = False) -> None:
        super().__init__()
        self._draw, self._keeps_laws = draw, keeps_laws

    def _sample_from_probs(self, probs, sampling_info, positions, simple_sampling_case):
        seeds = sampling_info.sampling_seed
        if seeds is None:
            return super()._sample_from_probs(probs, sampling_info, positions, simple_sampling_case)
        positions = positions.to(torch.int64)
        if simple_sampling_case:
            self.laws = probs if self._keeps_laws else None
            return self._draw(probs, seeds, positions).to(torch.int32), None
        tokens, laws = [], []
        for begin in range(0, len(probs), _ROWS_AT_ONCE):
            rows = slice(begin, begin + _ROWS_AT_ONCE)
            weights = self._filter(probs[rows], sampling_info, positions[rows], rows)
            tokens.append(self._draw(weights, seeds[rows], positions[rows]))
            if self._keeps_laws:
                laws.append(weights / weights.sum(dim=1, keepdim=True))
        self.laws = torch.cat(laws) if laws else None
        return torch.cat(tokens).to(torch.int32), None

    def _filter(self, probs: Tensor, sampling_info: SamplingBatchInfo, positions: Tensor, rows: slice) -> Tensor:
        """What the filters leave of `probs` [n, vocab], the batch's `rows`: what a request that asks for its sampling mask
        gets."""
        info = replace(
            sampling_info,
            **{name: getattr(sampling_info, name)[rows] for name in _FILTERS},
            sampling_seed=None,
            sampling_mask_batch_indices=torch.arange(len(probs), device=probs.device),
        )
        _, captured = super()._sample_from_probs(probs, info, positions, False)
        if captured.token_ids is None:
            return captured.weights
        return torch.zeros_like(probs).scatter_(1, captured.token_ids.long(), captured.weights)


def install_sampler(model_runner, draw: Callable[[Tensor, Tensor, Tensor], Tensor], keeps_laws: bool = False) -> NoiseSampler:
    """Let the target's runner draw with the noise.

    Args:
        draw, keeps_laws: as in `NoiseSampler`.
    Raises:
        RuntimeError: it has a sampler that is not SGLang's standard one.
    """
    if type(model_runner.sampler) is not Sampler:
        raise RuntimeError(
            f"--speculative-algorithm TETRIS draws with SGLang's own sampler, but something else brought "
            f"{type(model_runner.sampler).__name__}. Remove the plugin that registers it."
        )
    model_runner.sampler = NoiseSampler(draw, keeps_laws)
    return model_runner.sampler
