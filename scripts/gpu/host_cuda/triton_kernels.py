"""Triton's kernels, by its own interpreter, on the host's side of device memory. Wants TRITON_INTERPRET=1."""

from __future__ import annotations

from typing import Any

from host_cuda.memory import on_host
from host_cuda.recorder import RECORDER


def take_over_triton() -> None:
    from triton.runtime.interpreter import GridExecutor

    original = GridExecutor.__call__

    def call(self, *args, **kwargs):
        kwargs.pop("warmup", None)
        args, kwargs = [_convert(a) for a in args], {name: _convert(value) for name, value in kwargs.items()}
        RECORDER.emit(f"triton {self.fn.__name__}", lambda: original(self, *args, **kwargs), (args, kwargs))

    GridExecutor.__call__ = call
    # It would copy every argument to the host and back, and so lose what points into it.
    GridExecutor._init_args_hst = lambda self, args, kwargs: (list(args), dict(kwargs))
    GridExecutor._restore_args_dev = lambda self, *_: None


def _convert(value: Any) -> Any:
    if isinstance(value, tuple):
        converted = map(_convert, value)
        return type(value)(*converted) if hasattr(value, "_fields") else tuple(converted)
    return on_host(value)
