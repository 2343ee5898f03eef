"""Imports run one way, and the rooms stay as small as they are meant to be."""

from __future__ import annotations

import ast
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "tetris_sglang"
# Each may import those before it.
LAYERS = [
    "contacts",
    "config",
    "cache",
    "compat",
    "trace",
    "selection",
    "acceptance",
    "capacity",
    "texts",
    "drafting",
    "packing",
    "observers",
    "estimates",
    "kernels",
    "portable_cpu",
    "runtime",
    "plugin",
    "tools",
    "__main__",
]
ALONE = ("contacts", "selection", "acceptance", "capacity", "config", "trace", "cache")
"""Know nothing of the rest."""
WITHOUT_SGLANG = [
    "selection",
    "acceptance",
    "capacity",
    "texts",
    "drafting",
    "packing",
    "observers",
    "estimates",
    "kernels",
    "trace",
    "cache",
]
MAX_CLASS_LINES, MAX_FUNCTION_LINES = 250, 60
REASONS = {
    "_plan_prefill_kernel": "one launch; a kernel's parts would have to share a dozen arrays",
    "build_tree_kernel_efficient_cpu": "stands for one of SGLang's kernels, whose parameters it has",
    "_simulate": "one compiled loop: calls between its parts would copy its state",
    "bench": "a command: its options are its parameters, each with its help",
    "distill": "a command: its options are its parameters, each with its help",
    "judge": "one expectation after the other",
    "pack_kernel": "one launch: all of it is about the same rows",
    "simulate": "a command: its options are its parameters, each with its help",
}
"""Why these functions are longer."""


def name_module(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


TREES = {name_module(path): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


def list_imports(tree: ast.Module) -> set[str]:
    """Modules, those that functions import late included, those for types alone not."""
    found = set()
    for_types = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in set(ast.walk(tree)) - for_types:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in TREES else node.module for name in inner}
    return found


IMPORTS = {name: list_imports(tree) for name, tree in TREES.items()}


def layer_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_imports_those_below_it(layer):
    below = LAYERS[: LAYERS.index(layer)] if layer not in ALONE else []
    if layer == "portable_cpu":
        # It knows nothing of TETRIS.
        below = ["contacts"]
    for module, imported in IMPORTS.items():
        if layer_of(module) == layer:
            ours = {layer_of(name) for name in imported if name.startswith("tetris_sglang")}
            assert ours <= {"", layer, *below}, module


def test_every_package_has_its_layer():
    assert {layer_of(module) for module in TREES} == {"", *LAYERS}


def test_no_modules_import_one_another_in_a_circle():
    graph = {name: {other for other in imported if other in TREES} - {name} for name, imported in IMPORTS.items()}
    # A package stands for its modules only where it is imported itself.
    assert list(TopologicalSorter(graph).static_order())


def test_what_is_pure_does_without_sglang():
    for module, imported in IMPORTS.items():
        if layer_of(module) in WITHOUT_SGLANG:
            assert not {name for name in imported if name.split(".")[0] == "sglang"}, module


ONE_ROLE = {
    "attention": "an attention backend",
    "command": "a command of tetris-sglang",
    "hooks": "what a part of the runtime changes in SGLang",
    "inventory": "a platform's contacts with SGLang",
    "noise": "the noise that draft and target share, in torch and as kernels",
    "report": "what a command writes",
}


def test_files_of_one_name_have_one_role():
    names = Counter(module.rsplit(".", 1)[-1] for module in TREES)
    assert {name for name, count in names.items() if count > 1} == ONE_ROLE.keys()


def test_classes_and_functions_can_be_read_at_once():
    too_long = []
    for module, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                lines = node.end_lineno - node.lineno + 1
                if ast.get_docstring(node, clean=False):
                    docstring = node.body[0]
                    lines -= docstring.end_lineno - docstring.lineno + 1
                limit = MAX_CLASS_LINES if isinstance(node, ast.ClassDef) else MAX_FUNCTION_LINES
                if lines > limit and node.name not in REASONS:
                    too_long.append(f"{module}.{node.name}: {lines} lines")
    assert not too_long, "\n".join(too_long)
