"""Accesses to the same memory that nothing puts in order: a data race on a GPU, where streams run side by side.

Every stream and the host have a vector clock: what of each stream is known to have happened. A launch knows what its stream and
the host know; an event carries what its stream knew; who waits for it learns that. (torch/cuda/_sanitizer.py keeps such clocks
for torch's own operators alone.)
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

Clock = dict[int, int]

_BUCKET_BITS = 16
_MAX_BYTES = 4 << 20
"""Larger memory is not watched: weights, caches and workspaces, which one stream has for itself."""
ARE_CHECKED = os.environ.get("HOST_CUDA_STREAMS") == "1"


class Access(NamedTuple):
    start: int
    end: int
    is_write: bool


def accesses(value: Any, *, is_write: bool) -> list[Access]:
    """To the memory of all tensors in a tree, on the host's side of it."""
    found = []
    for tensor in tree_leaves(value):
        if isinstance(tensor, Tensor) and tensor.numel() and tensor.layout == torch.strided:
            extent = 1 + sum((n - 1) * s for n, s in zip(tensor.size(), tensor.stride(), strict=True))
            start = tensor.data_ptr()
            found.append(Access(start, start + extent * tensor.element_size(), is_write))
    return found


def _join(clock: Clock, other: Clock) -> None:
    for stream, tick in other.items():
        clock[stream] = max(clock.get(stream, 0), tick)


class Streams:
    """What has happened before what, and what has not and should have."""

    def __init__(self) -> None:
        self.races: dict[str, int] = {}
        self._clocks: dict[int, Clock] = {}
        self._host: Clock = {}
        self._last: dict[int, dict[tuple[Access, int], tuple[int, str]]] = {}
        """By piece of memory: the last access of each kind and stream, when it was and what."""
        self._exempt: list[Access] = []

    def exempt(self, tensor: Tensor) -> None:
        """Of a table whose rows belong to requests, streams use unlike rows: operators on it do not say which."""
        self._exempt += accesses(tensor, is_write=True)

    def forget(self, fresh: Iterable[Access]) -> None:
        """Of memory that has just been allocated. That torch's allocator gives it away in time is not checked here."""
        for access in fresh:
            if access.end - access.start > _MAX_BYTES:
                continue
            for bucket in self._buckets(access):
                before = self._last.get(bucket, {})
                for earlier, stream in [key for key in before if self._overlap(access, key[0])]:
                    del before[earlier, stream]

    # -- order -----------------------------------------------------------------------------------------------------

    def _clock(self, stream: int) -> Clock:
        return self._clocks.setdefault(stream, {})

    def record(self, stream: int) -> Clock:
        """What an event carries."""
        carried = dict(self._clock(stream))
        _join(carried, self._host)
        return carried

    def wait(self, stream: int, carried: Clock) -> None:
        _join(self._clock(stream), carried)

    def host_waits(self, carried: Clock) -> None:
        _join(self._host, carried)

    def host_waits_for(self, stream: int) -> None:
        _join(self._host, self._clock(stream))

    def host_waits_for_all(self) -> None:
        for clock in self._clocks.values():
            _join(self._host, clock)

    # -- accesses --------------------------------------------------------------------------------------------------

    def launch(self, stream: int) -> None:
        """Something new begins on a stream."""
        clock = self._clock(stream)
        _join(clock, self._host)
        clock[stream] = clock.get(stream, 0) + 1

    def touch(self, stream: int, what: str, touched: Iterable[Access]) -> None:
        """By what was last launched on `stream`."""
        known = self._clock(stream)
        for access in touched:
            if access.end - access.start > _MAX_BYTES or any(self._overlap(access, other) for other in self._exempt):
                continue
            for bucket in self._buckets(access):
                before = self._last.setdefault(bucket, {})
                for (earlier, other), (tick, name) in list(before.items()):
                    if not self._overlap(access, earlier):
                        continue
                    is_ordered = other == stream or known.get(other, 0) >= tick
                    if not is_ordered and (access.is_write or earlier.is_write):
                        self._report(name, earlier, what, access)
                    # Whoever races with it races with this one, too.
                    if is_ordered and access.is_write and access.start <= earlier.start and earlier.end <= access.end:
                        del before[earlier, other]
                before[access, stream] = known[stream], what

    def _report(self, before: str, earlier: Access, what: str, access: Access) -> None:
        kinds = {True: "writes", False: "reads"}
        race = f"{before} {kinds[earlier.is_write]} what {what} {kinds[access.is_write]}"
        self.races[race] = self.races.get(race, 0) + 1

    @staticmethod
    def _buckets(access: Access) -> range:
        return range(access.start >> _BUCKET_BITS, ((access.end - 1) >> _BUCKET_BITS) + 1)

    @staticmethod
    def _overlap(one: Access, other: Access) -> bool:
        return one.start < other.end and other.start < one.end


STREAMS = Streams()


class Snapshot:
    """Tells which of some arguments a kernel has written, where nothing else does."""

    def __init__(self, value: Any) -> None:
        tensors = [t for t in tree_leaves(value) if isinstance(t, Tensor) and t.numel() and t.nbytes <= _MAX_BYTES]
        self._before = [(tensor, tensor.clone()) for tensor in tensors]

    def accesses(self) -> list[Access]:
        found = []
        for tensor, before in self._before:
            # nan is unlike itself.
            is_written = not bool(((tensor == before) | ((tensor != tensor) & (before != before))).all())
            found += accesses(tensor, is_write=False) + (accesses(tensor, is_write=True) if is_written else [])
        return found


def current_stream() -> int:
    return torch.cuda.current_stream().cuda_stream


def take_over_streams() -> None:
    """Let torch's events and streams, and waits of the host, be known here."""
    event, stream = torch.cuda.Event, torch.cuda.Stream
    record, wait, synchronize, query = event.record, event.wait, event.synchronize, event.query

    def record_event(self, on=None):
        self.carried = STREAMS.record(current_stream() if on is None else on.cuda_stream)
        record(self, *([] if on is None else [on]))

    def wait_event(self, on=None):
        STREAMS.wait(current_stream() if on is None else on.cuda_stream, getattr(self, "carried", {}))
        wait(self, *([] if on is None else [on]))

    def synchronize_event(self):
        STREAMS.host_waits(getattr(self, "carried", {}))
        synchronize(self)

    def query_event(self):
        # All is done at once here, so the answer is always yes.
        STREAMS.host_waits(getattr(self, "carried", {}))
        return query(self)

    event.record, event.wait, event.synchronize, event.query = record_event, wait_event, synchronize_event, query_event
    synchronize_stream, synchronize_all = stream.synchronize, torch.cuda.synchronize

    def host_waits_for(self):
        STREAMS.host_waits_for(self.cuda_stream)
        synchronize_stream(self)

    def host_waits_for_all(device=None):
        STREAMS.host_waits_for_all()
        synchronize_all(device)

    stream.synchronize, torch.cuda.synchronize = host_waits_for, host_waits_for_all
