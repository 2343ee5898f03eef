"""Every contact with SGLang 0.5.23: the hooks that TETRIS registers, and the proof that they landed.

`HOOKS` is what the plugin changes in SGLang; `SYMBOLS` is what it relies on without changing it. The contract tests
check both against the installed release. The CPU platform and the GPU path keep lists of their own
(portable_cpu/inventory.py, runtime/cuda/inventory.py), of the same records.
"""

from __future__ import annotations

import multiprocessing
import pkgutil
import sys

import torch

from tetris_sglang.contacts import Hook, Symbol

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
        "tetris_sglang.runtime.requests.refuse.guard_request",
        "BEFORE",
        "400 for requests that cannot be served exactly",
        "a request-validation callback on CustomSpecAlgo",
    ),
    Hook(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager._calculate_spec_decoding_metrics",
        "tetris_sglang.runtime.reports.metrics.add_request_meta_info",
        "AFTER",
        "selected tokens per request in meta_info",
        "cap lengths summed in meta_info",
    ),
    Hook(
        "sglang.srt.managers.scheduler_components.internal_state.SchedulerInternalStateController._add_speculative",
        "tetris_sglang.runtime.reports.metrics.add_internal_state",
        "AFTER",
        "TETRIS counters and phase times in /server_info",
        "an info callback on speculative workers",
    ),
    Hook(
        "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager.update_weights_from_disk",
        "tetris_sglang.runtime.drafts.replacement.update_draft",
        "AROUND",
        "a draft can be replaced while the target stays",
        "a selector in /update_weights_from_disk, as the other weight updates have",
    ),
    Hook(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager._wait_for_model_update_from_disk",
        "tetris_sglang.runtime.drafts.replacement.keep_model_path",
        "AROUND",
        "the served model's name after a draft was replaced",
        "a selector in /update_weights_from_disk, as the other weight updates have",
    ),
    Hook(
        "sglang.srt.mem_cache.allocation_sizing.get_req_to_token_extra_context_len",
        "tetris_sglang.runtime.requests.rows.add_headroom",
        "AROUND",
        "a request's row holds what its last steps reserve",
        "a row as long as get_alloc_reserve_per_decode() asks for, at every page size",
    ),
    Hook(
        "sglang.srt.model_executor.model_runner_components.spec_aux_hidden_state._resolve_eagle_aux_hidden_state",
        "tetris_sglang.runtime.drafts.hooks.choose_block_layers",
        "AFTER",
        "the target's layers whose states a DFlash draft reads",
        "layers named by the registered algorithm",
    ),
    Hook(
        "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner.get_spec_info",
        "tetris_sglang.runtime.cuda.hooks.make_capture_input",
        "AROUND",
        "the target's graphs are captured with a ragged layout",
        "a spec input made by the registered algorithm",
    ),
    Hook(
        "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner._build_ragged_verify_token_buckets",
        "tetris_sglang.runtime.cuda.hooks.make_row_tiers",
        "AROUND",
        "graphs for steps that verify few drafts, or none",
        "token buckets chosen by the registered algorithm",
    ),
    Hook(
        "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner._capture_one_stream",
        "tetris_sglang.runtime.cuda.hooks.capture_row_tiers",
        "AROUND",
        "graphs for steps that verify few drafts, or none",
        "capture by token buckets",
    ),
)


_SRT = "sglang.srt."
_SPEC = _SRT + "speculative."
_FORWARD = _SRT + "model_executor."
_BAG = _SRT + "arg_groups.fields."

