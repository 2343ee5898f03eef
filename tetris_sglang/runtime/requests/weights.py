"""What a token of each request counts, in selection and in planning alike: what the request asks for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from tetris_sglang.observers import Observer
from tetris_sglang.runtime.host_copy import send
from tetris_sglang.runtime.requests.options import DEFAULT, RequestOptions, parse


class Wishes(NamedTuple):
    """How one step's selection differs from that of a batch without wishes."""

    weights: Tensor
    """[batch] float32 on the batch's device: 0 for a request that is to get no drafts, else its weight."""
    num_speculating: int
    """Requests with a weight above 0."""
    mean_weight: float
    """Of these; 1 where there are none."""


class RequestWeights(Observer):
    """An `Observer` of what requests ask for. Steps without a wish cost nothing.

    Args:
        device: where selection runs.
    """

    def __init__(self, device: str | torch.device) -> None:
        self._device = torch.device(device)
        # By request, not by its slot, which the next request takes over; a request that is gone leaves by itself.
        self._special: WeakKeyDictionary[Any, RequestOptions] = WeakKeyDictionary()

    def begin(self, batch, next_token_ids: Tensor) -> None:
        for req in batch.reqs:
            custom_params = req.sampling_params.custom_params
            # Validated before.
            if custom_params and (options := parse(custom_params)) != DEFAULT:
                self._special[req] = options

    def get_wishes(self, reqs: Sequence) -> Wishes | None:
        """Of the requests of a decode step, in their order; None: nobody has one.

        Sync: none. Looks at the requests one by one only while one with a wish is running.
        """
        if not self._special:
            return None
        options = [self._special.get(req, DEFAULT) for req in reqs]
        if all(option is DEFAULT for option in options):
            return None
        weights = [float(option.weight) if option.speculate else 0.0 for option in options]
        num_speculating = sum(option.speculate for option in options)
        mean_weight = sum(weights) / num_speculating if num_speculating else 1.0
        return Wishes(send(weights, self._device), num_speculating, mean_weight)
