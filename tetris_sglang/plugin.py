"""The `sglang.srt.plugins` entry point: SGLang calls `load()` once in every process of a server."""


def load() -> None:
    """Register TETRIS with SGLang, and the portable CPU platform where there is no GPU."""
    from tetris_sglang.runtime import cpu

    if cpu.is_active():
        cpu.register()