SYMBOLS: tuple[Symbol, ...] = (
    # -- registration and arguments
    Symbol(
        _SRT + "plugins.hook_registry.HookRegistry",
        ("register", "_patched"),
        "hooks, and proof that they landed",
    ),
    Symbol(_SRT + "plugins.hook_registry.HookType", ("BEFORE", "AFTER"), "kinds of hooks"),
    Symbol(
        _SPEC + "spec_info.SpeculativeAlgorithm",
        ("create_future_map", "from_string", "register"),
        "the registry",
    ),
    Symbol(
        _SPEC + "spec_info.SpeculativeAlgorithm.register",
        ("name", "supports_overlap", "spec_class"),
        "registers TETRIS",
    ),
    Symbol(
        _SPEC + "spec_registry.CustomSpecAlgo",
        (
            "handle_server_args",
            "is_standalone",
            "supports_grammar_overlap",
            "supports_overlap",
            "supports_ragged_verify",
        ),
        "what SGLang asks of a registered algorithm",
    ),
    Symbol(_SPEC + "spec_registry.get_spec", ("name",), "whether TETRIS is registered"),
    Symbol(_SRT + "arg_groups.overrides.resolving_view", ("server_args",), "arguments while they are resolved"),
    Symbol(
        _SRT + "arg_groups.overrides.declare_resolution",
        ("server_args", "source"),
        "the attention backend where the user chose none",
    ),
    Symbol(
        _SRT + "arg_groups.attention_hook.handle_attention_backend_compatibility",
        ("server_args",),
        "the step before which the attention backend is chosen",
    ),
    Symbol(_SRT + "arg_groups.resolution_hooks.register_resolution_hook", ("name",), "validation before loading"),
    Symbol(
        _SRT + "arg_groups.speculative_hook.handle_speculative_decoding",
        ("server_args",),
        "the step validated",
    ),
    Symbol(_SRT + "entrypoints.engine.Engine", ("server_args_class",), "speculative_tetris_* arguments of Engine"),
    Symbol(_SRT + "runtime_context.get_device", (), "resolved configuration"),
    Symbol(_SRT + "runtime_context.get_parallel", (), "the tensor-parallel ranks, and which replica this is"),
    Symbol(
        _SRT + "managers.tp_worker.TpModelWorker",
        ("random_seed",),
        "the resolved seed, the same on all ranks",
    ),
    Symbol(_SRT + "runtime_context.get_schedule", (), "resolved configuration"),
    Symbol(_SRT + "runtime_context.get_spec", (), "resolved configuration"),
    Symbol(_SRT + "runtime_context.get_observability", (), "resolved configuration"),
    Symbol(_BAG + "device.Device", ("device",), "get_device()"),
    Symbol(_BAG + "schedule.Schedule", ("page_size",), "get_schedule()"),
    Symbol(_BAG + "observability.Observability", ("enable_metrics",), "get_observability()"),
    Symbol(
        _BAG + "spec.Spec",
        (
            "speculative_algorithm",
            "speculative_num_steps",
            "speculative_num_draft_tokens",
        ),
        "get_spec()",
    ),
    # -- requests and results
    Symbol(
        _SRT + "managers.io_struct.GenerateReqInput",
        (
            "sampling_params",
            "lora_path",
            "custom_logit_processor",
            "return_hidden_states",
            "input_embeds",
            "image_data",
            "video_data",
            "audio_data",
            "return_sampling_mask",
        ),
        "requests are refused by these fields",
    ),
    Symbol(
        _SRT + "sampling.sampling_params.SamplingParams",
        (
            "frequency_penalty",
            "presence_penalty",
            "repetition_penalty",
            "beam_width",
            "min_new_tokens",
            "stop_token_ids",
            "custom_params",
        ),
        "requests are refused, stop tokens masked, and options of a request read, by these fields",
    ),
    Symbol(
        _SRT + "managers.tokenizer_manager.TokenizerManager",
        ("preferred_sampling_params",),
        "sampling parameters that requests do not give are validated too",
    ),
    Symbol(
        _SRT + "managers.tokenizer_manager.TokenizerManager._update_model_path_info",
        ("model_path", "load_format"),
        "the served model's name after a draft was replaced",
    ),
    Symbol(
        _SRT + "managers.io_struct.UpdateWeightFromDiskReqInput",
        ("load_format", "manifest", "model_path"),
        "a draft that takes another one's place",
    ),
    Symbol(
        _FORWARD + "model_runner_components.weight_updater.WeightUpdater.update_weights_from_disk",
        ("model_path", "load_format"),
        "a draft that takes another one's place",
    ),
    Symbol(
        _SRT + "entrypoints.openai.protocol.CompletionRequest",
        ("custom_params",),
        "options of a request over the OpenAI API",
    ),
    Symbol(
        _SRT + "entrypoints.openai.protocol.ChatCompletionRequest",
        ("custom_params",),
        "options of a request over the OpenAI API",
    ),
    Symbol(_SRT + "managers.io_struct.BatchStrOutput", ("spec_num_cap_tokens",), "selected tokens of a request"),
    Symbol(
        _SRT + "managers.io_struct.BatchTokenIDOutput",
        ("spec_num_cap_tokens",),
        "selected tokens of a request",
    ),
    Symbol(
        _SRT + "managers.schedule_batch.Req",
        (
            "origin_input_ids",
            "sampling_params",
            "tokenizer",
            "eos_token_ids",
            "get_fill_ids",
            "extend_batch_idx",
            "rid",
            "extra_key",
            "cache_salt",
            "kv",
        ),
        "min_new_tokens per verified row; texts, whose they are and who may read them; prefixes that are drafted again",
    ),
    Symbol(_SRT + "managers.schedule_batch.ReqKvInfo", ("req_pool_idx",), "a request's slot, on the host"),
    Symbol(
        _SRT + "managers.schedule_batch.ScheduleBatch",
        (
            "extend_lens",
            "extend_num_tokens",
            "forward_mode",
            "has_grammar",
            "input_ids",
            "is_extend_in_batch",
            "out_cache_loc",
            "prefix_lens",
            "req_pool_indices",
            "req_pool_indices_cpu",
            "req_to_token_pool",
            "reqs",
            "return_logprob",
            "sampling_info",
            "seq_lens",
            "seq_lens_cpu",
            "seq_lens_sum",
            "spec_info",
        ),
        "the batch of a step",
    ),
    Symbol(
        _SRT + "managers.utils.GenerationBatchResult",
        (
            "logits_output",
            "next_token_ids",
            "speculative_num_draft_tokens",
            "next_draft_input",
            "accept_lens",
            "cap_lens",
            "new_seq_lens",
            "can_run_cuda_graph",
            "routed_experts_output",
            "indexer_topk_output",
            "extra_keep_alive_refs",
            "kv_loc_plan",
        ),
        "the result of a step",
    ),
    # -- forward passes
    Symbol(
        _FORWARD + "forward_batch_info.ForwardBatch.init_new",
        ("batch", "model_runner", "capture_hidden_mode", "return_hidden_states_before_norm", "kv_loc_plan"),
        "every forward pass of draft and target",
    ),
    Symbol(
        _FORWARD + "forward_batch_info.ForwardBatch",
        (
            "extend_seq_lens_cpu",
            "input_ids",
            "mark_forward_metadata_ready",
            "out_cache_loc",
            "positions",
            "return_logprob",
            "seq_lens",
            "seq_lens_cpu",
            "seq_lens_sum",
        ),
        "set between the draft's passes",
    ),
    Symbol(
        _FORWARD + "forward_batch_info.CaptureHiddenMode",
        ("NULL", "LAST", "FULL"),
        "the hidden states that heads read",
    ),
    Symbol(
        _FORWARD + "forward_batch_info.ForwardMode",
        ("DECODE", "DRAFT_EXTEND_V2", "TARGET_VERIFY", "is_extend"),
        "kinds of passes",
    ),
    Symbol(_FORWARD + "forward_context.ForwardContext", ("attn_backend",), "one attention backend per draft pass"),
    Symbol(_FORWARD + "forward_context.forward_context", ("ctx", "forward_batch"), "one backend per draft pass"),
    Symbol(
        _FORWARD + "model_runner.ModelRunner",
        ("attn_backend", "forward", "model", "model_config", "prefill_cuda_graph_runner", "sampler"),
        "both models; the draft's passes call its model",
    ),
    Symbol(_FORWARD + "runner.EagerRunner", (), "a draft's prefill without a graph can end early"),
    Symbol(
        _SRT + "layers.attention.base_attn_backend.AttentionBackend.forward",
        ("q", "k", "v", "layer", "forward_batch", "save_kv_cache", "kwargs"),
        "a draft's prefill ends in the last layer's",
    ),
    Symbol(_FORWARD + "model_runner.ModelRunner.forward", ("forward_batch",), "the draft's prefill"),
    Symbol(
        _SRT + "distributed.parallel_state.GroupCoordinator",
        ("all_gather_object", "broadcast", "cpu_group", "first_rank", "rank_in_group", "world_size"),
        "tensor-parallel ranks do what the first one decides",
    ),
    Symbol(_SRT + "distributed.parallel_state.GroupCoordinator.broadcast", ("input_", "src"), "drafts and draws"),
    Symbol(
        _SRT + "utils.hf_transformers_utils.get_tokenizer",
        ("tokenizer_name", "trust_remote_code", "tokenizer_revision"),
        "a standalone draft's vocabulary; SGLang itself loads no tokenizer for a draft",
    ),
    Symbol(_SRT + "runtime_context.get_model", (), "the draft's own layout of shared experts"),
    Symbol(
        _SRT + "managers.tp_worker.TpModelWorker.forward_batch_generation",
        ("batch", "forward_batch", "is_verify", "capture_hidden_mode", "return_kv_loc_plan"),
        "the target's passes",
    ),
    # -- speculation
    Symbol(
        _SPEC + "base_spec_worker.BaseSpecWorker",
        (
            "draft_worker",
            "target_worker",
            "_draft_worker",
            "_target_worker",
            "clear_cache_pool",
            "note_request_finished",
            "on_verify_complete_cpu",
            "spec_v2_attn_backends",
        ),
        "what SGLang asks of a speculative worker",
    ),
    # -- DFlash drafts
    Symbol(
        _SPEC + "dflash_info.DFlashVerifyInput",
        ("draft_token", "positions", "draft_token_num", "capture_hidden_mode"),
        "a block's pass",
    ),
    Symbol(_SPEC + "dflash_utils.parse_dflash_draft_config", ("draft_hf_config",), "what a DFlash draft's config says"),
    Symbol(
        _SPEC + "dflash_utils.DFlashDraftConfig",
        (
            "block_size",
            "conv_kernel_size",
            "mask_token_id",
            "projector_type",
            "resolve_block_size",
            "resolve_target_layer_ids",
            "selector_rank",
        ),
        "what a DFlash draft's config says",
    ),
    Symbol(
        _SRT + "models.dflash.DFlashDraftModel",
        (
            "decoder_layer_cls",
            "fc",
            "forward",
            "hidden_norm",
            "layers",
            "load_weights",
            "num_context_features",
            "prepare_context_hidden_for_kv",
            "project_target_hidden",
            "supports_fused_context_kv",
        ),
        "the draft; DFlare's is made of it",
    ),
    Symbol(
        _SRT + "models.dflash.DFlashAttention",
        (
            "apply_k_norm",
            "apply_k_rope",
            "attn",
            "head_dim",
            "hidden_size",
            "kv_proj_only",
            "kv_size",
            "num_kv_heads",
            "total_num_kv_heads",
        ),
        "its keys and values of what the target has read",
    ),
    Symbol(_SRT + "models.dflash.DFlashDecoderLayer", ("attention_cls", "self_attn"), "DFlare's layers"),
    Symbol(_SRT + "models.registry._ModelRegistry", ("models",), "where models of ours become known"),
    Symbol(
        _SRT + "models.llama.LlamaForCausalLM",
        ("config", "lm_head", "load_weights", "logits_processor", "model", "quant_config"),
        "a steered draft is one",
    ),
    Symbol(_SRT + "models.llama.LlamaDecoderLayer", ("mlp",), "what steers it enters here"),
    Symbol(_SRT + "layers.linear.ReplicatedLinear", ("bias", "input_size", "output_size"), "what steers a draft"),
    Symbol(
        _SRT + "layers.linear.QKVParallelLinear",
        ("head_size", "hidden_size", "total_num_heads", "total_num_kv_heads"),
        "DFlare's keys and values",
    ),
    Symbol(_SRT + "layers.logits_processor.LogitsProcessor", ("_compute_lm_head",), "the target's output layer"),
    Symbol(_SRT + "distributed.communication_op.tensor_model_parallel_all_gather", ("dim",), "parts of a vocabulary"),
    Symbol(
        _FORWARD + "model_runner_components.spec_aux_hidden_state.SpecAuxHiddenStateConfig",
        ("draft_model_config", "eagle_aux_hidden_state_layer_ids"),
        "the layers whose states it reads",
    ),
    Symbol(
        _SPEC + "standalone_worker_v2.StandaloneDraftWorker",
        (
            "_rebuild_topk1_chain_buffers",
            "draft_attn_backend",
            "draft_runner",
            "parallel_layout",
            "req_to_token_pool",
            "speculative_num_draft_tokens",
            "speculative_num_steps",
            "hot_token_id",
        ),
        "loads the draft model and its attention backends",
    ),
    Symbol(
        _SPEC + "eagle_worker_v2.EagleDraftWorker",
        (
            "_rebuild_topk1_chain_buffers",
            "draft_attn_backend",
            "draft_runner",
            "hot_token_id",
            "parallel_layout",
            "req_to_token_pool",
            "speculative_num_draft_tokens",
            "speculative_num_steps",
        ),
        "loads a head, shares the target's embedding and output layer with it",
    ),
    Symbol(
        _SPEC + "eagle_utils._eagle_prefill_tail_tokens",
        ("batch", "next_token_ids"),
        "the token after each prefilled chunk, for heads",
    ),
    Symbol(
        _SPEC + "eagle_utils.get_draft_input_from_target_hidden_dim",
        ("model_runner",),
        "how many values a head reads per token",
    ),
    Symbol(
        _SRT + "mem_cache.memory_pool.MHATokenToKVPool.move_kv_cache",
        ("tgt_loc", "src_loc"),
        "accepted tree nodes",
    ),
    Symbol(_SRT + "mem_cache.memory_pool.KVWriteLoc.for_batch", ("forward_batch",), "where the last layer of a draft writes"),
    Symbol(
        _SRT + "mem_cache.memory_pool.MHATokenToKVPool.set_kv_buffer",
        ("self", "layer", "loc_info", "cache_k", "cache_v"),
        "what the last layer of a draft writes",
    ),
    Symbol(_SRT + "layers.radix_attention.RadixAttention", ("layer_id",), "which layer of a draft is the last"),
    Symbol(
        _SRT + "mem_cache.memory_pool.MHATokenToKVPool",
        ("data_ptrs", "data_strides", "k_buffer", "kv_cache_layout", "native_k_scale_buffer", "v_buffer"),
        "the same on a GPU",
    ),
    Symbol(
        _SPEC + "eagle_info.EagleDraftInput",
        (
            "hidden_states",
            "topk_p",
            "topk_index",
            "bonus_tokens",
            "num_tokens_per_req",
            "num_tokens_for_logprob_per_req",
            "capture_hidden_mode",
        ),
        "what one step hands to the next",
    ),
    Symbol(
        _SPEC + "eagle_info.EagleDraftExtendInput",
        (
            "hidden_states",
            "num_tokens_per_req",
            "num_tokens_for_logprob_per_req",
            "positions",
            "select_index",
            "capture_hidden_mode",
        ),
        "the draft's passes of several tokens",
    ),
    Symbol(
        _SPEC + "eagle_info.EagleVerifyInput",
        (
            "draft_token",
            "custom_mask",
            "positions",
            "retrieve_index",
            "retrieve_next_token",
            "retrieve_next_sibling",
            "retrieve_cum_len",
            "spec_steps",
            "topk",
            "draft_token_num",
            "capture_hidden_mode",
            "seq_lens_sum",
            "seq_lens_cpu",
        ),
        "the target's ragged pass",
    ),
    Symbol(
        _SPEC + "ragged_verify.RaggedVerifyLayout",
        ("verify_lens", "graph_num_tokens", "extend_start_loc", "qo_indptr_device"),
        "the target's ragged pass",
    ),
    Symbol(_SPEC + "spec_utils.draft_tp_context", ("layout",), "the draft's own tensor-parallel group"),
    Symbol(_SRT + "layers.moe.utils.speculative_moe_backend_context", (), "the draft's own kernels for experts"),
    Symbol(
        _SRT + "layers.moe.utils.speculative_moe_a2a_backend_context",
        (),
        "the draft's own kernels for experts",
    ),
    Symbol(_SRT + "mem_cache.allocation_sizing.get_alloc_page_size", (), "how long a request's row is"),
    Symbol(_SRT + "mem_cache.allocation_sizing.get_alloc_reserve_per_decode", (), "how long a request's row is"),
    Symbol(_SRT + "environ.Envs", ("SGLANG_RUST_SERVER",), "a server without plugins"),
    Symbol(_SRT + "environ.Envs", ("SGLANG_ENABLE_METADATA_GLUE_GRAPH",), "plans that are replayed, not made"),
    Symbol(
        _SRT + "sampling.penaltylib.orchestrator.BatchedPenalizerOrchestrator",
        ("is_required",),
        "whether a running request has a penalty or min_new_tokens",
    ),
    # -- logits and sampling
    Symbol(
        _SRT + "layers.sampler.Sampler.forward",
        (
            "logits_output",
            "sampling_info",
            "return_logprob",
            "top_logprobs_nums",
            "token_ids_logprobs",
            "positions",
        ),
        "draws the target's tokens",
    ),
    Symbol(
        _SRT + "layers.sampler.Sampler._sample_from_probs",
        ("probs", "sampling_info", "positions", "simple_sampling_case"),
        "overridden: draws with the noise that drafts share",
    ),
    Symbol(
        _SRT + "layers.sampler._SamplingMaskCapture",
        ("weights", "token_ids"),
        "what the filters leave of the target's probabilities",
    ),
    Symbol(
        _SRT + "layers.logits_processor.LogitsProcessorOutput",
        ("next_token_logits", "hidden_states"),
        "the target's logits and states",
    ),
    Symbol(
        _SRT + "layers.logprob_processor.compute_spec_logprobs",
        ("batch", "logits_output", "predict", "chain_stride"),
        "output logprobs",
    ),
    Symbol(
        _SRT + "sampling.sampling_batch_info.SamplingBatchInfo",
        (
            "acc_additive_penalties",
            "acc_scaling_penalties",
            "grammars",
            "is_all_greedy",
            "logit_bias",
            "min_ps",
            "penalizer_orchestrator",
            "sampling_mask_batch_indices",
            "sampling_seed",
            "temperatures",
            "top_ks",
            "top_ps",
        ),
        "sampling parameters, repeated for every verified row",
    ),
    Symbol(_SRT + "mem_cache.kv_loc_plan.IdSpaceKind", ("FULL",), "KV indices for FlashInfer"),
    Symbol(
        _SRT + "speculative.ragged_verify.round_up_grid",
        ("total", "grid"),
        "the tier of a ragged target pass",
    ),
    Symbol(
        _SPEC + "spec_utils.build_grammar_vocab_mask",
        ("reqs", "tree", "sampling_info", "device", "barrier"),
        "grammar masks over the drafted chains",
    ),
    Symbol(
        _SPEC + "spec_utils.GrammarTree",
        ("from_device", "from_linear_chain"),
        "grammar masks over the drafts",
    ),
    Symbol(
        _SRT + "constrained.base_grammar_backend.GrammarMask",
        ("vocab_mask", "apply", "_replace"),
        "grammar masks cut down to the verified rows",
    ),
    Symbol(
        _SRT + "sampling.penaltylib.min_new_tokens.BatchedMinNewTokensPenalizer",
        (),
        "defines which stop tokens min_new_tokens forbids (runtime/logits.py does the same)",
    ),
)

