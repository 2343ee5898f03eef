"""Every upstream symbol that the portable CPU platform hooks or relies on, as of SGLang 0.5.23.

`hooks.register` applies `HOOKS`, `hooks.verify_landed` checks that they took effect, and
`tests/portable_cpu/test_inventory.py` checks that every target and symbol still has the parameters relied on.
"""

from tetris_sglang.contacts import Hook, Symbol

OURS = "tetris_sglang.portable_cpu"

HOOKS: tuple[Hook, ...] = (
    Hook(
        "sglang.srt.speculative.draft_utils.DraftBackendFactory._create_backend",
        f"{OURS}.hooks.create_draft_backend",
        "AROUND",
        "The factory's map of draft attention backends is closed.",
        "the factory reads a registry",
        ("self", "backend_name", "backend_map", "error_template", "stamps_children"),
    ),
    Hook(
        "sglang.kernels.ops.speculative.gather_spec_extras.gather_spec_extras",
        f"{OURS}.operators.gather_spec_extras",
        "REPLACE",
        "A Triton kernel without a CPU branch on the path of overlapped speculation.",
        "upstream gives it a CPU branch",
        ("indices", "topk_p_buf", "topk_index_buf", "output_tokens_buf", "hidden_states_buf"),
    ),
    Hook(
        "sglang.kernels.ops.attention.table_qk_norm_rope.table_qk_norm_rope_",
        f"{OURS}.operators.table_qk_norm_rope_",
        "REPLACE",
        "A Triton kernel without a CPU branch in DFlash drafts in bfloat16.",
        "upstream gives it a CPU branch",
        (
            "qkv",
            "positions",
            "q_weight",
            "k_weight",
            "cos_sin_cache",
            "num_q_heads",
            "num_k_heads",
            "head_dim",
            "eps",
        ),
    ),
    Hook(
        "sglang.srt.mem_cache.allocation.get_last_loc",
        f"{OURS}.operators.get_last_loc",
        "REPLACE",
        "With --page-size above 1 speculation calls a Triton kernel, but for the backend torch_native.",
        "upstream asks the platform instead of the backend's name",
        ("req_to_token", "req_pool_indices_tensor", "prefix_lens_tensor"),
    ),
    Hook(
        "sglang.srt.speculative.eagle_utils._verify_uses_greedy",
        f"{OURS}.sampling.verify_by_request",
        "AROUND",
        "On a CPU upstream verifies sampled requests greedily without saying so.",
        "upstream has a CPU sampler for verification",
        ("is_all_greedy", "is_cpu", "is_hip", "is_xpu", "use_rejection_sampling"),
    ),
    Hook(
        "sglang.srt.speculative.eagle_utils.top_k_renorm_prob",
        f"{OURS}.sampling.top_k_renorm_prob",
        "FILL",
        "None on a CPU; sampled verification calls it.",
        "upstream has a CPU sampler for verification",
        ("probs", "top_k"),
        like="sglang.kernels.ops.sampling.renorm_triton.top_k_renorm_probs_triton",
    ),
    Hook(
        "sglang.srt.speculative.eagle_utils.top_p_renorm_prob",
        f"{OURS}.sampling.top_p_renorm_prob",
        "FILL",
        "None on a CPU; sampled verification calls it.",
        "upstream has a CPU sampler for verification",
        ("probs", "top_p"),
        like="sglang.kernels.ops.sampling.renorm_triton.top_p_renorm_probs_triton",
    ),
    Hook(
        "sglang.srt.speculative.eagle_utils.tree_speculative_sampling_target_only",
        f"{OURS}.sampling.tree_speculative_sampling_target_only",
        "FILL",
        "None on a CPU; sampled verification calls it.",
        "upstream has a CPU sampler for verification",
        (
            "predicts",
            "accept_index",
            "accept_token_num",
            "candidates",
            "retrive_index",
            "retrive_next_token",
            "retrive_next_sibling",
            "uniform_samples",
            "uniform_samples_for_final_sampling",
            "target_probs",
            "draft_probs",
            "threshold_single",
            "threshold_acc",
            "deterministic",
        ),
        like="sglang.kernels.ops.speculative.sampling.tree_speculative_sampling_target_only",
    ),
    Hook(
        "sglang.srt.layers.quantization.unquant.UnquantizedLinearMethod.apply",
        f"{OURS}.linear.apply",
        "AROUND",
        "torch rearranges a weight in every call, which costs as much as the product of a verified batch.",
        "upstream packs weights on CPUs without AMX",
        ("self", "layer", "x", "bias"),
    ),
    Hook(
        "sglang.srt.layers.logits_processor.LogitsProcessor._compute_lm_head",
        f"{OURS}.linear.compute_lm_head",
        "AROUND",
        "As for other weights: two verified rows would take twice as long as one.",
        "upstream packs weights on CPUs without AMX",
        ("self", "hidden_states", "lm_head", "embedding_bias", "out"),
    ),
    *(
        Hook(
            f"sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater.{method}",
            f"{OURS}.linear.forget_packed",
            "AROUND",
            "Packed weights must follow an update of the weights.",
            "upstream packs weights on CPUs without AMX",
            parameters,
        )
        for method, parameters in (
            (
                "update_weights_from_disk",
                ("self", "model_path", "load_format", "weight_name_filter", "recapture_cuda_graph"),
            ),
            ("load_weights_from_distributed", ("self", "named_tensors")),
            ("update_weights_from_tensor", ("self", "named_tensors", "load_format")),
            ("update_weights_from_ipc", ("self", "recv_req")),
        )
    ),
)

