"""What FlashInfer and SGLang compile at run time: their functions are computed here, `plan` is FlashInfer's own."""

from __future__ import annotations

import sys
from collections.abc import Callable

from torch.utils._pytree import tree_map

from host_cuda import attention, flash_attention, plans, small_kernels, tree_kernels
from host_cuda.memory import on_host
from host_cuda.operators import CUSTOM, RETURNING
from host_cuda.recorder import RECORDER, NobodyComputes

Kernel = Callable[..., None]


def _named(*kernels: Kernel) -> dict[str, Kernel]:
    return {kernel.__name__: kernel for kernel in kernels}


PLANS = {
    "batch_prefill_with_kv_cache": plans.plan_prefill,
    "batch_decode_with_kv_cache": plans.plan_decode,
}
FLASHINFER: dict[str, dict[str, Kernel]] = {
    "batch_prefill_with_kv_cache": {"paged_run": attention.run_prefill},
    "batch_decode_with_kv_cache": {"run": attention.run_decode},
    "norm": _named(small_kernels.rmsnorm, small_kernels.fused_add_rmsnorm),
    "quantization": _named(small_kernels.segment_packbits),
    "sampling": _named(
        small_kernels.top_p_renorm_probs,
        small_kernels.top_k_renorm_probs,
        small_kernels.top_k_top_p_sampling_from_probs,
        small_kernels.min_p_sampling_from_probs,
    ),
}
"""By the beginning of a module's name, its functions."""
SGLANG: dict[str, dict[str, Kernel]] = {
    "activation": _named(small_kernels.run_activation),
    "clamp_position": _named(small_kernels.clamp_position),
    "fused_add_rmsnorm": _named(small_kernels.fused_add_rmsnorm),
    "fused_rope": _named(small_kernels.run_rope, small_kernels.run_rope_store),
    "kvcache": _named(small_kernels.store_cache),
    "speculative_sampling": _named(tree_kernels.sample),
    "speculative_tree": _named(
        tree_kernels.build_tree_kernel_efficient,
        tree_kernels.verify_tree_greedy,
        tree_kernels.reconstruct_indices_from_tree_mask,
    ),
}
CUSTOM |= {
    "sgl_kernel::rmsnorm": small_kernels.rmsnorm,
    "sgl_kernel::fused_add_rmsnorm": small_kernels.fused_add_rmsnorm,
}
RETURNING |= {
    "sgl_kernel::fwd": (flash_attention.allocate, flash_attention.run),
    "sgl_kernel::get_scheduler_metadata": (flash_attention.allocate_metadata, flash_attention.fill_metadata),
}


class Module:
    """Stands for a compiled module.

    Args:
        plan: of modules that plan on the host.
    """

    def __init__(self, name: str, kernels: dict[str, Kernel], plan: Callable[..., list[int]] | None = None) -> None:
        self._name, self._kernels, self._plan = name, kernels, plan

    def __getattr__(self, function: str):
        if function.startswith("__"):
            raise AttributeError(function)
        if function in self._kernels:
            return self._computed(function)
        if function == "plan" and self._plan is not None:
            return self._planned
        return self._refused(function)

    def _planned(self, *args) -> list[int]:
        RECORDER.count(f"host plan of {self._name}")
        return self._plan(*args)

    def _computed(self, function: str):
        kernel, what = self._kernels[function], f"{self._name}.{function}"

        def call(*args) -> None:
            args = tree_map(on_host, args)
            RECORDER.emit(what, lambda: kernel(*args), args)

        return call

    def _refused(self, function: str):
        def call(*args):
            raise NobodyComputes(f"nobody computes {self._name}.{function}")

        return call


def take_over_modules() -> None:
    """Let FlashInfer and SGLang have these in the place of what they would compile."""
    import flashinfer.jit.core as core

    def build_and_load(spec):
        name = next((name for name in FLASHINFER if spec.name.startswith(name)), None)
        if name is None:
            return Module(f"flashinfer {spec.name}", {})
        return Module(f"flashinfer {name}", FLASHINFER[name], PLANS.get(name))

    core.JitSpec.build_and_load = build_and_load

    import sglang.kernels.jit.utils as utils
    import sglang.srt.utils.custom_op as custom_op
    from sglang.kernels.jit.utils import compile as compiling
    from sglang.kernels.jit.utils.compile import loader

    genuine = loader.load_jit

    def load_jit(name: str, *args, cuda_files=None, **kwargs):
        if cuda_files is None:
            return genuine(name, *args, **kwargs)
        return Module(f"sglang {name}", SGLANG.get(name, {}))

    for module in [utils, compiling, loader, *list(sys.modules.values())]:
        if getattr(module, "load_jit", None) is genuine:
            module.load_jit = load_jit
    # Straight to the Python below, where the dispatch mode sees it.
    custom_op._dispatch_modes = lambda: 0
