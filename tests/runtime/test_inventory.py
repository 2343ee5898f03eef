"""The installed SGLang has everything that TETRIS hooks or relies on (tetris_sglang/runtime/inventory.py)."""

import ast
import inspect
import pkgutil
import re
from importlib import metadata
from pathlib import Path

import pytest
from sglang.srt.server_args import ServerArgs

from tetris_sglang.compat import SUPPORTED_SGLANG, check_sglang_version
from tetris_sglang.contacts import Hook, Symbol, find_missing_symbols
from tetris_sglang.runtime import inventory
from tetris_sglang.runtime.arguments import UNSUPPORTED
from tetris_sglang.runtime.inventory import HOOKS, SYMBOLS

ROOT = Path(__file__).parents[2]
RELEASE = f"SGLang {metadata.version('sglang')}"

pytestmark = pytest.mark.usefixtures("plugins")


# -- the release --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["requirements.txt", "pyproject.toml"])
def test_the_pinned_release_is_a_supported_one(name):
    pins = re.findall(r"\bsglang==([\w.]+)", (ROOT / name).read_text())
    assert pins and set(pins) <= set(SUPPORTED_SGLANG)


def test_supported_release():
    assert check_sglang_version() in SUPPORTED_SGLANG


@pytest.mark.parametrize("version", ["0.5.22", "0.5.24", "0.5.23.post1", "0.6.0rc1"])
def test_other_releases_are_refused(monkeypatch, version):
    monkeypatch.setattr(metadata, "version", lambda name: version)
    with pytest.raises(RuntimeError, match=rf"SGLang {version} is installed.*pip install 'sglang==0.5.23'"):
        check_sglang_version()


def test_a_missing_sglang_is_named(monkeypatch):
    def version(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    with pytest.raises(RuntimeError, match="SGLang is not installed.*pip install"):
        check_sglang_version()


# -- symbols ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("symbol", SYMBOLS, ids=lambda symbol: symbol.name)
def test_symbol(symbol: Symbol):
    assert not find_missing_symbols([symbol]), f"{RELEASE} lacks what TETRIS relies on for: {symbol.purpose}"


@pytest.mark.parametrize(
    "name, members, missing",
    [
        ("sglang.srt.nothing.Nothing", (), "sglang.srt.nothing.Nothing (why)"),
        ("sglang.srt.server_args.Nothing", (), "sglang.srt.server_args.Nothing (why)"),
        (
            "sglang.srt.speculative.eagle_info.EagleDraftInput",
            ("topk_p", "nothing"),
            "sglang.srt.speculative.eagle_info.EagleDraftInput: nothing (why)",
        ),
        (
            "sglang.srt.arg_groups.overrides.resolving_view",
            ("server_args", "nothing"),
            "sglang.srt.arg_groups.overrides.resolving_view: nothing (why)",
        ),
    ],
)
def test_a_missing_symbol_is_named(name, members, missing):
    assert find_missing_symbols([Symbol(name, members, "why")]) == [missing]


def imported_from_sglang() -> set[str]:
    """Dotted names that runtime/*.py imports from SGLang, at module level or inside functions."""
    names = set()
    for path in (ROOT / "tetris_sglang" / "runtime").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sglang"):
                names |= {f"{node.module}.{alias.name}" for alias in node.names}
            elif isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names if alias.name.startswith("sglang")}
    return names


def test_every_import_is_in_the_inventory():
    listed = [symbol.name for symbol in SYMBOLS]
    imported = imported_from_sglang()
    assert "sglang.srt.speculative.spec_info.SpeculativeAlgorithm" in imported
    missing = {name for name in imported if not any(f"{entry}.".startswith(f"{name}.") for entry in listed)}
    assert not missing, "add these to SYMBOLS in tetris_sglang/runtime/inventory.py, with what is used of them"


# -- hooks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.target)
def test_hook_fits_its_target(hook: Hook):
    """Our function takes what SGLang's registry hands it: the target's parameters, after the result for AFTER."""
    target = pkgutil.resolve_name(hook.target)
    theirs = list(inspect.signature(target).parameters.values())
    ours = list(inspect.signature(pkgutil.resolve_name(hook.hook)).parameters.values())
    if hook.kind in ("AFTER", "AROUND"):  # the result, or the original
        ours = ours[1:]
    kinds = {parameter.kind for parameter in ours}
    if kinds == {inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD}:
        by_name = {parameter.name for parameter in ours if parameter.kind is inspect.Parameter.KEYWORD_ONLY}
        assert by_name <= {their.name for their in theirs if their.kind is inspect.Parameter.KEYWORD_ONLY}, (
            f"{RELEASE}: {theirs}"
        )
        return
    named = [parameter for parameter in ours if parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    takes_more = any(parameter.kind is inspect.Parameter.VAR_POSITIONAL for parameter in ours)
    assert len(named) == len(theirs) or (takes_more and len(named) < len(theirs)), f"{RELEASE}: {theirs}"
    for own, their in zip(named, theirs, strict=False):
        assert their.name in (own.name, "self"), f"{RELEASE}: {hook.target}, {hook.purpose}"


def test_hooks_land():
    """In a process that is no scheduler: SGLang's registry has wrapped each target (functools.wraps says so)."""
    landed = {hook.target for hook in HOOKS if hasattr(pkgutil.resolve_name(hook.target), "__wrapped__")}
    assert "sglang.srt.server_args.ServerArgs.add_cli_args" in landed
    assert landed == {hook.target for hook in inventory._needed}
    inventory.verify_landed()


def test_hooks_that_were_never_registered_stop_the_worker(monkeypatch):
    monkeypatch.setattr(inventory, "_needed", [])
    with pytest.raises(RuntimeError, match="the registration of its hooks did not take effect"):
        inventory.verify_landed()


def test_a_hook_that_did_not_land_stops_the_worker(monkeypatch):
    from sglang.srt.plugins.hook_registry import HookRegistry

    target = "sglang.srt.server_args.ServerArgs.add_cli_args"
    monkeypatch.setattr(HookRegistry, "_patched", HookRegistry._patched - {target})
    with pytest.raises(RuntimeError, match=rf"TETRIS cannot start: {target} did not take effect.*tetris-sglang check"):
        inventory.verify_landed()


def test_a_lost_registration_stops_the_worker(monkeypatch):
    from sglang.srt.speculative import spec_registry

    monkeypatch.setattr(spec_registry, "_REGISTRY", {})
    with pytest.raises(RuntimeError, match="the registration of TETRIS did not take effect"):
        inventory.verify_landed()


# -- server arguments ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def option_strings() -> set[str]:
    import argparse

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return {option for action in parser._actions for option in action.option_strings}


@pytest.mark.parametrize("item", UNSUPPORTED, ids=lambda item: item.argument)
def test_unsupported_argument_exists_and_is_not_given_by_default(item, option_strings):
    assert item.argument in ServerArgs.__struct_fields__, f"{RELEASE} has no such argument"
    for flag in item.flag.split(" / "):
        assert flag in option_strings, f"{RELEASE} has no such flag"
    assert not item.is_given(ServerArgs(model_path="model"))