_SCHEDULER = "sglang.srt.managers.scheduler_components."
_GRAPH_RUNNER = "sglang.srt.model_executor.runner."
_TOKENIZER = "sglang.srt.managers.tokenizer_manager."
_POOLS = "sglang.srt.mem_cache."
_MODEL_RUNNER = "sglang.srt.model_executor.model_runner_components."


def _belongs_here(hook: Hook) -> bool:
    """Whether this process may call the hooked function; hooking it elsewhere would import half of SGLang."""
    if hook.target.startswith((_SCHEDULER, _POOLS, _MODEL_RUNNER)):
        return "sglang.srt.managers.scheduler" in sys.modules
    if hook.target.startswith(_GRAPH_RUNNER):
        return "sglang.srt.managers.scheduler" in sys.modules and torch.cuda.is_available()
    if hook.target.startswith(_TOKENIZER):
        return multiprocessing.parent_process() is None or _TOKENIZER.rstrip(".") in sys.modules
    return True


# The hooks that this process needs, as decided when the plugin was loaded; more of SGLang may be imported later.
_needed: list[Hook] = []


def register_hooks() -> None:
    """Register every hook that this process needs with SGLang's hook registry."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    _needed[:] = filter(_belongs_here, HOOKS)
    for hook in _needed:
        HookRegistry.register(hook.target, pkgutil.resolve_name(hook.hook), HookType[hook.kind])
    if any(hook.target.startswith(_GRAPH_RUNNER) for hook in _needed):
        from tetris_sglang.runtime.cuda import hooks

        hooks.register_attention_backend()


def verify_landed() -> None:
    """Assert that TETRIS's registration and every hook of this process took effect.

    SGLang logs a plugin's exceptions and goes on, so nobody else would notice.

    Raises:
        RuntimeError: naming what did not land.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry
    from sglang.srt.speculative.spec_registry import get_spec

    from tetris_sglang import portable_cpu

    missing = [hook.target for hook in _needed if hook.target not in HookRegistry._patched]
    if not _needed:
        missing.append("the registration of its hooks")
    if get_spec("TETRIS") is None:
        missing.append("the registration of TETRIS")
    if missing:
        raise RuntimeError(
            f"TETRIS cannot start: {', '.join(missing)} did not take effect in SGLang. The log above says why; "
            f"`tetris-sglang check` lists what this SGLang release offers."
        )
    if any(hook.target.startswith(_GRAPH_RUNNER) for hook in _needed):
        from tetris_sglang.runtime.cuda import hooks

        hooks.verify_landed()
    # The CPU platform's own hooks are nearly all the scheduler's.
    if portable_cpu.is_active() and any(hook.target.startswith(_SCHEDULER) for hook in _needed):
        portable_cpu.verify_landed()
