"""The `sglang.srt.plugins` entry point: SGLang calls `load()` once in every process of a server."""


def load() -> None:
    """Register TETRIS with SGLang, and the portable CPU platform where there is no GPU.

    SGLang logs an exception raised here and goes on without the plugin; --speculative-algorithm TETRIS is then an
    unknown name and start-up ends.
    """
    from tetris_sglang.compat import check_sglang_version

    check_sglang_version()

    from tetris_sglang import portable_cpu
    from tetris_sglang.runtime.algorithm import register_algorithm
    from tetris_sglang.runtime.arguments import accept_engine_arguments
    from tetris_sglang.runtime.inventory import register_hooks

    register_algorithm()
    register_hooks()
    accept_engine_arguments()
    if portable_cpu.is_active():
        portable_cpu.register()
