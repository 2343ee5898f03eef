"""Every contact with SGLang 0.5.23: the hooks that TETRIS registers, and the proof that they landed.

`HOOKS` is what the plugin changes in SGLang; `SYMBOLS` is what it relies on without changing it. The contract tests
check both against the installed release. The CPU platform keeps its own list (runtime/cpu/inventory.py).
"""

from __future__ import annotations

import multiprocessing
import pkgutil
import sys
from typing import NamedTuple


class Hook(NamedTuple):
    target: str
    """Dotted name of the upstream function."""
    hook: str
    """Dotted name of ours."""
    kind: str
    """SGLang's HookType, by name."""
    purpose: str
    until: str
    """What upstream would have to offer for the hook to go."""


HOOKS: tuple[Hook, ...] = (
    Hook(
        "sglang.srt.server_args.ServerArgs.add_cli_args",
        "tetris_sglang.runtime.arguments.add_cli_args",
        "AFTER",
        "--speculative-tetris-* flags in launch_server and sglang serve",
        "a registry of plugin flags",
    ),
    Hook(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_one_request",
        "tetris_sglang.runtime.requests.guard_request",
        "BEFORE",
        "400 for requests that cannot be served exactly",
        "a request-validation callback on CustomSpecAlgo",
    ),
    Hook(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager._calculate_spec_decoding_metrics",
        "tetris_sglang.runtime.metrics.add_request_meta_info",
        "AFTER",
        "selected tokens per request in meta_info",
        "cap lengths summed in meta_info",
    ),
    Hook(
        "sglang.srt.managers.scheduler_components.internal_state.SchedulerInternalStateController._add_speculative",
        "tetris_sglang.runtime.metrics.add_internal_state",
        "AFTER",
        "TETRIS counters and phase times in /server_info",
        "an info callback on speculative workers",
    ),
)

_SCHEDULER = "sglang.srt.managers.scheduler_components."
_TOKENIZER = "sglang.srt.managers.tokenizer_manager."


def _belongs_here(hook: Hook) -> bool:
    """Whether this process may call the hooked function; hooking it elsewhere would import half of SGLang."""
    if hook.target.startswith(_SCHEDULER):
        return "sglang.srt.managers.scheduler" in sys.modules
    if hook.target.startswith(_TOKENIZER):
        return multiprocessing.parent_process() is None or _TOKENIZER.rstrip(".") in sys.modules
    return True


def register_hooks() -> None:
    """Register every hook that this process needs with SGLang's hook registry."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for hook in filter(_belongs_here, HOOKS):
        HookRegistry.register(hook.target, pkgutil.resolve_name(hook.hook), HookType[hook.kind])


def verify_landed() -> None:
    """Assert in the scheduler process that TETRIS's registration and hooks took effect.

    SGLang logs a plugin's exceptions and goes on, so nobody else would notice.

    Raises:
        RuntimeError: naming what did not land.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry
    from sglang.srt.speculative.spec_registry import get_spec

    from tetris_sglang.runtime import cpu

    missing = [
        hook.target
        for hook in HOOKS
        if _belongs_here(hook) and hook.target not in HookRegistry._patched
    ]
    if get_spec("TETRIS") is None:
        missing.append("the registration of TETRIS")
    if missing:
        raise RuntimeError(
            f"TETRIS cannot start: {', '.join(missing)} did not take effect in SGLang. The log above says why; "
            f"`tetris-sglang check` lists what this SGLang release offers."
        )
    if cpu.is_active():
        cpu.verify_landed()
