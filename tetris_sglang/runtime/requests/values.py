"""A number for every running request, which it keeps wherever it runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from tetris_sglang.runtime.host_copy import send


class RequestValues:
    """One number per request, looked up on the device by the slot in which it runs.

    A request that is retracted keeps its number in another slot; one that is gone leaves by itself.

    Args:
        make: the number of a request (SGLang's `Req`) that is seen for the first time. num_slots: of running requests.
    """

    def __init__(self, make: Callable[[Any], int], num_slots: int, device: str | torch.device) -> None:
        self._make = make
        self._by_request: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._by_slot = torch.zeros(num_slots, dtype=torch.int64, device=device)

    def add_prefilled(self, reqs: Sequence, rows: Tensor) -> None:
        """Take note of SGLang's `Req`s in these slots [batch]; the same request may come again. Sync: none."""
        for req in reqs:
            if req not in self._by_request:
                self._by_request[req] = self._make(req)
        values = torch.tensor([self._by_request[req] for req in reqs], dtype=torch.int64)
        self._by_slot[rows] = send(values, self._by_slot.device)

    def at(self, rows: Tensor) -> Tensor:
        """Of the requests in these slots [batch]: int64."""
        return self._by_slot[rows]
