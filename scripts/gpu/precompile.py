"""Compile the kernels that gpu-check's models need, for sm_90a; no GPU is needed.

    python scripts/gpu/precompile.py --out build/gpu-jit

make_bundle.sh puts what lies in --out into the bundle. FlashInfer's prefill kernels (they serve prefill, verification and
tensor-core decoding) take most of the time: minutes per head size. What is there already is not compiled again.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

REPOSITORY = Path(__file__).resolve().parents[2]
HEAD_DIM = 64
"""Of the tests' pair, of SmolLM2 and of what is inflated from them."""
KV_ROW_BYTES = [2 * HEAD_DIM * kv_heads for kv_heads in (1, 2, 3, 24)]
"""Of the pair, of SmolLM2 and its head, of SmolLM2 at the cost of 8B, in 16 bits."""


def jit_environment(folder: Path) -> dict[str, str]:
    """Where FlashInfer and SGLang keep what they compile, and for what."""
    wheels = [Path(entry, "nvidia", "cu13") for entry in sys.path if entry.endswith("site-packages")]
    candidates = [os.environ.get("CUDA_HOME"), "/usr/local/cuda-13.0", "/usr/local/cuda", *wheels]
    toolkit = next((c for c in candidates if c and Path(c, "bin", "nvcc").exists()), None)
    # A bare toolkit lacks cublasLt.h and curand.h, torch's wheels have them.
    headers = [
        os.environ.get("CPLUS_INCLUDE_PATH"),
        *(wheel / "include" for wheel in wheels if wheel.exists()),
    ]
    return {
        "FLASHINFER_WORKSPACE_BASE": str(folder / "flashinfer"),
        "FLASHINFER_CUDA_ARCH_LIST": "9.0a",
        "SGLANG_JIT_CACHE_DIR": str(folder / "sglang"),
        "CPLUS_INCLUDE_PATH": os.pathsep.join(str(folder) for folder in headers if folder),
        **({"CUDA_HOME": str(toolkit)} if toolkit else {}),
    }


def main(
    out: Annotated[Path, typer.Option(help="Folder of the two caches.")] = REPOSITORY / "build" / "gpu-jit",
    dtypes: Annotated[str, typer.Option(help="bfloat16, float16.")] = "bfloat16",
    head_dims: Annotated[str, typer.Option(help="Of FlashInfer's attention.")] = "64,128",
    jobs: Annotated[int, typer.Option(help="Compilers at once.")] = os.cpu_count() or 1,
) -> None:
    """Compile the kernels that gpu-check's models need, for sm_90a."""
    # Both read their folders while they are imported.
    os.environ |= jit_environment(out.resolve()) | {"MAX_JOBS": str(jobs)}
    make_driver_stub(out.resolve() / "stubs")
    import torch
    from sglang.kernels.jit.utils import override_jit_cuda_arch, parallel_compile

    types = [getattr(torch, name) for name in dtypes.split(",")]
    failures: list[str] = []

    def timed(name: str, build: Callable[[], object]) -> None:
        started_at = time.monotonic()
        try:
            build()
            outcome = "ok"
        except Exception as error:
            failures.append(name)
            outcome = f"{type(error).__name__}: {str(error)[-400:]}"
        print(f"{name}: {time.monotonic() - started_at:.0f} s, {outcome}", flush=True)

    with override_jit_cuda_arch(9, 0):
        kernels = list_sglang_kernels(types)
        parallel_compile([lambda name=name, build=build: timed(name, build) for name, build in kernels.items()], jobs)
    for name, spec in list_flashinfer_kernels(types, [int(d) for d in head_dims.split(",")]).items():
        timed(name, lambda spec=spec: spec().build(verbose=False))
    print(f"{len(failures)} failed" + (f": {', '.join(failures)}" if failures else ""))
    raise typer.Exit(bool(failures))


def make_driver_stub(folder: Path) -> None:
    """An empty libcuda to link with: FlashInfer asks for it, and only a driver or a full toolkit has one."""
    folder.mkdir(parents=True, exist_ok=True)
    stub = [
        *("gcc", "-shared", "-x", "c", "/dev/null"),
        *("-Wl,-soname,libcuda.so.1", "-o", str(folder / "libcuda.so")),
    ]
    subprocess.run(stub, check=True)
    os.environ["LIBRARY_PATH"] = os.pathsep.join(filter(None, [os.environ.get("LIBRARY_PATH"), str(folder)]))


def list_sglang_kernels(dtypes) -> dict[str, Callable[[], object]]:
    import torch
    from sglang.kernels.ops.activation.activation import activation_module
    from sglang.kernels.ops.attention.clamp_position import _jit_clamp_position_module
    from sglang.kernels.ops.attention.rope import _jit_fused_rope_module
    from sglang.kernels.ops.kvcache.kvcache import _jit_kvcache_module
    from sglang.kernels.ops.layernorm.norm import _jit_fused_add_rmsnorm_module
    from sglang.kernels.ops.speculative.sampling import _jit_sampling_module
    from sglang.kernels.ops.speculative.tree import _jit_tree_module

    kernels: dict[str, Callable[[], object]] = {
        "clamp position": lambda: _jit_clamp_position_module(torch.int64),
        "tree": _jit_tree_module,
        "tree sampling": lambda: _jit_sampling_module(4, True),
    }
    for row_bytes in KV_ROW_BYTES:
        kernels[f"kv cache, rows of {row_bytes} bytes"] = lambda n=row_bytes: _jit_kvcache_module(n, n, 0)
    for dtype in dtypes:
        kernels[f"rope {dtype}"] = lambda t=dtype: _jit_fused_rope_module(True, HEAD_DIM, t, t)
        kernels[f"activation {dtype}"] = lambda t=dtype: activation_module(t)
        kernels[f"add and norm {dtype}"] = lambda t=dtype: _jit_fused_add_rmsnorm_module(t, False)
    return kernels


def list_flashinfer_kernels(dtypes, head_dims) -> dict[str, Callable]:
    import torch
    from flashinfer.jit.attention import modules
    from flashinfer.jit.norm import gen_norm_module
    from flashinfer.jit.quantization import gen_quantization_module
    from flashinfer.jit.sampling import gen_sampling_module

    specs: dict[str, Callable] = {
        "norm": gen_norm_module,
        "sampling": gen_sampling_module,
        "quantization": gen_quantization_module,
    }
    for dtype in dtypes:
        for dim in head_dims:
            types = (dtype, dtype, dtype, torch.int32, dim, dim, 0, False, False)
            specs[f"decode {dim} {dtype}"] = lambda t=types: modules.gen_batch_decode_module(*t)
            specs[f"prefill {dim} {dtype}"] = lambda t=types: modules._gen_batch_prefill_primary_module("fa2", *t, False)
    return specs


if __name__ == "__main__":
    typer.run(main)
