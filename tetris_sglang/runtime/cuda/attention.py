"""SGLang's FlashInfer attention with ragged verification under CUDA graphs, which upstream refuses."""

from __future__ import annotations

import torch
from sglang.srt.layers.attention.flashinfer_backend import FlashInferAttnBackend, PrefillMetadata
from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, check_cuda_graph_backend
from sglang.srt.runtime_context import get_spec
from torch import Tensor

from tetris_sglang.config import TetrisConfig
from tetris_sglang.runtime.cuda.pass_plan import PassPlan, make_plan
from tetris_sglang.runtime.drafts.spec import count_children


class TetrisFlashInferBackend(FlashInferAttnBackend):
    """The target's backend. Everything but a captured ragged verify pass is upstream's.

    Without a graph the pass is planned by upstream from the lengths in `TetrisVerifyInput`.
    """

    plans_eager_passes_on_host = True

    def __init__(self, model_runner, config: TetrisConfig, **options) -> None:
        super().__init__(model_runner, **options)
        if self.dispatch_reason is not None or self.prefill_backend != "fa2":
            raise ValueError(
                f"--attention-backend flashinfer: TETRIS verifies with FlashInfer's fa2 kernels over full attention, this "
                f"model or device uses {self.dispatch_reason or self.prefill_backend}. Use --attention-backend fa3."
            )
        self.supports_ragged_verify_graph = config.verify_plan != "eager"
        self._on_device = config.verify_plan == "device" and not check_cuda_graph_backend(Phase.DECODE, Backend.DISABLED)
        self._verify_plans: dict[int, PassPlan] = {}
        """By token tier."""
        self._max_depth, self._width = get_spec().speculative_num_steps, get_spec().speculative_num_draft_tokens
        self._drafts_combs = count_children(self._max_depth, self._width) > 1
        self._packed_mask: Tensor | None = None
        """Shared by all tiers: one pass runs at a time."""
        self._parents: Tensor | None = None
        """[requests, width] int64, of the trees last verified. Graphs read it."""

    @property
    def needs_cpu_seq_lens(self) -> bool:
        """Whether SGLang has to wait for the lengths of the step before; an eager pass reads them itself."""
        return not self._on_device

    def init_forward_metadata_out_graph(self, forward_batch, in_capture: bool = False) -> None:
        if not _is_ragged(forward_batch):
            super().init_forward_metadata_out_graph(forward_batch, in_capture)
            return
        spec_info = forward_batch.spec_info
        tier = spec_info.ragged_verify_layout.graph_num_tokens
        if in_capture:
            self._verify_plans[tier] = self._make_plan(forward_batch.batch_size, tier)
        plan = self._verify_plans[tier]
        if spec_info.parents is not None:
            self._parents[: len(spec_info.parents)] = spec_info.parents
        if in_capture:
            self._lay_out(plan, forward_batch)
            plan.capture()
            self.forward_metadata = PrefillMetadata([plan.wrapper], use_ragged=False, extend_no_prefix=False)
        elif not plan.on_device:
            self._lay_out(plan, forward_batch)
            plan.replan()

    def init_forward_metadata_in_graph(self, forward_batch) -> None:
        super().init_forward_metadata_in_graph(forward_batch)
        if _is_ragged(forward_batch):
            plan = self._verify_plans[forward_batch.spec_info.ragged_verify_layout.graph_num_tokens]
            if plan.on_device:
                self._lay_out(plan, forward_batch)
                plan.replan()

    def _lay_out(self, plan: PassPlan, forward_batch) -> None:
        """The lengths, masks and KV indices of a pass."""
        plan.set_lengths(forward_batch.spec_info.ragged_verify_layout.verify_lens, forward_batch.seq_lens)
        if self._drafts_combs:
            plan.set_trees(self._parents[: forward_batch.batch_size], self._max_depth)
        kv_lens_sum = None
        if not plan.on_device and forward_batch.seq_lens_sum is not None:
            kv_lens_sum = forward_batch.seq_lens_sum + plan.num_rows
        plan.pack_indices(self.kv_index_translator, forward_batch, kv_lens_sum)

    def _make_plan(self, num_requests: int, num_rows: int) -> PassPlan:
        if self._drafts_combs and self._parents is None:
            # Upstream captures the largest tier first. Chains, to begin with.
            chain = torch.arange(-1, self._width - 1, device=self.workspace_buffer.device).clamp_(min=0)
            self._parents = chain.repeat(num_requests, 1)
        return make_plan(
            self,
            self.cuda_graph_kv_indices[0],
            num_requests,
            num_rows,
            on_device=self._on_device,
            packed_mask=self._mask_buffer(num_requests, num_rows) if self._drafts_combs else None,
        )

    def _mask_buffer(self, num_requests: int, num_rows: int) -> Tensor:
        """One bit for every row and key of the longest requests. Upstream captures the largest tier first."""
        num_bytes = num_rows * (self.max_context_len + self._width) // 8 + num_requests + 1
        if self._packed_mask is None or self._packed_mask.shape[0] < num_bytes:
            self._packed_mask = torch.zeros(num_bytes, dtype=torch.uint8, device=self.workspace_buffer.device)
        return self._packed_mask


def _is_ragged(forward_batch) -> bool:
    spec_info = forward_batch.spec_info
    return (
        forward_batch.forward_mode.is_target_verify() and spec_info is not None and spec_info.ragged_verify_layout is not None
    )
