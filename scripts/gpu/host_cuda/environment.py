"""Building the libraries, and the variables under which a process sees the GPU that is not there."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).resolve().parent
_SOURCES = ("build.sh", "runtime.cpp", "driver.cpp", "cublas.cpp", "plan.cpp")
_PRELOADED = ("libcuda.so.1", "libcudart.so.13", "libcublasLt.so.13", "libcublas.so.13")
_LAST_BUILT = "libhost_plan.so"


def build(out: Path) -> None:
    """Compile the libraries if their sources have changed, and describe the plugin to SGLang. Needs g++ and nm.

    Raises:
        subprocess.CalledProcessError: a compiler failed; its message is on standard error.
    """
    built = out / _LAST_BUILT
    if not built.exists() or any((HERE / name).stat().st_mtime > built.stat().st_mtime for name in _SOURCES):
        site_packages = Path(next(iter(find_spec("nvidia").submodule_search_locations))).parent
        subprocess.run([HERE / "build.sh", site_packages, out], check=True)
    described = out / "host_cuda-0.dist-info"
    described.mkdir(parents=True, exist_ok=True)
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: host-cuda\nVersion: 0\n")
    (described / "entry_points.txt").write_text("[sglang.srt.plugins]\nhost_cuda = host_cuda.plugin:load\n")


def environment(libraries: Path) -> dict[str, str]:
    """Variables for a server or a script.

    Args:
        libraries: from `build`.
    """
    return {
        "LD_PRELOAD": " ".join(str(libraries / name) for name in _PRELOADED),
        "LD_LIBRARY_PATH": _first("LD_LIBRARY_PATH", [libraries]),
        "TRITON_LIBCUDA_PATH": str(libraries),
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": _first("PYTHONPATH", [libraries, HERE.parent]),
        "HOST_CUDA": "1",
        # FlashInfer writes sources that nobody compiles.
        "FLASHINFER_WORKSPACE_BASE": str(libraries / "flashinfer"),
        "FLASHINFER_CUDA_ARCH_LIST": "9.0a",
        # CuTe DSL kernels look deeper into the driver than this one goes.
        "FLASHINFER_USE_CUDA_NORM": "1",
        # As on a GPU host (install_bundle.sh).
        "SGLANG_FLASHINFER_USE_PAGED": "1",
        "SGLANG_FLASHINFER_WORKSPACE_SIZE": str(64 << 20),
        "TORCH_COMPILE_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
    }


def _first(name: str, paths: Iterable[Path]) -> str:
    return os.pathsep.join([*map(str, paths), *filter(None, [os.environ.get(name)])])
