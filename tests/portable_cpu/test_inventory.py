"""Every upstream symbol that the portable CPU platform hooks or relies on is there, unchanged."""

import ast
import importlib.metadata
import importlib.util
import inspect
import json
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

from tetris_sglang import portable_cpu
from tetris_sglang.contacts import Hook, Symbol, find_missing_symbols
from tetris_sglang.portable_cpu import operators
from tetris_sglang.portable_cpu.inventory import HOOKS, SYMBOLS

if not portable_cpu.is_active():
    pytest.skip("the portable CPU platform is inactive here", allow_module_level=True)

RELEASE = f"SGLang {importlib.metadata.version('sglang')}"


def resolve(contact: Hook):
    try:
        return pkgutil.resolve_name(contact.target)
    except (ImportError, AttributeError) as error:
        pytest.fail(f"{RELEASE} no longer has {contact.target}, needed because: {contact.purpose} ({error})")


@pytest.mark.parametrize("symbol", SYMBOLS, ids=lambda symbol: symbol.name)
def test_symbol(symbol: Symbol):
    assert not find_missing_symbols([symbol]), f"{RELEASE} lacks what the CPU platform relies on for: {symbol.purpose}"


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.target)
def test_target_has_the_parameters_relied_on(hook: Hook):
    target = resolve(hook)
    if hook.kind == "FILL":
        assert target is None or target is pkgutil.resolve_name(hook.hook), (
            f"{RELEASE} has its own {hook.target} on a CPU now: drop ours"
        )
        target = pkgutil.resolve_name(hook.like)
    found = tuple(inspect.signature(inspect.unwrap(target)).parameters)
    assert found == hook.parameters, f"{RELEASE} changed the parameters of {hook.target}: {found}"


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.target)
def test_hook_takes_what_it_replaces(hook: Hook):
    """Called with upstream's parameter names, ours binds."""
    signature = inspect.signature(pkgutil.resolve_name(hook.hook))
    if hook.kind == "AROUND":
        if hook.parameters[0] == "self":
            signature.bind("original", *hook.parameters)
        else:
            signature.bind("original", **dict.fromkeys(hook.parameters))
    else:
        assert list(signature.parameters) == list(hook.parameters)


def wheel_functions():
    """Parameter names of the Python functions of the installed sgl_kernel, read without importing it."""
    location = importlib.metadata.files("sglang-kernel")
    found = {}
    for file in location or []:
        if file.match("sgl_kernel/speculative.py") or file.match("sgl_kernel/kvcacheio.py"):
            for node in ast.parse(Path(file.locate()).read_text()).body:
                if isinstance(node, ast.FunctionDef):
                    found[node.name] = [argument.arg for argument in node.args.args]
    return found


@pytest.mark.parametrize("operator", operators.OPERATORS, ids=lambda operator: operator.__name__)
def test_operator_has_the_signature_it_stands_for(operator):
    expected = wheel_functions()[operator.__name__]
    assert list(inspect.signature(operator).parameters) == expected, f"{RELEASE}'s sgl_kernel changed it"


def test_every_cpu_operator_that_sglang_imports_is_provided():
    """`from sgl_kernel import ..._cpu` at module level, in the packages on the serving path."""
    root = Path(importlib.util.find_spec("sglang").origin).parent
    imported = {}
    for folder in ("kernels/ops/speculative", "kernels/ops/kvcache", "srt/mem_cache", "srt/speculative"):
        for file in (root / folder).glob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "sgl_kernel":
                    imported |= {alias.name: file.name for alias in node.names if alias.name.endswith("_cpu")}
    provided = {operator.__name__ for operator in operators.OPERATORS} | set(operators.UNSUPPORTED)
    missing = {name: file for name, file in imported.items() if name not in provided}
    assert imported and not missing, f"{RELEASE} imports operators that are not provided: {missing}"


LANDED = """
import json
import sglang.srt.managers.scheduler
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.speculative import eagle_utils
from tetris_sglang import portable_cpu
from tetris_sglang.portable_cpu.inventory import HOOKS

def complaint():
    try:
        portable_cpu.verify_landed()
    except RuntimeError as error:
        return str(error)

results = {"before": complaint()}
load_plugins()
results["after"] = complaint()
for hook in HOOKS:
    if hook.kind == "FILL":
        name = hook.target.rpartition(".")[2]
        kept = getattr(eagle_utils, name)
        setattr(eagle_utils, name, None)
        results[hook.target] = complaint()
        setattr(eagle_utils, name, kept)
    else:
        HookRegistry._patched.remove(hook.target)
        results[hook.target] = complaint()
        HookRegistry._patched.add(hook.target)
del ATTENTION_BACKENDS["torch_ragged"]
results["attention backend torch_ragged"] = complaint()
print(json.dumps(results))
"""


@pytest.mark.e2e
def test_a_hook_that_does_not_land_is_named():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LANDED],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads(done.stdout.splitlines()[-1])
    assert "_verify_uses_greedy" in results.pop("before")
    assert results.pop("after") is None
    for target, complaint in results.items():
        assert complaint is not None and target in complaint
        others = [hook.target for hook in HOOKS if hook.target != target]
        assert not [other for other in others if other in complaint]
