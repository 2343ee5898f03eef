"""Collectives of a rank that is alone: Gloo on the host's side of device memory, in the order of the device's operations."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from host_cuda.memory import on_host
from host_cuda.recorder import RECORDER

COLLECTIVES = ("all_reduce", "broadcast", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor")


def take_over_collectives() -> None:
    """Let SGLang's groups of ranks be Gloo's, and their collectives take device memory."""
    import sglang.srt.distributed.parallel_state as parallel_state

    genuine = parallel_state.get_default_distributed_backend
    for module in list(sys.modules.values()):
        if getattr(module, genuine.__name__, None) is genuine:
            setattr(module, genuine.__name__, lambda device: "gloo")

    for name in COLLECTIVES:
        setattr(dist, name, _on_host(name, getattr(dist, name)))


def _on_host(name: str, genuine: Callable) -> Callable:
    def call(*args, **kwargs):
        if not any(isinstance(leaf, Tensor) and leaf.is_cuda for leaf in tree_leaves((args, kwargs))):
            return genuine(*args, **kwargs)
        assert not kwargs.get("async_op"), f"{name} that nobody waits for is not computed"
        host_args, host_kwargs = tree_map(on_host, (args, kwargs))
        RECORDER.emit(name, lambda: genuine(*host_args, **host_kwargs), (host_args, host_kwargs))
        return None

    return call
