#!/usr/bin/env bash
# `make gpu-bundle`: everything that an offline GPU host lacks, in build/gpu-bundle (at most 60 MB).
#
# The host brings Python 3.12, torch 2.11.0+cu130, triton 3.6, transformers 5.17, nvcc 13.0, ninja, g++ and one H100 or H200.
#   sglang-*.tar.xz           SGLang, FlashInfer, kernels trimmed for torch 2.11 and sm_90, small packages, this package
#   tetris-sglang.tar.xz      this checkout, the small pair included; leave it behind where the checkout itself travels
# and beside it, in build/gpu-real-text, the real model and prompts (98 MB, in parts), for the stages that want them.
#
# PRECOMPILE=0 leaves the kernels to the host's nvcc (minutes there, about half an hour on two cores here).
# WHEELS=dir holds wheels that were already downloaded.
set -euo pipefail
cd "$(dirname "$0")/../.."

sglang=0.5.23
# The last sglang-kernel built for torch 2.11; the one that SGLang 0.5.23 asks for does not load there.
kernel=0.4.5
flashinfer=0.7.2
root=$PWD
python=${PYTHON:-$root/.venv/bin/python}
build=$root/build
out=$build/gpu-bundle
wheels=$build/gpu-wheels
stage=$build/gpu-stage
jit=$build/gpu-jit
limit_bytes=60000000

say() { printf '\n== %s\n' "$*"; }

rm -rf "$stage" "$out"
mkdir -p "$wheels" "$stage" "$out"

say "wheels"
# No dependencies: the host has the rest. Versions are those that ran together on torch 2.11.
requirements="sglang==$sglang sglang-kernel==$kernel flashinfer-python==$flashinfer apache-tvm-ffi==0.1.11 xgrammar==0.2.7
    openai==2.8.0 openai-harmony==0.0.4 compressed-tensors==0.18.0 loguru==0.7.3 gguf==0.19.0 fastapi==0.121.3
    starlette==0.50.0 uvicorn==0.54.0 pydantic==2.14.3 pydantic-core==2.50.4 annotated-types==0.8.0
    typing-inspection==0.4.5 python-multipart==0.0.34 watchfiles==1.3.0 pyzmq==27.3.0 orjson==3.13.0 msgspec==0.22.0
    pybase64==1.5.1 setproctitle==1.3.8 partial-json-parser==0.2.1.1.post7 dill==0.4.1 jiter==0.19.0 distro==1.9.0
    sniffio==1.3.1 jsonschema==4.26.0 jsonschema-specifications==2025.9.1 referencing==0.37.0 rpds-py==2026.9.1
    interegular==0.3.3 pytest==9.2.0 pytest-timeout==2.4.0 pluggy==1.7.0 iniconfig==2.3.1"
platforms="--platform any --platform linux_x86_64"
for glibc in _2_34 _2_31 _2_28 _2_27 _2_26 _2_24 _2_17 _2_12 _2_5 2014 1; do
    platforms="$platforms --platform manylinux${glibc}_x86_64"
done
# shellcheck disable=SC2086 # lists
"$python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --implementation cp \
    --python-version 3.12 --abi cp312 --abi abi3 --abi none $platforms \
    --find-links "${WHEELS:-$wheels}" --dest "$wheels" $requirements

say "this checkout"
git ls-files -z --cached --others --exclude-standard |
    tar --null --files-from=- --sort=name --owner=0 --group=0 -cf - | xz -6 -T0 >"$out/tetris-sglang.tar.xz"
# Of its wheel, the entry points by which SGLang finds the plugin; the host's checkout is on PYTHONPATH.
mkdir "$stage.source"
tar -xJf "$out/tetris-sglang.tar.xz" -C "$stage.source"
"$python" -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir "$stage.source" \
    "$stage.source"
unzip -q "$stage.source"/tetris_sglang-*.whl '*.dist-info/*' -d "$stage"
rm -rf "$stage.source"

