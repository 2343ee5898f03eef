"""The portable CPU platform: SGLang without an accelerator and without `sgl_kernel`.

Inactive, and free of side effects, wherever SGLang can serve by itself (see `activate.is_active`).
"""

from tetris_sglang.portable_cpu.activate import is_active

__all__ = ["is_active", "register", "verify_landed"]


def register() -> None:
    """Register the attention backend, defaults and hooks of this platform with SGLang. Idempotent."""
    from tetris_sglang.portable_cpu import hooks

    hooks.register()


def verify_landed() -> None:
    """Raise RuntimeError naming every hook of this platform that SGLang did not apply in this process."""
    from tetris_sglang.portable_cpu import hooks

    hooks.verify_landed()
