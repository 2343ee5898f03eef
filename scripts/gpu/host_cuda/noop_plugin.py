"""A plugin for SGLang on the no-op CUDA: torch's own operators are computed on the host, so that lengths are lengths.

Device memory is host memory here, so a CUDA tensor can be seen as a CPU tensor of the same bytes. Under `HostOperators` an
ATen operator reads and writes those bytes with its CPU kernel. Kernels that are not ATen's (Triton, FlashInfer, sgl_kernel)
and replayed graphs still do nothing.
"""

from __future__ import annotations

import ctypes
import logging

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

logger = logging.getLogger(__name__)
BAD_INDEX = "no-op CUDA: an index out of range in"

# Weights and pools stay as they are: their values decide nothing here, and their pages would have to be backed. The index of
# recent texts (32 MB) is looked into, so it has to be right.
MAX_BYTES = 40 << 20

# They change what a tensor is rather than what it holds, or read the device's own state.
_NATIVE = frozenset({"set_", "resize_", "resize_as_", "record_stream", "_pin_memory", "is_pinned", "empty_like", "new_empty"})


class HostOperators(TorchDispatchMode):
    """Runs ATen operators on small CUDA tensors with their CPU kernels."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        device = kwargs.get("device")
        on_cuda = any(t.is_cuda for t in tensors) or (device is not None and torch.device(device).type == "cuda")
        if name in ("copy_", "_to_copy") and torch.cuda.is_current_stream_capturing():
            _refuse_host_copy(tensors, device, kwargs)
        if not on_cuda or func.namespace != "aten" or name in _NATIVE or name.startswith("empty"):
            return func(*args, **kwargs)
        if not tensors and _result_bytes(name, args, kwargs) > MAX_BYTES:
            return func(*args, **kwargs)
        if any(t.numel() * t.element_size() > MAX_BYTES for t in tensors):
            return func(*args, **kwargs)
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        returned = [r.alias_info for r in func._schema.returns]
        if any(alias is not None and not alias.is_write for alias in returned):
            return func(*args, **kwargs)  # a view: nothing is computed
        return _run_on_host(func, args, kwargs)


def _refuse_host_copy(tensors: list[Tensor], device, kwargs) -> None:
    """As CUDA does: a copy from pageable memory waits for the stream, which ends a capture."""
    to_cuda = tensors[0].is_cuda if device is None else torch.device(device).type == "cuda"
    source = tensors[-1]
    if to_cuda and not source.is_cuda and source.dim() and not (kwargs.get("non_blocking") and source.is_pinned()):
        raise RuntimeError(
            f"no-op CUDA: {tuple(source.shape)} {source.dtype} is copied from the host while a graph is captured"
        )


def _result_bytes(name: str, args, kwargs) -> int:
    """Of a factory such as zeros or full; small for those given by a range."""
    size = kwargs.get("size", args[0] if args else ())
    if name.startswith(("arange", "linspace")) or not isinstance(size, list | tuple):
        return 0
    count = 1
    for length in size:
        count *= length
    return 8 * count


def _run_on_host(func, args, kwargs):
    to_cpu = dict(kwargs)
    target = kwargs.get("device")
    if target is not None:
        to_cpu["device"] = torch.device("cpu")
    for name in ("generator", "pin_memory"):
        if to_cpu.get(name) is not None:
            to_cpu[name] = None
    try:
        result = func(*tree_map(_host_view, args), **tree_map(_host_view, to_cpu))
    except NotImplementedError:
        return func(*args, **kwargs)
    except IndexError:
        # Indices that a kernel should have written, or a real mistake: dry_run.py knows which arms have no such kernels.
        logger.warning("%s %s", BAD_INDEX, func, stack_info=True)
        return func(*args, **kwargs)
    written = [a for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    if written:
        values = {a.name: kwargs.get(a.name, args[i] if i < len(args) else None) for i, a in enumerate(func._schema.arguments)}
        outputs = [values[a.name] for a in written]
        returns = len(func._schema.returns)
        return None if returns == 0 else outputs[0] if returns == 1 else tuple(outputs[:returns])
    if target is not None and torch.device(target).type != "cuda":
        return result
    return tree_map(_to_device, result)


def _host_view(value):
    if not isinstance(value, Tensor) or not value.is_cuda:
        return value
    storage = value.untyped_storage()
    if storage.nbytes() == 0:
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype)
    octets = (ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr())
    host = torch.frombuffer(octets, dtype=torch.uint8).untyped_storage()
    view = torch.empty(0, dtype=value.dtype)
    return view.set_(host, value.storage_offset(), value.size(), value.stride())


def _to_device(value):
    if not isinstance(value, Tensor) or value.is_cuda:
        return value
    device = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="cuda")
    _host_view(device).copy_(value)
    return device


# -- kernels on whose results SGLang's or TETRIS's host code depends -----------------------------------------------------


def load() -> None:
    """SGLang calls this in every process of a server."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    around = {
        "sglang.kernels.ops.memory.small_copy.try_small_copy": leave_copy_to_torch,
        "tetris_sglang.runtime.operations.get_operations": add_references,
        "tetris_sglang.runtime.cuda.verify_plan.plan_prefill": plan_with_reference,
    }
    for target, hook in around.items():
        HookRegistry.register(target, hook, HookType.AROUND)
    target = "sglang.srt.managers.utils.GenerationBatchResult.copy_to_cpu"
    HookRegistry.register(target, make_results_plausible, HookType.BEFORE)
    HostOperators().__enter__()


