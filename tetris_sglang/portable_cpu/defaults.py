"""What a server on the portable CPU platform chooses where its user chose nothing.

| setting | default | why |
|---|---|---|
| `--attention-backend` | `torch_ragged` | upstream's CPU choice needs `sgl_kernel` |
| `--sampling-backend` | `pytorch` | upstream's own choice on a CPU |
| `--chunked-prefill-size` | 2048 | bounds a prefill's working memory |
| `--max-running-requests` | 64 | the request table holds a full context for each |
| `--mem-fraction-static` | 0.85 | of the memory that is free at start-up |
| `--max-total-tokens` | 32768, less if they would take more than 2 GiB | two servers fit on a laptop |
| `--disable-cuda-graph` | given, unless `--enable-torch-compile` is | `--speculative-adaptive` would try to capture graphs |
| `--disable-overlap-schedule` | given | one thread runs everything: overlap delays results, and ended requests ride along |

A user who gives `--mem-fraction-static` gets that share for the cache, without the last bound. SGLang has no flag that asks for
overlap scheduling; SGLANG_TETRIS_CPU_OVERLAP=1 does, for those who test it.
"""

import os

ATTENTION_BACKEND = "torch_ragged"
CHUNKED_PREFILL_SIZE = 2048
MAX_RUNNING_REQUESTS = 64
MEM_FRACTION_STATIC = 0.85
MAX_TOTAL_TOKENS = 32768
MAX_CACHE_BYTES = 2 << 30
OVERLAP_VARIABLE = "SGLANG_TETRIS_CPU_OVERLAP"

_SOURCE = "tetris_sglang.portable_cpu.defaults"


def choose_defaults(server_args, previous) -> None:
    """Resolution step `handle_cpu_backends`: this platform's choices, then upstream's.

    Raises:
        ValueError: the user asks for something that needs an accelerator or `sgl_kernel`, or `wants_overlap` cannot tell.
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
        if not wants_overlap():
            chosen["disable_overlap_schedule"] = True
        declare_resolution(server_args, _SOURCE, **chosen)
    previous(server_args)


def choose_no_cuda_graphs(server_args, previous) -> None:
    """Resolution step `handle_cuda_graph_config`. With `--enable-torch-compile` upstream has graphs of its own for CPUs."""
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

    cfg = resolving_view(server_args)
    if cfg.device == "cpu" and not cfg.enable_torch_compile:
        declare_resolution(server_args, _SOURCE, disable_cuda_graph=True)
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
        raise ValueError(f"--enable-torch-compile does not work with --attention-backend {ATTENTION_BACKEND}; leave it out")
    if cfg.speculative_use_rejection_sampling:
        raise ValueError(
            "--speculative-use-rejection-sampling runs a Triton kernel and needs an accelerator; without it, "
            "sampled requests are verified against the target's distribution alone, which is lossless too"
        )


def wants_overlap() -> bool:
    """
    Raises:
        ValueError: the variable has another value.
    """
    value = os.environ.get(OVERLAP_VARIABLE, "0")
    if value not in ("0", "1"):
        raise ValueError(f"{OVERLAP_VARIABLE}={value!r}: must be 0 or 1")
    return value == "1"


RESOLUTION_STEPS = {"handle_cuda_graph_config": choose_no_cuda_graphs, "handle_cpu_backends": choose_defaults}
"""SGLang's, and what runs around them."""


def register() -> None:
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

    for step, hook in RESOLUTION_STEPS.items():
        register_resolution_hook(step)(hook)
