"""Collectives of ranks: Gloo on the host's side of device memory, in the order of each device's operations."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType

import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from host_cuda.memory import on_host
from host_cuda.recorder import RECORDER

COLLECTIVES = ("all_reduce", "broadcast", "all_gather", "all_gather_into_tensor", "all_gather_single", "reduce_scatter_tensor")


def take_over_collectives() -> None:
    """Let SGLang's groups of ranks be Gloo's, and their collectives take device memory."""
    import sglang.srt.distributed.device_communicators.triton_symm_mem_ag as symmetric_memory
    import sglang.srt.distributed.parallel_state as parallel_state

    _replace(parallel_state, "get_default_distributed_backend", lambda device: "gloo")
    for name in COLLECTIVES:
        _replace(dist, name, _on_host(name, getattr(dist, name)))

    coordinator = parallel_state.GroupCoordinator
    make = coordinator.__init__

    def make_of_gloo(self, *args, **kwargs) -> None:
        # What else reduces: NCCL itself, and kernels that read other devices' memory.
        make(self, *args, **kwargs | dict.fromkeys(("use_pynccl", "use_custom_allreduce"), False))

    coordinator.__init__ = make_of_gloo
    symmetric_memory.create_state = _refuse


def _replace(owner: ModuleType, name: str, replacement: Callable) -> None:
    """In all modules that have it from there."""
    genuine = getattr(owner, name)
    for module in list(sys.modules.values()):
        if getattr(module, name, None) is genuine:
            setattr(module, name, replacement)


def _refuse(*args, **kwargs):
    raise RuntimeError("devices here do not read each other's memory")


def _on_host(name: str, genuine: Callable) -> Callable:
    def call(*args, **kwargs):
        if not any(isinstance(leaf, Tensor) and leaf.is_cuda for leaf in tree_leaves((args, kwargs))):
            return genuine(*args, **kwargs)
        assert not kwargs.get("async_op"), f"{name} that nobody waits for is not computed"
        host_args, host_kwargs = tree_map(on_host, (args, kwargs))
        RECORDER.emit(name, lambda: genuine(*host_args, **host_kwargs), (host_args, host_kwargs))
        return None

    return call