say "unpacking, without kernels for other GPUs, for mixtures of experts and for diffusion"
for requirement in $requirements; do
    name=${requirement%%==*} version=${requirement##*==}
    for wheel in "$wheels"/${name//-/?}-"$version"-*.whl; do # ?: a wheel's name has underscores
        [ -f "$wheel" ] || continue
        # 11: a pattern matched nothing
        unzip -q -o "$wheel" -d "$stage" -x '*.pyi' 'tools/*' 'build_*.py' 'triton_kernels/*' 'sgl_kernel/flash_ops*' \
            'sgl_kernel/sm100/*' 'sgl_kernel/flashmla_ops*' 'sgl_kernel/infllm_ops*' 'sgl_kernel/spatial_ops*' \
            'sglang/multimodal_gen/*' 'sglang/srt/rust_extensions/*.so' 'sglang/kernels/jit/csrc/deep_select/vendor/*' \
            'flashinfer/experimental/b12x/*' 'flashinfer/experimental/cake_vsa_sm90_cute/*' \
            'flashinfer/moe_ep/kernel_src/*' 'flashinfer/fused_moe/backends/cudnn_frost/artifacts/*' \
            'flashinfer/data/cutlass/examples/*' 'flashinfer/data/cutlass/python/*' 'flashinfer/data/cutlass/test/*' \
            'flashinfer/data/cccl/python/*' 'flashinfer/data/cccl/benchmarks/*' \
            2> >(grep -v '^caution' >&2) || [ $? = 11 ]
    done
done
cd "$stage"
for folder in *.data/purelib *.data/platlib; do [ ! -d "$folder" ] || cp -r "$folder"/. .; done
# xgrammar and tvm_ffi find their libraries through RECORD: only FlashInfer's long one goes.
rm -rf ./*.data flashinfer_python-*.dist-info/RECORD
# FlashInfer's attention, sampling, norm, page and rope are flat files in csrc; its folders are other GPUs' kernels.
find flashinfer/data/csrc -mindepth 1 -maxdepth 1 \
    \( -type d -o -name 'cake_*' -o -name 'trtllm_*' -o -name '*sm1[0-9][0-9]*' -o -name 'alphamoe*' \) -exec rm -rf {} +
find flashinfer/experimental sglang/kernels/kda_kernels sglang/kernels/cake_kernels -type f \
    \( -name '*.cu' -o -name '*.json' -o -name '*.cubin' \) -delete
find . -type d -name __pycache__ -prune -exec rm -rf {} +

say "stubs for packages that are imported and not used here"
mkdir -p IPython
cat >IPython/__init__.py <<'PYTHON'
version_info = (9, 0)  # matplotlib asks


def get_ipython():
    return None
PYTHON
cat >IPython/display.py <<'PYTHON'
def HTML(content=None, *_, **__):
    return content


def display(*_, **__):
    pass


clear_output = display
PYTHON
cat >soundfile.py <<'PYTHON'
def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    class Missing:
        def __init__(self, *_, **__):
            raise RuntimeError("soundfile is not in this bundle")

    return Missing
PYTHON
cat >datasets.py <<'PYTHON'
def load_dataset(*_, **__):
    raise RuntimeError("datasets is not in this bundle")
PYTHON

say "patches"
# replace FILE OLD NEW: exactly one occurrence, so that another release cannot slip through unpatched
replace() {
    "$python" - "$@" <<'PYTHON'
import sys

path, old, new = sys.argv[1:]
text = open(path).read()
assert text.count(old) == 1, f"{path}: {text.count(old)} x {old!r}"
open(path, "w").write(text.replace(old, new))
PYTHON
}
# A Blackwell kernel (it needs nvidia-cutlass-dsl) that LlamaMLP imports on every CUDA device.
replace sglang/srt/layers/dual_gemm.py 'if not is_cuda():' \
    'if not is_cuda() or torch.cuda.get_device_capability()[0] < 10:'
# Draft-extend capture imports every attention backend for an isinstance test; FlashMLA's wheel is not here.
replace sglang/srt/speculative/eagle_worker_v2.py \
    '            from sglang.srt.layers.attention.flashmla_backend import FlashMLABackend

            graph_supported_backend_types.append(FlashMLABackend)
' ''
# SGLang keys its JIT cache on compiler banners and system headers, so one made elsewhere never hits: let a folder of
# libraries made from the same sources for the same GPU answer before nvcc does.
replace sglang/kernels/jit/utils/compile/loader.py \
    '    return cache.find_prebuilt(scope=scope, module_name=spec.module_name)
' '    carried = pathlib.Path(os.environ.get("SGLANG_JIT_PREBUILT", "/nonexistent")) / f"{spec.module_name}.so"
    found = cache.find_prebuilt(scope=scope, module_name=spec.module_name)
    return found or (carried if carried.is_file() else None)
'

if [ "${PRECOMPILE:-1}" = 1 ] && { command -v nvcc || [ -x "${CUDA_HOME:-}/bin/nvcc" ]; } >/dev/null; then
    say "kernels for sm_90a"
    "$python" "$root/scripts/gpu/precompile.py" --out "$jit"
fi
# What the dry run compiled comes along: build/gpu-jit is its cache, too.
if [ -d "$jit" ]; then
    find "$jit/flashinfer" -path '*/cached_ops/*' -name '*.so' 2>/dev/null | while read -r library; do
        name=$(basename "$library" .so)
        install -D "$library" "flashinfer/data/aot/$name/$name.so"
    done
    find "$jit/sglang" -path '*/deps-*' -name 'sgl_kernel_jit_*.so' 2>/dev/null | while read -r library; do
        install -D "$library" ".prebuilt/$(basename "$library")"
    done
fi

say "packing"
cd "$out"
tar --sort=name --owner=0 --group=0 --mtime=2026-01-01 -C "$stage" -cf - . |
    xz -6 -T0 --block-size=24MiB >"sglang-$sglang-cu13-sm90-py312.tar.xz"
unpacked_mb=$(du -sm "$stage" | cut -f1)
rm -rf "$stage"
sha256sum ./*.tar.xz | tee SHA256SUMS
packed=$(cat sglang-*.tar.xz | wc -c)
echo "$out: $((packed / 1000000)) MB without this checkout ($unpacked_mb MB unpacked)"
[ "$packed" -le "$limit_bytes" ] || { echo "error: more than $((limit_bytes / 1000000)) MB" >&2; exit 1; }

say "the real model and prompts"
"$python" "$root/scripts/gpu/pack_real_text.py"