SYMBOLS: tuple[Symbol, ...] = (
    Symbol(
        "sglang.srt.arg_groups.resolution_hooks.register_resolution_hook",
        ("name",),
        "defaults without an accelerator (steps handle_cpu_backends and handle_cuda_graph_config)",
    ),
    Symbol(
        "sglang.srt.layers.attention.attention_registry.register_attention_backend",
        ("name",),
        "torch_native cannot verify trees or ragged lengths and loops over requests.",
    ),
    Symbol("sglang.srt.platforms._is_cpu_available", (), "SGLANG_USE_CPU_ENGINE=1 makes SGLang choose its own CPU platform"),
    Symbol("sglang.srt.arg_groups.overrides.declare_resolution", ("server_args", "source"), "Declares the defaults."),
    Symbol("sglang.srt.arg_groups.overrides.resolving_view", ("server_args",), "Reads what the user typed."),
    Symbol("sglang.srt.arg_groups.overrides.model_config_of", ("server_args",), "Sizes the default KV cache."),
    Symbol(
        "sglang.srt.configs.model_config.ModelConfig.get_num_kv_heads",
        ("self", "tensor_parallel_size"),
        "Sizes the default KV cache.",
    ),
    Symbol(
        "sglang.srt.layers.attention.base_attn_backend.AttentionBackend.forward",
        ("self", "q", "k", "v", "layer", "forward_batch", "save_kv_cache", "kwargs"),
        "Dispatches to forward_extend and forward_decode of the backend here.",
    ),
    Symbol("sglang.srt.mem_cache.memory_pool.KVWriteLoc", ("loc", "swa_loc"), "Says where a pass writes its keys and values."),
    Symbol(
        "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool.set_kv_buffer",
        ("self", "layer", "loc_info", "cache_k", "cache_v"),
        "Writes a pass's keys and values.",
    ),
    Symbol(
        "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool.get_key_buffer",
        ("self", "layer_id"),
        "Reads the cache; [slots, heads, head_dim].",
    ),
    Symbol(
        "sglang.srt.model_executor.forward_batch_info.ForwardBatch",
        (
            "forward_mode",
            "batch_size",
            "input_ids",
            "req_pool_indices",
            "seq_lens",
            "seq_lens_cpu",
            "extend_seq_lens",
            "extend_seq_lens_cpu",
            "extend_prefix_lens_cpu",
            "out_cache_loc",
            "spec_info",
        ),
        "Describes the pass that the backend plans.",
    ),
    Symbol(
        "sglang.srt.speculative.eagle_info.EagleVerifyInput",
        ("draft_token_num", "custom_mask", "tree_topk"),
        "Describes a verification.",
    ),
    Symbol("sglang.srt.speculative.ragged_verify.RaggedVerifyLayout", ("verify_lens",), "Describes a ragged verification."),
)