def leave_copy_to_torch(original, *args):
    """Launch the kernel, and say that it could not do it."""
    original(*args)
    return False


def add_references(original, device: str, selection: str):
    """TETRIS's Triton kernels are launched, and what they would return comes from their torch references."""

    def both(kernel, reference):
        def run(*args):
            kernel(*args)
            return reference(*args)

        return run

    kernels, references = original(device, selection), original("cpu", selection)
    return type(kernels)(*map(both, kernels, references))


def plan_with_reference(original, workspace, layout, qo_indptr, kv_indptr, *, group_size, max_items) -> None:
    """Launch the kernel, and write its Python reference's plan in its place."""
    from tetris_sglang.kernels.attention_plan import plan_prefill_reference

    original(workspace, layout, qo_indptr, kv_indptr, group_size=group_size, max_items=max_items)
    lens = (indptr.diff().tolist() for indptr in (qo_indptr, kv_indptr))
    plan = plan_prefill_reference(*lens, group_size=group_size, cta_tile_q=layout.cta_tile_q, max_items=max_items)
    num_items = len(plan.request_indices)
    assert num_items <= layout.padded_batch_size, f"{num_items} work items do not fit into {layout}"
    octets = _host_view(workspace)
    arrays = {
        "request_indices": plan.request_indices,
        "qo_tile_indices": plan.qo_tile_indices,
        "kv_tile_indices": plan.kv_tile_indices,
        "o_indptr": plan.o_indptr,
        "merge_indptr": plan.merge_indptr,
        "kv_chunk_size_ptr": [plan.kv_chunk_tokens],
        "total_num_rows": [plan.total_num_rows],
    }
    for name, values in arrays.items():
        start = getattr(layout, f"{name}_offset")
        octets[start : start + 4 * len(values)] = torch.tensor(values, dtype=torch.int32).view(torch.uint8)
    mask = octets[layout.block_valid_mask_offset :][: layout.padded_batch_size]
    mask.copy_(torch.arange(layout.padded_batch_size) < num_items)


def make_results_plausible(result, *_args, **_kwargs) -> None:
    """What upstream's verification would have said: acceptance lengths and token ids in range."""
    if result.accept_lens is not None:
        result.accept_lens.clamp_(1, result.speculative_num_draft_tokens)
    if result.next_token_ids is not None:
        result.next_token_ids.clamp_(0, 1023)
