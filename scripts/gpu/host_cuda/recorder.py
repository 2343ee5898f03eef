"""The order in which a device would run what is asked of it: at once, or whenever a captured graph is replayed.

`Recorder.emit` is the one door. What comes through it holds addresses, shapes and strides, never tensors: the caching
allocator may give the memory to others meanwhile, as on a GPU.
"""

from __future__ import annotations

import collections
import ctypes
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from host_cuda.streams import ARE_CHECKED, STREAMS, Access, Snapshot, current_stream

EVENT = "event"
Run = Callable[[], None]
Touched = Callable[[], list[Access]]


class NobodyComputes(RuntimeError):
    """Something was launched or called that no reference stands for."""


def find_caller() -> str:
    """The innermost module of tetris_sglang that is at work, else of SGLang."""
    frame, fallback = sys._getframe(1), ""
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith("tetris_sglang."):
            return name.removeprefix("tetris_sglang.")
        if not fallback and name.startswith("sglang.srt."):
            fallback = name
        frame = frame.f_back
    return fallback


class Recorder:
    """What has been computed, what is captured, and what nobody computes."""

    def __init__(self) -> None:
        self.ledger: collections.Counter[tuple[str, str, str]] = collections.Counter()
        """(phase, caller, what) -> how often; captured operations count when they are replayed."""
        self.phase = "start"
        self._captured: list[tuple[str, Run]] | None = None
        self._graphs: dict[int, list[tuple[str, Run]]] = {}
        self._depth = 0
        """Above 0: an operation that others are part of is being computed."""
        self._unhandled: list[str] = []

    @property
    def is_capturing(self) -> bool:
        return self._captured is not None

    def emit(self, what: str, run: Run, arguments: Any = (), touched: Touched | None = None) -> None:
        """Compute now, or with every replay of the graph that is being captured.

        Args:
            arguments: a tree with all tensors that are read or written.
            touched: says which, after the run; None: what has changed was written.

        Raises:
            NobodyComputes: something before this was not computed.
        """
        self.check()
        if ARE_CHECKED:
            run = self._watched(what, run, arguments, touched)
        if self._captured is not None:
            self._captured.append((what, run))
            return
        self.count(what)
        if ARE_CHECKED:
            STREAMS.launch(current_stream())
        run()

    def _watched(self, what: str, run: Run, arguments: Any, touched: Touched | None) -> Run:
        name = f"{what} by {find_caller()}"

        def watched() -> None:
            if self._depth:
                return run()
            self._depth += 1
            try:
                find = touched or Snapshot(arguments).accesses
                run()
                STREAMS.touch(current_stream(), name, find())
            finally:
                self._depth -= 1

        return watched

    def count(self, what: str) -> None:
        self.ledger[self.phase, find_caller(), what] += 1

    def check(self) -> None:
        if self._unhandled:
            names, self._unhandled = self._unhandled, []
            raise NobodyComputes(f"nobody computes {', '.join(names)}")

    def refuse(self, what: str) -> None:
        """Note what nobody computes; the next operation raises, since a launch cannot."""
        self._unhandled.append(what)
        stack = "".join(traceback.format_stack(limit=12)[:-2])
        print(f"host CUDA: nobody computes {what}\n{stack}", file=sys.stderr, flush=True)

    def record_again(self, event: torch.cuda.Event) -> None:
        """An event recorded in a captured graph is recorded with every replay: SGLang's scheduler waits for one."""

        def run() -> None:
            event.carried = STREAMS.record(current_stream())

        if self._captured is not None:
            self._captured.append((EVENT, run))

    def begin_capture(self) -> None:
        self.check()
        self._captured = []

    def end_capture(self, graph: int) -> None:
        self.check()
        captured, self._captured = self._captured, None
        self._graphs[graph] = captured or []

    def forget(self, graph: int) -> None:
        self._graphs.pop(graph, None)

    def replay(self, graph: int) -> None:
        self.count("graph launch")
        if ARE_CHECKED:
            STREAMS.launch(current_stream())
        for what, run in self._graphs[graph]:
            self.ledger[self.phase, "", f"in a graph: {what}"] += 1
            try:
                run()
            except Exception as error:
                error.add_note(f"in a replayed graph, at {what}")
                raise

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before


RECORDER = Recorder()

_LISTENER = ctypes.CFUNCTYPE(None, ctypes.c_char_p)


def listen() -> None:
    """Hear from the libraries what was launched or called natively, which nobody has computed then."""
    global _listener
    _listener = _LISTENER(lambda what: RECORDER.refuse(what.decode()))  # kept alive here
    ctypes.CDLL("libcudart.so.13").host_cuda_listen(_listener)


def count_native() -> dict[str, int]:
    """What the libraries were asked for so far: copies by the kinds of memory, synchronisations, events."""
    library = ctypes.CDLL("libcudart.so.13")
    buffer = ctypes.create_string_buffer(1 << 16)
    library.host_cuda_counts(buffer, ctypes.c_size_t(len(buffer)))
    rows = (line.split("\t") for line in buffer.value.decode().splitlines())
    return {name: int(count) for name, count in rows}


def take_over_graphs() -> None:
    """Let torch's graphs record and replay here, events in them, too."""
    graph, record = torch.cuda.CUDAGraph, torch.cuda.Event.record

    def record_event(self, *args):
        record(self, *args)
        RECORDER.record_again(self)

    torch.cuda.Event.record = record_event
    begin, end, replay, reset = graph.capture_begin, graph.capture_end, graph.replay, graph.reset

    def capture_begin(self, *args, **kwargs):
        begin(self, *args, **kwargs)
        RECORDER.begin_capture()

    def capture_end(self):
        RECORDER.end_capture(id(self))
        end(self)

    def run(self):
        replay(self)
        RECORDER.replay(id(self))

    def drop(self):
        RECORDER.forget(id(self))
        reset(self)

    graph.capture_begin, graph.capture_end, graph.replay, graph.reset = capture_begin, capture_end, run, drop
