"""torch's own operators on CUDA tensors, computed by their CPU kernels on the same bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from host_cuda.memory import empty_like_on_device, on_device, on_host, poison
from host_cuda.recorder import RECORDER
from host_cuda.streams import ARE_CHECKED, STREAMS, Access, accesses, current_stream

MAX_POISONED_BYTES = 32 << 20
"""Larger memory stays as it is: its pages would have to be backed."""
_NATIVE = frozenset([
    "set_", "resize_", "resize_as_", "record_stream", "_pin_memory", "is_pinned", "empty_like", "new_empty", "lift_fresh",
    "unsqueeze_", "squeeze_", "transpose_", "t_", "as_strided_",
])  # fmt: skip
"""They change what a tensor is rather than what it holds, or read the device's own state."""
_WAITING = frozenset(
    [
        "_local_scalar_dense",
        "nonzero",
        "masked_select",
        "_unique2",
        "unique_dim",
        "unique_consecutive",
        "bincount",
        "equal",
        "is_nonzero",
    ]
)
"""The host waits for their results."""

CUSTOM: dict[str, Callable[..., None]] = {}
"""By the name of a custom operator, what it computes on the host's side of its arguments."""
RETURNING: dict[str, tuple[Callable[..., Any], Callable[..., None]]] = {}
"""The same for operators that return tensors: what allocates them, and what fills them, given them before the arguments."""


