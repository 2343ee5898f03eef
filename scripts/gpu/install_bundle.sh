#!/usr/bin/env bash
# On the GPU host, offline: unpacks the bundle and prints the environment that uses it.
#
#   eval "$(bash scripts/gpu/install_bundle.sh [BUNDLE_FOLDER [TARGET]])"
#
# TARGET (default build/gpu-site) goes on PYTHONPATH behind this checkout; the host's own packages come after both.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
bundle=${1:-$root/build/gpu-bundle}
target=${2:-$root/build/gpu-site}

archive=$(ls "$bundle"/sglang-*.tar.xz)
stamp=$target/.unpacked-$(sha256sum "$archive" | cut -c1-16)
if [ ! -e "$stamp" ]; then
    rm -rf "$target"
    mkdir -p "$target"
    python3 -c 'import sys, tarfile; tarfile.open(sys.argv[1], "r:xz").extractall(sys.argv[2], filter="fully_trusted")' \
        "$archive" "$target"
    touch "$stamp"
fi

# pack_real_text.py's files, put together where tetris_sglang.tools.fetch looks for them.
cache=$target/.cache
for first in "$root"/build/gpu-real-text/packages/*/*.part-0; do
    [ -e "$first" ] || continue
    whole=$cache/packages/$(basename "$(dirname "$first")")/$(basename "${first%.part-0}")
    mkdir -p "$(dirname "$whole")"
    [ -e "$whole" ] || cat "${first%0}"* >"$whole"
done

cuda=${CUDA_HOME:-$(ls -d /usr/local/cuda-13* /usr/local/cuda 2>/dev/null | head -1 || true)}
# FlashInfer links what it compiles with -lcuda, and a bare toolkit has no stub of it: point at the driver.
mkdir -p "$target/.link"
driver=$(ldconfig -p 2>/dev/null | awk '/libcuda\.so\.1/ {print $NF; exit}')
[ -n "$driver" ] || driver=$(ls /usr/local/nvidia/lib64/libcuda.so.1 /usr/lib/x86_64-linux-gnu/libcuda.so.1 2>/dev/null |
    head -1 || true)
[ -z "$driver" ] || ln -sf "$driver" "$target/.link/libcuda.so"
# What a bare toolkit may lack besides: libcudart.so, curand.h, cublas_v2.h. torch's wheels have them.
wheels=$(python3 - <<'PYTHON'
from importlib.util import find_spec
from pathlib import Path

spec = find_spec("nvidia")
folders = [Path(folder, "cu13") for folder in (spec.submodule_search_locations if spec else [])]
print(next((folder for folder in folders if (folder / "include" / "curand.h").exists()), ""))
PYTHON
)
if [ -n "$wheels" ] && [ ! -e "$cuda/lib64/libcudart.so" ]; then
    ln -sf "$wheels/lib/libcudart.so.13" "$target/.link/libcudart.so"
fi

cat <<ENVIRONMENT
export PYTHONPATH=$root:$target\${PYTHONPATH:+:\$PYTHONPATH} CUDA_HOME=$cuda PATH=$cuda/bin:\$PATH
export LIBRARY_PATH=$target/.link\${LIBRARY_PATH:+:\$LIBRARY_PATH}
export CPLUS_INCLUDE_PATH=$wheels/include\${CPLUS_INCLUDE_PATH:+:\$CPLUS_INCLUDE_PATH}
export FLASHINFER_WORKSPACE_BASE=$target/.flashinfer FLASHINFER_CUDA_ARCH_LIST=9.0a MAX_JOBS=\${MAX_JOBS:-$(nproc)}
export SGLANG_JIT_CACHE_DIR=$target/.jit SGLANG_JIT_PREBUILT=$target/.prebuilt
export SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK=1 SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND=python
export SGLANG_TETRIS_CACHE=$cache SGLANG_FLASHINFER_USE_PAGED=1 HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1
ENVIRONMENT
