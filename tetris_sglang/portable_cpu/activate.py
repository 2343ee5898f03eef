"""The `sglang.srt.platforms` entry point: lets SGLang's own CPU engine start where its kernels are missing.

SGLang calls `activate()` while it resolves the device, in every process and before it imports `sgl_kernel`.
Imports here are paid by every process, so there are only two beyond the standard library: torch, already
loaded by then, and the operators, which need only torch.
"""

import os
from functools import lru_cache

import torch

ENGINE_VARIABLE = "SGLANG_USE_CPU_ENGINE"

# How long an idle OpenMP thread spins before it sleeps. With libgomp's own 300000 every parallel region waits
# for a descheduled thread as soon as anything else runs, the server's own processes included.
SPIN_VARIABLE, SPIN_COUNT = "GOMP_SPINCOUNT", "10000"

# SGLang compiles a few functions of a handful of operators (token hand-over, seeded sampling, penalties). On
# a CPU that needs a C++ compiler, and stalls the first request that meets one for more than it ever saves.
COMPILE_VARIABLE = "TORCH_COMPILE_DISABLE"

MOVE_VARIABLE = "SGLANG_NATIVE_MOVE_KV_CACHE"

# torch's CUDA build brings NCCL along, which SGLang would use for several ranks if it can be loaded, whatever the device.
NCCL_VARIABLE, NO_NCCL = "SGLANG_NCCL_SO_PATH", "none-on-a-cpu"


def has_accelerator() -> bool:
    """Whether torch sees any accelerator that SGLang would choose by itself."""
    if torch.cuda.is_available():  # CUDA, ROCm and SAIL
        return True
    for name in ("xpu", "npu", "mps", "musa", "hpu"):
        module = getattr(torch, name, None)
        if module is not None and getattr(module, "is_available", lambda: False)():
            return True
    return False


@lru_cache(maxsize=1)
def is_active() -> bool:
    """Whether this process uses the portable CPU platform.

    False wherever SGLang can serve by itself: a machine with an accelerator, or one whose `sgl_kernel` brings
    SGLang's own CPU operators (its builds for AMX and for ARM servers). Hide the accelerator
    (`CUDA_VISIBLE_DEVICES=`) to use the portable platform on a GPU machine.
    """
    if has_accelerator():
        return False
    from tetris_sglang.portable_cpu import operators

    return not operators.native_operators_exist()


def activate() -> None:
    """Provide what SGLang's CPU engine misses here. Returns None, so SGLang keeps its own CPU platform."""
    if not is_active():
        return
    os.environ[ENGINE_VARIABLE] = "1"
    # The processes that the server spawns read these; what the user set stays.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault(SPIN_VARIABLE, SPIN_COUNT)
    os.environ.setdefault(COMPILE_VARIABLE, "1")
    # Accepted tree nodes move within the KV pool; by default a Triton kernel would move them.
    os.environ.setdefault(MOVE_VARIABLE, "1")
    os.environ.setdefault(NCCL_VARIABLE, NO_NCCL)
    from tetris_sglang.portable_cpu import operators

    operators.install()
