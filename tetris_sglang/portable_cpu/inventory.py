"""Every upstream symbol that the portable CPU platform hooks or relies on, as of SGLang 0.5.23.

`hooks.register` applies the hooks listed here, `hooks.verify_landed` checks that they took effect, and
`tests/portable_cpu/test_inventory.py` checks that each symbol still has the parameters relied on.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Seam:
    """One contact with upstream.

    Attributes:
        target: dotted name of the upstream symbol.
        parameters: names relied on: of a hooked function all its parameters in order, of a called one those
            passed, of a class the attributes read.
        kind: how it is used. "replace" and "around" go through SGLang's HookRegistry; "fill" assigns to a
            name that upstream leaves None on a CPU (the registry cannot hook None).
        why: what goes wrong without it, or what it is used for.
        hook: "module:function" of ours that takes its place.
        scope: "server" where every process needs it, "scheduler" for the process that runs the model.
        until: the upstream change that makes it unnecessary.
        like: where to look for the parameters of a "fill": upstream's version for another device.
    """

    target: str
    parameters: tuple[str, ...]
    kind: Literal["replace", "around", "fill", "call", "read"]
    why: str
    hook: str | None = None
    scope: Literal["server", "scheduler"] = "scheduler"
    until: str = "this platform is"
    like: str | None = None


OURS = "tetris_sglang.portable_cpu"

SEAMS = (
    Seam(
        target="sglang.srt.arg_groups.resolution_hooks.register_resolution_hook",
        parameters=("name",),
        kind="call",
        scope="server",
        why="Defaults for a machine without an accelerator (steps handle_cpu_backends and handle_cuda_graph_config).",
        until="upstream's CPU defaults need no sgl_kernel",
    ),
    Seam(
        target="sglang.srt.layers.attention.attention_registry.register_attention_backend",
        parameters=("name",),
        kind="call",
        why="torch_native cannot verify trees or ragged lengths and loops over requests.",
        until="an in-tree CPU attention backend without sgl_kernel honours masks and ragged lengths",
    ),
    Seam(
        target="sglang.srt.speculative.draft_utils.DraftBackendFactory._create_backend",
        parameters=("self", "backend_name", "backend_map", "error_template", "stamps_children"),
        kind="around",
        hook=f"{OURS}.hooks:create_draft_backend",
        why="The factory's map of draft attention backends is closed.",
        until="the factory reads a registry",
    ),
    Seam(
        target="sglang.kernels.ops.speculative.gather_spec_extras.gather_spec_extras",
        parameters=("indices", "topk_p_buf", "topk_index_buf", "output_tokens_buf", "hidden_states_buf"),
        kind="replace",
        hook=f"{OURS}.operators:gather_spec_extras",
        why="A Triton kernel without a CPU branch on the path of overlapped speculation.",
        until="upstream gives it a CPU branch",
    ),
    Seam(
        target="sglang.srt.mem_cache.allocation.get_last_loc",
        parameters=("req_to_token", "req_pool_indices_tensor", "prefix_lens_tensor"),
        kind="replace",
        hook=f"{OURS}.operators:get_last_loc",
        why="With --page-size above 1 speculation calls a Triton kernel, but for the backend torch_native.",
        until="upstream asks the platform instead of the backend's name",
    ),
    Seam(
        target="sglang.srt.speculative.eagle_utils._verify_uses_greedy",
        parameters=("is_all_greedy", "is_cpu", "is_hip", "is_xpu", "use_rejection_sampling"),
        kind="around",
        hook=f"{OURS}.sampling:verify_by_request",
        why="On a CPU upstream verifies sampled requests greedily without saying so.",
        until="upstream has a CPU sampler for verification",
    ),
    Seam(
        target="sglang.srt.speculative.eagle_utils.top_k_renorm_prob",
        parameters=("probs", "top_k"),
        kind="fill",
        hook=f"{OURS}.sampling:top_k_renorm_prob",
        like="sglang.kernels.ops.sampling.renorm_triton.top_k_renorm_probs_triton",
        why="None on a CPU; sampled verification calls it.",
        until="upstream has a CPU sampler for verification",
    ),
    Seam(
        target="sglang.srt.speculative.eagle_utils.top_p_renorm_prob",
        parameters=("probs", "top_p"),
        kind="fill",
        hook=f"{OURS}.sampling:top_p_renorm_prob",
        like="sglang.kernels.ops.sampling.renorm_triton.top_p_renorm_probs_triton",
        why="None on a CPU; sampled verification calls it.",
        until="upstream has a CPU sampler for verification",
    ),
    Seam(
        target="sglang.srt.speculative.eagle_utils.tree_speculative_sampling_target_only",
        parameters=(
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
        kind="fill",
        hook=f"{OURS}.sampling:tree_speculative_sampling_target_only",
        like="sglang.kernels.ops.speculative.sampling.tree_speculative_sampling_target_only",
        why="None on a CPU; sampled verification calls it.",
        until="upstream has a CPU sampler for verification",
    ),
    Seam(
        target="sglang.srt.layers.quantization.unquant.UnquantizedLinearMethod.apply",
        parameters=("self", "layer", "x", "bias"),
        kind="around",
        hook=f"{OURS}.linear:apply",
        why="torch rearranges a weight in every call, which for a verified batch costs as much as the product.",
        until="upstream packs weights on CPUs without AMX",
    ),
    *(
        Seam(
            target=f"sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater.{method}",
            parameters=parameters,
            kind="around",
            hook=f"{OURS}.linear:forget_packed",
            why="Packed weights must follow an update of the weights.",
            until="upstream packs weights on CPUs without AMX",
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
    Seam(
        target="sglang.srt.platforms._is_cpu_available",
        parameters=(),
        kind="read",
        scope="server",
        why="SGLANG_USE_CPU_ENGINE=1 makes SGLang choose its own CPU platform.",
    ),
    Seam(
        target="sglang.srt.arg_groups.overrides.declare_resolution",
        parameters=("server_args", "source"),
        kind="call",
        scope="server",
        why="Declares the defaults.",
    ),
    Seam(
        target="sglang.srt.arg_groups.overrides.resolving_view",
        parameters=("server_args",),
        kind="call",
        scope="server",
        why="Reads what the user typed.",
    ),
    Seam(
        target="sglang.srt.arg_groups.overrides.model_config_of",
        parameters=("server_args",),
        kind="call",
        scope="server",
        why="Sizes the default KV cache.",
    ),
    Seam(
        target="sglang.srt.configs.model_config.ModelConfig.get_num_kv_heads",
        parameters=("self", "tensor_parallel_size"),
        kind="call",
        scope="server",
        why="Sizes the default KV cache.",
    ),
    Seam(
        target="sglang.srt.layers.attention.base_attn_backend.AttentionBackend.forward",
        parameters=("self", "q", "k", "v", "layer", "forward_batch", "save_kv_cache", "kwargs"),
        kind="call",
        why="Dispatches to forward_extend and forward_decode of the backend here.",
    ),
    Seam(
        target="sglang.srt.mem_cache.memory_pool.KVWriteLoc",
        parameters=("loc", "swa_loc"),
        kind="call",
        why="Says where a pass writes its keys and values.",
    ),
    Seam(
        target="sglang.srt.mem_cache.memory_pool.MHATokenToKVPool.set_kv_buffer",
        parameters=("self", "layer", "loc_info", "cache_k", "cache_v"),
        kind="call",
        why="Writes a pass's keys and values.",
    ),
    Seam(
        target="sglang.srt.mem_cache.memory_pool.MHATokenToKVPool.get_key_buffer",
        parameters=("self", "layer_id"),
        kind="call",
        why="Reads the cache; [slots, heads, head_dim].",
    ),
    Seam(
        target="sglang.srt.model_executor.forward_batch_info.ForwardBatch",
        parameters=(
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
        kind="read",
        why="Describes the pass that the backend plans.",
    ),
    Seam(
        target="sglang.srt.speculative.eagle_info.EagleVerifyInput",
        parameters=("draft_token_num", "custom_mask", "tree_topk"),
        kind="read",
        why="Describes a verification.",
    ),
    Seam(
        target="sglang.srt.speculative.ragged_verify.RaggedVerifyLayout",
        parameters=("verify_lens",),
        kind="read",
        why="Describes a ragged verification.",
    ),
)
