"""When the portable CPU platform switches itself on, what it changes, and that it changes nothing otherwise.

Every case runs in a process of its own: activation is decided once per process.
"""

import json
import os
import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.e2e

PREAMBLE = """
import json, os, sys
import torch

def state():
    from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES, DRAFT_ATTENTION_BACKEND_CHOICES
    from sglang.srt.arg_groups.resolution_hooks import _HOOKS
    from sglang.srt.layers import attention  # noqa: F401
    from sglang.srt.plugins.hook_registry import HookRegistry
    from tetris_sglang.portable_cpu.inventory import HOOKS
    kernel = sys.modules.get("sgl_kernel")
    return {
        "engine": os.environ.get("SGLANG_USE_CPU_ENGINE"),
        "spin": os.environ.get("GOMP_SPINCOUNT"),
        "uncompiled": os.environ.get("TORCH_COMPILE_DISABLE"),
        "names": (ATTENTION_BACKEND_CHOICES + DRAFT_ATTENTION_BACKEND_CHOICES).count("torch_ragged"),
        "hooks": [hook.target for hook in HOOKS if hook.target in HookRegistry._hooks],
        "defaults": [step for step in ("handle_cuda_graph_config", "handle_cpu_backends") if step in _HOOKS],
        "kernel": None if kernel is None else type(kernel).__name__,
    }
"""

GPU = """
from types import SimpleNamespace
torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 1
torch.cuda.current_device = lambda: 0
torch.cuda.get_device_name = lambda *a: "NVIDIA H100"
torch.cuda.get_device_capability = lambda *a: (9, 0)
torch.cuda.get_device_properties = lambda *a: SimpleNamespace(
    major=9, minor=0, multi_processor_count=132, total_memory=80 << 30, name="NVIDIA H100"
)
"""

NO_GPU = "torch.cuda.is_available = lambda: False\n"

UNTOUCHED = {
    "engine": None,
    "spin": None,
    "uncompiled": None,
    "names": 0,
    "hooks": [],
    "defaults": [],
    "kernel": None,
}


TRACES = (
    "SGLANG_USE_CPU_ENGINE",
    "GOMP_SPINCOUNT",
    "OMP_WAIT_POLICY",
    "TORCH_COMPILE_DISABLE",
    "SGLANG_PLUGINS",
)


