"""What a server without an accelerator should choose where the user chose nothing."""

from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view
from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

ATTENTION_BACKEND = "torch_ragged"
MAX_TOTAL_TOKENS = 32768
CHUNKED_PREFILL_SIZE = 2048

SOURCE = "tetris_sglang.runtime.cpu"


def choose_cpu_defaults(server_args, previous) -> None:
    """Resolution step `handle_cpu_backends`, with this platform's choices before upstream's.

    Upstream's own step would choose `intel_amx`, which needs `sgl_kernel`.
    """
    cfg = resolving_view(server_args)
    if cfg.device == "cpu":
        chosen = {}
        if cfg.attention_backend is None:
            chosen["attention_backend"] = ATTENTION_BACKEND
        if cfg.chunked_prefill_size is None:
            chosen["chunked_prefill_size"] = CHUNKED_PREFILL_SIZE
        if cfg.max_total_tokens is None and cfg.mem_fraction_static is None:
            chosen["max_total_tokens"] = MAX_TOTAL_TOKENS
        if chosen:
            declare_resolution(server_args, SOURCE, **chosen)
    previous(server_args)


def register() -> None:
    register_resolution_hook("handle_cpu_backends")(choose_cpu_defaults)


def keep_overlap_schedule(server_args) -> None:
    """Instead of `speculative_hook._disable_overlap_schedule_for_cpu`: leave the user's choice alone."""
