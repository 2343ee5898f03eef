"""Every upstream symbol that the portable CPU platform hooks or relies on, as of SGLang 0.5.23.

`hooks.register` applies the hooks listed here, `hooks.verify_landed` checks that they took effect, and
`tests/contract/test_cpu_seams.py` checks that each symbol still has the parameters relied on.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Seam:
    """One contact with upstream.

    Attributes:
        target: dotted name of the upstream symbol.
        parameters: its parameter names, all of them, in order.
        kind: how it is used. "replace" and "around" go through SGLang's HookRegistry; "fill" assigns to a name
            that upstream leaves None on a CPU (the registry cannot hook None); "call" only calls or extends it.
        hook: "module:function" of ours that takes its place; None for "call".
        scope: "server" where every process needs it, "scheduler" for the process that runs the model.
        why: what goes wrong without it.
        until: the upstream change that makes it unnecessary.
    """

    target: str
    parameters: tuple[str, ...]
    kind: Literal["replace", "around", "fill", "call"]
    hook: str | None
    scope: Literal["server", "scheduler"]
    why: str
    until: str


OURS = "tetris_sglang.runtime.cpu"

SEAMS = (
    Seam(
        target="sglang.srt.arg_groups.speculative_hook._disable_overlap_schedule_for_cpu",
        parameters=("server_args",),
        kind="replace",
        hook=f"{OURS}.defaults:keep_overlap_schedule",
        scope="server",
        why="Upstream switches the overlap scheduler off for speculation on a CPU; with the operators here it works.",
        until="upstream supports the overlap scheduler for speculation on CPUs",
    ),
    Seam(
        target="sglang.srt.arg_groups.resolution_hooks.register_resolution_hook",
        parameters=("name",),
        kind="call",
        hook=None,
        scope="server",
        why="Defaults for a machine without an accelerator (step handle_cpu_backends).",
        until="upstream's CPU defaults need no sgl_kernel",
    ),
    Seam(
        target="sglang.srt.layers.attention.attention_registry.register_attention_backend",
        parameters=("name",),
        kind="call",
        hook=None,
        scope="scheduler",
        why="torch_native cannot verify trees or ragged lengths and loops over requests.",
        until="an in-tree CPU attention backend without sgl_kernel honours masks and ragged lengths",
    ),
    Seam(
        target="sglang.srt.speculative.draft_utils.DraftBackendFactory._create_backend",
        parameters=("self", "backend_name", "backend_map", "error_template", "stamps_children"),
        kind="around",
        hook=f"{OURS}.hooks:create_draft_backend",
        scope="scheduler",
        why="The factory's map of draft attention backends is closed.",
        until="the factory reads a registry",
    ),
    Seam(
        target="sglang.kernels.ops.speculative.gather_spec_extras.gather_spec_extras",
        parameters=("indices", "topk_p_buf", "topk_index_buf", "output_tokens_buf", "hidden_states_buf"),
        kind="replace",
        hook=f"{OURS}.operators:gather_spec_extras",
        scope="scheduler",
        why="A Triton kernel without a CPU branch on the path of overlapped speculation.",
        until="upstream gives it a CPU branch",
    ),
    Seam(
        target="sglang.srt.speculative.eagle_utils._verify_uses_greedy",
        parameters=("is_all_greedy", "is_cpu", "is_hip", "is_xpu", "use_rejection_sampling"),
        kind="around",
        hook=f"{OURS}.sampling:verify_by_request",
        scope="scheduler",
        why="On a CPU upstream verifies sampled requests greedily without saying so.",
        until="upstream has a CPU sampler for verification",
    ),
    Seam(
        target="sglang.srt.speculative.eagle_utils.top_k_renorm_prob",
        parameters=("probs", "top_k"),
        kind="fill",
        hook=f"{OURS}.sampling:top_k_renorm_prob",
        scope="scheduler",
        why="None on a CPU; sampled verification calls it.",
        until="upstream has a CPU sampler for verification",
    ),
    Seam(
        target="sglang.srt.speculative.eagle_utils.top_p_renorm_prob",
        parameters=("probs", "top_p"),
        kind="fill",
        hook=f"{OURS}.sampling:top_p_renorm_prob",
        scope="scheduler",
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
        scope="scheduler",
        why="None on a CPU; sampled verification calls it.",
        until="upstream has a CPU sampler for verification",
    ),
)
