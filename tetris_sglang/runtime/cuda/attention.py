"""SGLang's FlashInfer attention with ragged verification under CUDA graphs, which upstream refuses."""

from __future__ import annotations

import torch
from sglang.srt.layers.attention.flashinfer_backend import FlashInferAttnBackend, PrefillMetadata
from sglang.srt.mem_cache.kv_loc_plan import IdSpaceKind
from sglang.srt.runtime_context import get_spec
from torch import Tensor

from tetris_sglang.config import TetrisConfig
from tetris_sglang.runtime.cuda.verify_plan import VerifyPlan
from tetris_sglang.runtime.drafts.spec import count_children


class TetrisFlashInferBackend(FlashInferAttnBackend):
    """The target's backend. Everything but a captured ragged verify pass is upstream's.

    Without a graph the pass is planned by upstream from the lengths in `TetrisVerifyInput`.
    """

    def __init__(self, model_runner, config: TetrisConfig, **options) -> None:
        super().__init__(model_runner, **options)
        if self.dispatch_reason is not None or self.prefill_backend != "fa2":
            raise ValueError(
                f"--attention-backend flashinfer: TETRIS verifies with FlashInfer's fa2 kernels over full attention, this "
                f"model or device uses {self.dispatch_reason or self.prefill_backend}. Use --attention-backend fa3."
            )
        self.supports_ragged_verify_graph = config.verify_plan != "eager"
        self._on_device = config.verify_plan == "device"
        self._verify_plans: dict[int, VerifyPlan] = {}
        """By token tier."""
        self._width = get_spec().speculative_num_draft_tokens
        self._drafts_combs = count_children(get_spec().speculative_num_steps, self._width) > 1
        self._packed_mask: Tensor | None = None
        """Shared by all tiers: one pass runs at a time."""

    def init_forward_metadata_out_graph(self, forward_batch, in_capture: bool = False) -> None:
        spec_info = forward_batch.spec_info
        layout = None if spec_info is None else spec_info.ragged_verify_layout
        if layout is None or not forward_batch.forward_mode.is_target_verify():
            super().init_forward_metadata_out_graph(forward_batch, in_capture)
            return
        tier = layout.graph_num_tokens
        if in_capture:
            plan = self._verify_plans[tier] = self._make_plan(forward_batch.batch_size, tier)
        else:
            plan = self._verify_plans[tier]
        plan.set_lengths(layout.verify_lens, forward_batch.seq_lens)
        if self._drafts_combs:
            mask = spec_info.custom_mask
            if mask is None:  # in capture
                mask = torch.zeros(0, dtype=torch.bool, device=self.workspace_buffer.device)
            plan.set_trees(mask.view(-1, self._width, self._width))
        self.kv_index_translator.pack_read_stream(
            forward_batch.kv_loc_plan,
            # The plan's last slot reads as all padding does.
            req_pool_indices=torch.nn.functional.pad(forward_batch.req_pool_indices, (0, 1)),
            seq_lens=plan.kv_lens,
            indptr=plan.kv_indptr,
            out=self.cuda_graph_kv_indices[0],
            kind=IdSpaceKind.FULL,
            num_token_blocks=None,
            kv_lens_sum=None if forward_batch.seq_lens_sum is None else forward_batch.seq_lens_sum + tier,
        )
        if in_capture:
            plan.capture()
            self.forward_metadata = PrefillMetadata([plan.wrapper], use_ragged=False, extend_no_prefix=False)
        else:
            plan.replan()

    def _make_plan(self, num_requests: int, num_rows: int) -> VerifyPlan:
        updater = self.indices_updater_prefill
        return VerifyPlan(
            self.workspace_buffer,
            self.cuda_graph_kv_indices[0],
            num_requests=num_requests,
            num_rows=num_rows,
            num_qo_heads=updater.num_qo_heads,
            num_kv_heads=updater.num_kv_heads,
            head_dim=updater.head_dim,
            q_dtype=updater.q_data_type,
            kv_dtype=updater.data_type,
            on_device=self._on_device,
            packed_mask=self._mask_buffer(num_requests, num_rows) if self._drafts_combs else None,
        )

    def _mask_buffer(self, num_requests: int, num_rows: int) -> Tensor:
        """One bit for every row and key of the longest requests. Upstream captures the largest tier first."""
        num_bytes = num_rows * (self.max_context_len + self._width) // 8 + num_requests + 1
        if self._packed_mask is None or self._packed_mask.shape[0] < num_bytes:
            self._packed_mask = torch.zeros(num_bytes, dtype=torch.uint8, device=self.workspace_buffer.device)
        return self._packed_mask
