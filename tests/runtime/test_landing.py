"""Hooks that did not land stop the start."""

from __future__ import annotations

import pytest

from tetris_sglang.portable_cpu.activate import activate

activate()  # as SGLang does, before its modules are imported
from tetris_sglang.runtime import inventory


def test_a_hook_that_did_not_land_is_named(monkeypatch):
    """SGLang logs a failing hook and goes on; TETRIS does not."""
    from sglang.srt.plugins.hook_registry import HookRegistry
    from sglang.srt.speculative import spec_registry

    from tetris_sglang.plugin import load

    load()
    HookRegistry.apply_hooks()
    inventory.verify_landed()
    target = "sglang.srt.server_args.ServerArgs.add_cli_args"
    monkeypatch.setattr(HookRegistry, "_patched", HookRegistry._patched - {target})
    with pytest.raises(RuntimeError, match="ServerArgs.add_cli_args"):
        inventory.verify_landed()
    monkeypatch.undo()
    monkeypatch.setattr(spec_registry, "_REGISTRY", {})
    with pytest.raises(RuntimeError, match="registration of TETRIS"):
        inventory.verify_landed()