def run(code, **environment):
    """What `code` prints last, as JSON, from a fresh process without activation's traces."""
    clean = {k: v for k, v in os.environ.items() if k not in TRACES}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PREAMBLE + textwrap.dedent(code)],
        env=clean | {"OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_nothing_is_touched_on_a_gpu_host():
    """The real entry points, in the order in which SGLang loads them, on a host where torch sees a GPU."""
    result = run(
        GPU
        + """
from sglang.srt.plugins import load_plugins
from sglang.srt.platforms import current_platform
platform = type(current_platform).__name__
load_plugins()
print(json.dumps([platform, state()]))
"""
    )
    assert result == ["CudaSRTPlatform", UNTOUCHED]


def test_a_gpu_host_that_asks_for_the_cpu_engine_keeps_upstreams():
    result = run(
        GPU + "from tetris_sglang.portable_cpu import activate as a\na.activate()\n"
        "print(json.dumps([a.is_active(), 'sgl_kernel' in sys.modules]))",
        SGLANG_USE_CPU_ENGINE="1",
    )
    assert result == [False, False]


WITHOUT_GPU = """
from sglang.srt.plugins import load_plugins
from sglang.srt.platforms import current_platform

result = {"platform": type(current_platform).__name__}
load_plugins()
result["state"] = state()
from tetris_sglang import portable_cpu

portable_cpu.register()
result["again"] = state()
result["scheduler"] = "sglang.srt.managers.scheduler" in sys.modules

from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.server_args import prepare_server_args

SETTINGS = (
    "device", "attention_backend", "sampling_backend", "chunked_prefill_size", "max_running_requests",
    "mem_fraction_static", "max_total_tokens", "page_size", "disable_overlap_schedule",
    "disable_cuda_graph",
)

def resolve(model, *flags):
    model = os.path.join(MODELS, model)
    args = prepare_server_args(["--model-path", model, "--load-format", "dummy", *flags])
    try:
        args.resolve_once()
    except ValueError as error:
        return str(error)
    return {name: getattr(resolving_view(args), name) for name in SETTINGS}

result["plain"] = resolve("small", "--dtype", "float32")
result["large"] = resolve("large", "--dtype", "float32")
result["typed"] = resolve(
    "small", "--attention-backend", "torch_native", "--chunked-prefill-size", "96",
    "--max-running-requests", "3", "--max-total-tokens", "777", "--page-size", "16",
)
result["fraction"] = resolve("small", "--mem-fraction-static", "0.5")
result["upstreams compile"] = resolve("small", "--enable-torch-compile", "--attention-backend", "torch_native")
result["compile"] = resolve("small", "--enable-torch-compile")
result["amx"] = resolve("small", "--attention-backend", "intel_amx")
for value in ("1", "yes"):
    os.environ["SGLANG_TETRIS_CPU_OVERLAP"] = value
    result["overlap " + value] = resolve("small")
print(json.dumps(result))
"""


@pytest.fixture(scope="module")
def without_gpu(tmp_path_factory):
    """What the entry points do, and how SGLang resolves command lines, in one process without a GPU."""
    folder = tmp_path_factory.mktemp("models")
    for name, layers in (("small", 2), ("large", 400)):
        (folder / name).mkdir()
        config = {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 128, "head_dim": 64,
            "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": layers, "vocab_size": 64,
            "intermediate_size": 64, "max_position_embeddings": 2048,
        }  # fmt: skip
        (folder / name / "config.json").write_text(json.dumps(config))
    return run(NO_GPU + f"MODELS = {str(folder)!r}\n" + WITHOUT_GPU)


def fake_kernel(folder, operators):
    package = folder / "sgl_kernel"
    package.mkdir()
    body = "import torch\n"
    if operators:
        body += (
            "library = torch.library.Library('sgl_kernel', 'DEF')\n"
            "library.define('verify_tree_greedy_cpu(Tensor x) -> Tensor')\n"
        )
    (package / "__init__.py").write_text(body + "mark = 'installed'\n")
    for name in ("speculative", "kvcacheio"):
        (package / f"{name}.py").write_text("")
    return str(folder)


ACTIVATE = """
from tetris_sglang.portable_cpu import activate as a
returned = a.activate()
import sgl_kernel
operator = getattr(sgl_kernel, "verify_tree_greedy_cpu", None)
print(json.dumps({
    "returned": returned,
    "active": a.is_active(),
    "engine": os.environ.get("SGLANG_USE_CPU_ENGINE"),
    "spin": os.environ.get("GOMP_SPINCOUNT"),
    "uncompiled": os.environ.get("TORCH_COMPILE_DISABLE"),
    "kernel": getattr(sgl_kernel, "mark", "stand-in"),
    "operator": operator and operator.__module__,
    "sglang": "sglang" in sys.modules,
}))
"""


def test_a_kernel_with_cpu_operators_is_left_alone(tmp_path):
    result = run(NO_GPU + ACTIVATE, PYTHONPATH=fake_kernel(tmp_path, operators=True), SGLANG_USE_CPU_ENGINE="1")
    assert not result["active"]
    assert result["kernel"] == "installed" and result["operator"] is None


def test_a_kernel_that_loads_without_cpu_operators_is_completed(tmp_path):
    """The CUDA build on a host that has the driver's library but no device."""
    result = run(NO_GPU + ACTIVATE, PYTHONPATH=fake_kernel(tmp_path, operators=False))
    assert result["active"] and result["engine"] == "1"
    assert result["kernel"] == "installed" and result["operator"] == "tetris_sglang.portable_cpu.operators"


def test_a_kernel_that_does_not_load_is_replaced(tmp_path):
    package = tmp_path / "sgl_kernel"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('libcuda.so.1: cannot open shared object file')")
    result = run(NO_GPU + ACTIVATE, PYTHONPATH=str(tmp_path))
    assert result["active"] and result["engine"] == "1" and result["kernel"] == "stand-in"
    assert result["operator"] == "tetris_sglang.portable_cpu.operators"
    assert result["returned"] is None  # SGLang keeps its own CPU platform
    assert not result["sglang"]  # every process pays for what activation imports


@pytest.mark.parametrize(
    "typed,spin,uncompiled",
    [
        ({}, "10000", "1"),
        ({"GOMP_SPINCOUNT": "7", "TORCH_COMPILE_DISABLE": "0"}, "7", "0"),
        ({"OMP_WAIT_POLICY": "active"}, None, "1"),
    ],
)
def test_runtime_settings_are_the_users_choice(typed, spin, uncompiled):
    result = run(NO_GPU + ACTIVATE, **typed)
    assert (result["spin"], result["uncompiled"]) == (spin, uncompiled)


def test_names_and_defaults_reach_every_process_hooks_only_a_schedulers(without_gpu):
    assert without_gpu["platform"] == "CpuSRTPlatform"
    assert not without_gpu["scheduler"]
    state = without_gpu["state"]
    assert state["engine"] == "1" and len(state["defaults"]) == 2
    assert state["names"] == 2
    assert state["hooks"] == []


def test_registering_twice_is_registering_once(without_gpu):
    assert without_gpu["again"] == without_gpu["state"]


def test_sglang_plugins_filters_the_platform_out():
    code = "from sglang.srt.platforms import current_platform\nname = type(current_platform).__name__\n"
    assert run(NO_GPU + code + "print(json.dumps([name, state()]))", SGLANG_PLUGINS="other") == [
        "SRTPlatform",
        UNTOUCHED,
    ]


# ------------------------------------------------------------------------------------------------ defaults


def test_only_the_model_path_is_needed(without_gpu):
    assert without_gpu["plain"] == {
        "device": "cpu",
        "attention_backend": "torch_ragged",
        "sampling_backend": "pytorch",
        "chunked_prefill_size": 2048,
        "max_running_requests": 64,
        "mem_fraction_static": 0.85,
        "max_total_tokens": 32768,
        "page_size": 1,
        "disable_overlap_schedule": True,
        "disable_cuda_graph": True,
    }


def test_upstreams_compiled_graphs_for_cpus_stay(without_gpu):
    assert without_gpu["upstreams compile"]["disable_cuda_graph"] is False


def test_overlap_scheduling_can_be_asked_for(without_gpu):
    assert without_gpu["overlap 1"]["disable_overlap_schedule"] is False
    assert "SGLANG_TETRIS_CPU_OVERLAP='yes'" in without_gpu["overlap yes"]


def test_what_the_user_typed_wins(without_gpu):
    typed = without_gpu["typed"]
    assert typed["attention_backend"] == "torch_native" and typed["chunked_prefill_size"] == 96
    assert typed["max_running_requests"] == 3 and typed["max_total_tokens"] == 777 and typed["page_size"] == 16
    assert without_gpu["fraction"]["mem_fraction_static"] == 0.5
    assert without_gpu["fraction"]["max_total_tokens"] is None


def test_cache_of_a_deep_model_stays_within_two_gibibytes(without_gpu):
    token_bytes = 400 * 2 * (64 + 64) * 4
    assert without_gpu["large"]["max_total_tokens"] == (2 << 30) // token_bytes


def test_flags_that_need_an_accelerator_are_refused_by_name(without_gpu):
    assert "--enable-torch-compile" in without_gpu["compile"]
    assert "--attention-backend intel_amx" in without_gpu["amx"]
