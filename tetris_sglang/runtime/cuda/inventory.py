"""What the GPU path relies on in SGLang 0.5.23 and FlashInfer 0.7.2, checked by the contract tests.

Its hooks are in `runtime.inventory.HOOKS`. FlashInfer's plan, which kernels/attention_plan.py writes, is `PlanLayout` there.
"""

from tetris_sglang.contacts import Symbol

_SRT = "sglang.srt."
_RUNNER = _SRT + "model_executor.runner.decode_cuda_graph_runner."

SYMBOLS: tuple[Symbol, ...] = (
    Symbol(
        _SRT + "layers.attention.flashinfer_backend.FlashInferAttnBackend",
        (
            "cuda_graph_kv_indices",
            "dispatch_reason",
            "forward_extend",
            "forward_metadata",
            "indices_updater_prefill",
            "init_cuda_graph_state",
            "init_forward_metadata",
            "init_forward_metadata_in_graph",
            "init_forward_metadata_out_graph",
            "kv_index_translator",
            "needs_cpu_seq_lens",
            "use_paged",
            "prefill_backend",
            "supports_ragged_verify_graph",
            "workspace_buffer",
        ),
        "the target's attention and the draft's; the subclass plans captured ragged passes",
    ),
    Symbol(
        _SRT + "layers.attention.flashinfer_backend.FlashInferAttnBackend.__init__",
        ("model_runner", "init_new_workspace"),
        "the target's attention",
    ),
    Symbol(
        _SRT + "layers.attention.flashinfer_backend.FlashInferIndicesUpdaterPrefill",
        ("num_qo_heads", "num_kv_heads", "head_dim", "q_data_type", "data_type"),
        "the geometry that a verify pass is planned with",
    ),
    Symbol(
        _SRT + "layers.attention.flashinfer_backend.PrefillMetadata",
        ("prefill_wrappers", "use_ragged", "extend_no_prefix"),
        "hands the captured wrapper to the layers",
    ),
    Symbol(
        _SRT + "layers.attention.flashinfer_backend.fast_prefill_plan",
        ("qo_indptr_host", "kv_indptr_host", "kv_lens_host", "max_q_len", "max_kv_len", "causal"),
        "plans from host lengths (--speculative-tetris-verify-plan host)",
    ),
    Symbol(
        _SRT + "layers.attention.attention_registry.register_attention_backend",
        ("name",),
        "the attention backend of a TETRIS server's target",
    ),
    Symbol(
        _SRT + "mem_cache.kv_index_translator.KVIndexTranslator",
        ("bind_runner_slots", "pack_read_stream"),
        "KV indices for FlashInfer",
    ),
    Symbol(
        _SRT + "model_executor.cuda_graph_config.check_cuda_graph_backend",
        ("phase", "backend"),
        "whether decode graphs are switched off",
    ),
    Symbol(_SRT + "model_executor.cuda_graph_config.Phase", ("DECODE",), "whether decode graphs are switched off"),
    Symbol(
        _SRT + "model_executor.cuda_graph_config.Backend",
        ("DISABLED",),
        "whether decode graphs are switched off",
    ),
    Symbol(
        _RUNNER + "DecodeCudaGraphRunner",
        (
            "_capture_ragged_verify_layout",
            "_ragged_capture_slots",
            "capture_bs",
            "capture_num_tokens",
            "captured_req_width",
            "get_spec_info",
            "ragged_verify_mode",
            "speculative_num_draft_tokens",
        ),
        "captures and replays the target's ragged passes by token tiers",
    ),
    Symbol(
        _SRT + "model_executor.runner_utils.pool.get_or_create_global_graph_memory_pool",
        ("device_module",),
        "the memory that all graphs share",
    ),
    Symbol(
        _SRT + "speculative.eagle_draft_cuda_graph_runner.EAGLEDraftCudaGraphRunner",
        (
            "_make_graph_key",
            "_pad_to_bucket",
            "_replay_graph",
            "backend",
            "buffers",
            "capture",
            "capture_bs",
            "capture_one_shape",
            "draft_attn_backend",
            "max_bs",
            "model_runner",
            "speculative_num_steps",
        ),
        "buffers, capture loop and replay of the draft's graphs",
    ),
    Symbol(
        _SRT + "speculative.standalone_worker_v2.StandaloneDraftWorker",
        ("_capture_cuda_graphs", "init_cuda_graphs", "gpu_id", "draft_attn_backend"),
        "when the draft's graphs are captured",
    ),
    Symbol(
        _SRT + "utils.get_available_gpu_memory",
        ("device", "gpu_id"),
        "the memory that graphs take, in the log",
    ),
)
