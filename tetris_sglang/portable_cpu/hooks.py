"""Applies `inventory.HOOKS` to SGLang, once per process."""

import logging
import pkgutil
import sys

from tetris_sglang.contacts import Hook
from tetris_sglang.portable_cpu.defaults import ATTENTION_BACKEND, RESOLUTION_STEPS
from tetris_sglang.portable_cpu.inventory import HOOKS

logger = logging.getLogger(__name__)

_done: set[str] = set()
"""What `register` has done in this process."""


def in_scheduler_process() -> bool:
    """Whether this process runs a scheduler: only there are heavy imports worth their time."""
    return "sglang.srt.managers.scheduler" in sys.modules


def register() -> None:
    """Register names and defaults in every process, and what runs the model in a scheduler's. Idempotent."""
    if "names" not in _done:
        _done.add("names")
        _add_backend_names()
        from tetris_sglang.portable_cpu import defaults

        defaults.register()
    if in_scheduler_process() and "hooks" not in _done:
        _done.add("hooks")
        _register_hooks()
        from sglang.srt.layers.attention.attention_registry import register_attention_backend

        @register_attention_backend(ATTENTION_BACKEND)
        def create(model_runner):
            from tetris_sglang.portable_cpu.attention import TorchRaggedBackend

            try:
                verify_landed()
            except RuntimeError as error:  # a server without speculation may still serve
                logger.error("%s", error)
            return TorchRaggedBackend(model_runner)


def verify_landed() -> None:
    """Raise RuntimeError naming each hook that is not in effect in this process."""
    missing = [hook for hook in HOOKS if not _landed(hook)]
    from sglang.srt.arg_groups.resolution_hooks import _HOOKS
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    names = [f"{hook.target} ({hook.purpose})" for hook in missing]
    if ATTENTION_BACKEND not in ATTENTION_BACKENDS:
        names.append(f"attention backend {ATTENTION_BACKEND}")
    names += [f"resolution step {step}" for step in RESOLUTION_STEPS if not _HOOKS.get(step)]
    if names:
        raise RuntimeError(
            "the portable CPU platform is incomplete in this process; these did not take effect: "
            + "; ".join(names)
            + ". SGLANG_PLUGINS must include tetris, and SGLang must be the version this package names."
        )


def _landed(hook: Hook) -> bool:
    from sglang.srt.plugins.hook_registry import HookRegistry

    if hook.kind == "FILL":
        return pkgutil.resolve_name(hook.target) is pkgutil.resolve_name(hook.hook)
    return hook.target in HookRegistry._patched


def _register_hooks() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for hook in HOOKS:
        if hook.kind == "FILL":
            owner, _, name = hook.target.rpartition(".")
            setattr(pkgutil.resolve_name(owner), name, pkgutil.resolve_name(hook.hook))
        else:
            HookRegistry.register(hook.target, pkgutil.resolve_name(hook.hook), HookType[hook.kind])


def _add_backend_names() -> None:
    from sglang.srt.arg_groups import choices

    if ATTENTION_BACKEND not in choices.ATTENTION_BACKEND_CHOICES:
        choices.add_attention_backend_choices([ATTENTION_BACKEND])
    if ATTENTION_BACKEND not in choices.DRAFT_ATTENTION_BACKEND_CHOICES:
        choices.add_draft_attention_backend_choices([ATTENTION_BACKEND])


def create_draft_backend(original, factory, backend_name, backend_map, error_template, stamps_children=False):
    """Around `DraftBackendFactory._create_backend`: adds `torch_ragged` to the map it chooses from."""

    def create():
        from tetris_sglang.portable_cpu import attention

        runner = factory.draft_model_runner
        if stamps_children:  # the draft loop's container, one backend per step
            backend = attention.TorchRaggedMultiStepDraftBackend(runner, factory.topk, factory.speculative_num_steps)
        else:
            backend = attention.TorchRaggedBackend(runner)
        return ATTENTION_BACKEND, backend

    widened = {**backend_map, ATTENTION_BACKEND: create}
    return original(factory, backend_name, widened, error_template, stamps_children)
