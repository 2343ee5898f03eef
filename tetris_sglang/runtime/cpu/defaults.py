"""What a server on the portable CPU platform chooses where its user chose nothing.

| setting | default | why |
|---|---|---|
| `--attention-backend` | `torch_ragged` | upstream's CPU choice needs `sgl_kernel` |
| `--sampling-backend` | `pytorch` | upstream's own choice on a CPU |
| `--chunked-prefill-size` | 2048 | bounds a prefill's working memory |
| `--max-running-requests` | 64 | the request table holds a full context for each |
| `--mem-fraction-static` | 0.85 | of the memory that is free at start-up |
| `--max-total-tokens` | 32768, less if they would take more than 2 GiB | two servers fit on a laptop |

A user who gives `--mem-fraction-static` gets that share for the cache, without the last bound.
"""

ATTENTION_BACKEND = "torch_ragged"
CHUNKED_PREFILL_SIZE = 2048
MAX_RUNNING_REQUESTS = 64
MEM_FRACTION_STATIC = 0.85
MAX_TOTAL_TOKENS = 32768
MAX_CACHE_BYTES = 2 << 30

_SOURCE = "tetris_sglang.runtime.cpu.defaults"


def choose_defaults(server_args, previous) -> None:
    """Resolution step `handle_cpu_backends`: this platform's choices, then upstream's.

    Raises:
        ValueError: the user asks for something that needs an accelerator or `sgl_kernel`.
    """
    from sglang.srt.arg_groups.overrides import declare_resolution, model_config_of, resolving_view

    cfg = resolving_view(server_args)
    if cfg.device == "cpu":
        refuse_unsupported(cfg)
        defaults = {
            "attention_backend": ATTENTION_BACKEND,
            "chunked_prefill_size": CHUNKED_PREFILL_SIZE,
            "max_running_requests": MAX_RUNNING_REQUESTS,
        }
        if cfg.mem_fraction_static is None:
            defaults["mem_fraction_static"] = MEM_FRACTION_STATIC
            if cfg.max_total_tokens is None:
                defaults["max_total_tokens"] = cache_tokens(model_config_of(server_args))
        chosen = {name: value for name, value in defaults.items() if getattr(cfg, name) is None}
        declare_resolution(server_args, _SOURCE, **chosen)
    previous(server_args)


def cache_tokens(model_config) -> int:
    """How many tokens the target's KV cache holds by default."""
    values = model_config.get_num_kv_heads(1) * (model_config.head_dim + model_config.v_head_dim)
    token_bytes = model_config.num_hidden_layers * values * model_config.dtype.itemsize
    return min(MAX_TOTAL_TOKENS, MAX_CACHE_BYTES // max(token_bytes, 1))


def refuse_unsupported(cfg) -> None:
    """Raise ValueError naming the first flag that cannot work here, and the way out."""
    if cfg.attention_backend == "intel_amx":
        raise ValueError(
            "--attention-backend intel_amx needs sgl_kernel's CPU build, which is not installed; "
            f"leave the flag out to use {ATTENTION_BACKEND}"
        )
    if cfg.enable_torch_compile and cfg.attention_backend in (None, ATTENTION_BACKEND):
        raise ValueError(
            f"--enable-torch-compile does not work with --attention-backend {ATTENTION_BACKEND}; leave it out"
        )
    if cfg.speculative_use_rejection_sampling:
        raise ValueError(
            "--speculative-use-rejection-sampling runs a Triton kernel and needs an accelerator; without it, "
            "sampled requests are verified against the target's distribution alone, which is lossless too"
        )


def keep_overlap_schedule(server_args) -> None:
    """Instead of `speculative_hook._disable_overlap_schedule_for_cpu`: leave the user's choice alone."""


def register() -> None:
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

    register_resolution_hook("handle_cpu_backends")(choose_defaults)
