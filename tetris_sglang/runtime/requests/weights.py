"""What a token of each request counts, in selection and in planning alike: what the request asks for, times its pace's
weight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from tetris_sglang.observers import StepRecord
from tetris_sglang.runtime.host_copy import send
from tetris_sglang.runtime.requests.options import DEFAULT, RequestOptions, parse
from tetris_sglang.selection import RequestPace


class Wishes(NamedTuple):
    """How one step's selection differs from that of a batch without wishes."""

    weights: Tensor
    """[batch] float32 on the batch's device: 0 for a request that is to get no drafts, else its weight."""
    num_speculating: int
    """Requests with a weight above 0."""
    mean_weight: float
    """Of these; 1 where there are none."""


class RequestWeights:
    """An `Observer` of what requests ask for and of how fast they are. Steps without a wish cost nothing for wishes.

    Args:
        device: where selection runs. pace: of the running requests; None: the fast and the slow count alike.
    """

    def __init__(self, device: str | torch.device, pace: RequestPace | None = None) -> None:
        self._device, self._pace = torch.device(device), pace
        # By request, not by its slot, which the next request takes over; a request that is gone leaves by itself.
        self._special: WeakKeyDictionary[Any, RequestOptions] = WeakKeyDictionary()

    def begin(self, batch, next_token_ids: Tensor) -> None:
        for req in batch.reqs:
            custom_params = req.sampling_params.custom_params
            # Validated before.
            if custom_params and (options := parse(custom_params)) != DEFAULT:
                self._special[req] = options
        if self._pace is not None:
            self._pace.forget(batch.req_pool_indices)

    def observe(self, record: StepRecord) -> None:
        # A plain step is as fast for everybody.
        if self._pace is not None and record.proposal is not None:
            self._pace.observe(record.batch.req_pool_indices, record.accepted.num_accepted + 1)

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

    def compose(self, rows: Tensor, wishes: Wishes | None) -> Tensor | None:
        """[batch] float32, of the requests in these slots [batch]; None: all alike. Sync: none."""
        pace_weights = None if self._pace is None else self._pace.weights(rows)
        if wishes is None or pace_weights is None:
            return pace_weights if wishes is None else wishes.weights
        return pace_weights * wishes.weights