class HostOperators(TorchDispatchMode):
    """Under it no operator on a CUDA tensor launches a kernel. Fresh memory is poisoned."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if not _is_on_cuda(tensors, kwargs):
            return func(*args, **kwargs)
        if name in _NATIVE or name.startswith("empty"):
            result = func(*args, **kwargs)
            if "empty" in name:
                _poison(result)
            return result
        if func.namespace != "aten":
            return _run_custom(func, args, kwargs)
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if _is_view(func):
            return func(*args, **kwargs)
        return _Call(func, args, kwargs, tensors).compute()


def _is_on_cuda(tensors: list[Tensor], kwargs: dict) -> bool:
    device = kwargs.get("device")
    return any(tensor.is_cuda for tensor in tensors) or (device is not None and torch.device(device).type == "cuda")


def _is_view(func) -> bool:
    return any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)


def _poison(result: Any) -> None:
    if isinstance(result, Tensor) and result.is_cuda and result.nbytes <= MAX_POISONED_BYTES:
        place = on_host(result)
        # Nobody writes there on a GPU.
        RECORDER.emit("fresh memory", lambda: poison(place), touched=list)
        STREAMS.forget(accesses(place, is_write=True))


def _run_custom(func, args, kwargs):
    name = func._schema.name
    if name in RETURNING:
        allocate, fill = RETURNING[name]
        results = allocate(*args, **kwargs)
        for result in tree_leaves(results):
            if all(result is not argument for argument in args):
                _poison(result)
        args = (results, *args)
    elif name in CUSTOM:
        fill, results = CUSTOM[name], None
    else:
        return func(*args, **kwargs)
    host_args, host_kwargs = tree_map(on_host, args), tree_map(on_host, kwargs)
    RECORDER.emit(name, lambda: fill(*host_args, **host_kwargs), (host_args, host_kwargs))
    return results


class _Call:
    """One operator with its arguments, none of which is a view's."""

    def __init__(self, func, args: tuple, kwargs: dict, tensors: list[Tensor]) -> None:
        self._func, self._args, self._kwargs, self._tensors = func, args, kwargs, tensors
        self._name = func._schema.name.removeprefix("aten::")
        target = kwargs.get("device")
        self._leaves_device = target is not None and torch.device(target).type != "cuda"
        on_cpu = dict(kwargs)
        if target is not None:
            on_cpu["device"] = torch.device("cpu")
        for name in ("generator", "pin_memory"):
            if on_cpu.get(name) is not None:
                on_cpu[name] = None
        seize = _seize if RECORDER.is_capturing else on_host
        self._host_args, self._host_kwargs = tree_map(seize, args), tree_map(seize, on_cpu)
        self._what = self._describe()

    def compute(self):
        if RECORDER.is_capturing and (obstacle := self._find_obstacle()):
            raise RuntimeError(f"host CUDA: {obstacle} while a graph is captured, which ends the capture on a GPU")
        if any(a.alias_info is not None and a.alias_info.is_write for a in self._func._schema.arguments):
            return self._write()
        if RECORDER.is_capturing:
            return self._return_captured()
        return self._return()

    def _write(self):
        """Into arguments."""
        written = [a.name for a in self._func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        ours, theirs = self._by_name(self._args, self._kwargs), self._by_name(self._host_args, self._host_kwargs)
        shapes = {name: theirs[name].shape for name in written if isinstance(theirs[name], Tensor)}

        def run() -> None:
            self._func(*self._host_args, **self._host_kwargs)
            for name, shape in shapes.items():
                assert theirs[name].shape == shape, f"{self._func} has resized {name} from {shape} to {theirs[name].shape}"

        RECORDER.emit(self._what, run, touched=lambda: self._touched([theirs[name] for name in written]))
        outputs = [ours[name] for name in written][: len(self._func._schema.returns)]
        return None if not outputs else outputs[0] if len(outputs) == 1 else tuple(outputs)

    def _return(self):
        RECORDER.check()
        RECORDER.count(self._what)
        result = self._func(*self._host_args, **self._host_kwargs)
        outputs = result if self._leaves_device else tree_map(on_device, result)
        if ARE_CHECKED:
            places = tree_map(on_host, outputs)
            STREAMS.forget(accesses(places, is_write=True))
            STREAMS.launch(current_stream())
            STREAMS.touch(current_stream(), self._what, self._touched(places))
        return outputs

    def _return_captured(self):
        """Memory for what the replays will compute."""
        shaped = self._shape()
        outputs = tree_map(lambda r: empty_like_on_device(r) if isinstance(r, Tensor) else r, shaped)
        places = [on_host(leaf) for leaf in tree_leaves(outputs)]

        def run() -> None:
            results = tree_leaves(self._func(*self._host_args, **self._host_kwargs))
            for place, value in zip(places, results, strict=True):
                if isinstance(value, Tensor):
                    place.copy_(value)

        RECORDER.emit(self._what, run, touched=lambda: self._touched(places))
        return outputs

    def _touched(self, written: Any) -> list[Access]:
        if self._name in _WAITING or (self._what.startswith("copy cuda to cpu") and self._what != "copy cuda to cpu, pinned"):
            STREAMS.host_waits_for(current_stream())
        return accesses((self._host_args, self._host_kwargs), is_write=False) + accesses(written, is_write=True)

    def _shape(self):
        """What the operator returns, without computing it where that can be had."""
        kwargs = tree_map(_to_meta, self._host_kwargs)
        if self._kwargs.get("device") is not None:
            kwargs["device"] = torch.device("meta")
        try:
            return self._func(*tree_map(_to_meta, self._args), **kwargs)
        except (NotImplementedError, RuntimeError):
            return self._func(*self._host_args, **self._host_kwargs)

    def _by_name(self, args: tuple, kwargs: dict) -> dict[str, Any]:
        names = [argument.name for argument in self._func._schema.arguments]
        return dict(zip(names, args, strict=False)) | {name: kwargs.get(name) for name in names[len(args) :]}

    def _describe(self) -> str:
        """For the ledger: copies between host and device by kind."""
        copy = self._copy()
        if copy is not None:
            return copy
        return ("wait: " if self._name in _WAITING else "") + self._func.name()

    def _copy(self) -> str | None:
        if self._name == "copy_":
            target, source = self._tensors[0], self._tensors[-1]
            target_type = target.device.type
        elif self._name == "_to_copy":
            source = target = self._tensors[0]
            target_type = torch.device(self._kwargs.get("device") or source.device).type
        else:
            return None
        if source.device.type == target_type:
            return None
        arguments = self._by_name(self._args, self._kwargs)
        host = source if target_type == "cuda" else target
        # torch pins what it makes for a copy that nobody waits for (TensorConversions.cpp).
        is_made_pinned = self._name == "_to_copy" and bool(arguments.get("non_blocking"))
        pinned = is_made_pinned if host.is_cuda else host.is_pinned()
        kind = "pinned" if pinned else "pageable"
        return f"copy {source.device.type} to {target_type}, {kind}{'' if arguments.get('non_blocking') else ', blocking'}"

    def _find_obstacle(self) -> str | None:
        if self._name in _WAITING:
            return f"the host waits for {self._name}"
        if self._what.startswith("copy cuda to cpu") and "blocking" in self._what:
            return self._what
        if self._what.startswith("copy cpu to cuda") and "pageable" in self._what and self._tensors[-1].dim():
            return self._what
        return "a result for the host" if self._leaves_device else None


def _seize(value: Any) -> Any:
    """For a replay: numbers of the host are part of the graph."""
    if isinstance(value, Tensor) and not value.is_cuda and value.dim() == 0:
        return value.clone()
    return on_host(value)


def _to_meta(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    device = "meta" if value.dim() or value.is_cuda else "cpu"
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=device)
