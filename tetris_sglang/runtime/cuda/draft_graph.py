"""The draft's whole chain as one CUDA graph per batch size.

Upstream captures the draft's single-token passes and its extend pass separately. TETRIS's first pass takes two tokens per
request and needs no hidden states, so everything from the last committed tokens to the drafts' probabilities is one graph.
It always drafts the full depth.
"""

from __future__ import annotations

import logging
import time

import torch
from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, check_cuda_graph_backend
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.speculative.eagle_draft_cuda_graph_runner import EAGLEDraftCudaGraphRunner
from sglang.srt.speculative.eagle_info import EagleDraftInput
from sglang.srt.utils import get_available_gpu_memory
from torch import Tensor

from tetris_sglang.runtime.draft import DraftChains, make_two_token_input

logger = logging.getLogger(__name__)


def capture_chains(draft_worker) -> ChainGraphs | None:
    """Capture for every batch size that SGLang captures; None where decode graphs are switched off."""
    if check_cuda_graph_backend(Phase.DECODE, Backend.DISABLED):
        return None
    started_at, before = (
        time.perf_counter(),
        get_available_gpu_memory(draft_worker.device, draft_worker.gpu_id),
    )
    graphs = ChainGraphs(draft_worker)
    after = get_available_gpu_memory(draft_worker.device, draft_worker.gpu_id)
    logger.info(
        "TETRIS: captured %d draft chains in %.1f s, %.2f GiB",
        len(graphs.capture_bs),
        time.perf_counter() - started_at,
        before - after,
    )
    return graphs


class ChainGraphs(EAGLEDraftCudaGraphRunner):
    """Upstream's capture loop, buffers and backend around `TetrisDraftWorker.run_chain`."""

    def __init__(self, draft_worker) -> None:
        self._draft_worker = draft_worker
        self._batches: dict[int, tuple[ForwardBatch, ForwardBatch]] = {}
        """The captured batches by size: the two-token pass and the others. They view the static buffers."""
        super().__init__(draft_worker)

    def can_run(self, batch_size: int) -> bool:
        return batch_size <= self.max_bs

    # -- capture ---------------------------------------------------------------------------------------------------

    def capture(self) -> None:
        with torch.device(self.device):
            self._last_and_bonus = torch.zeros((self.max_bs, 2), dtype=torch.int64)
            # The draft's KV lengths while it drafts: the bonus token counts.
            self._draft_lens = torch.zeros(self.max_bs, dtype=torch.int64)
        self._draft_lens_cpu = torch.zeros(self.max_bs, dtype=torch.int64)
        self._fill(self.max_bs, 0)
        self._two_token_backend.init_cuda_graph_state(self.max_bs, 2 * self.max_bs)
        super().capture()

    @property
    def _two_token_backend(self):
        return self._draft_worker.draft_runner.attn_backend

    def capture_one_shape(self, size: int, forward, *_, **__) -> None:
        first, rest = self._batches[size] = self._make_batches(size)
        self._plan(first, rest, in_capture=True)
        buffers = self.buffers

        def run_once() -> tuple[Tensor, Tensor]:
            positions, slots = self._draft_worker.locate(
                buffers.seq_lens[:size], buffers.req_pool_indices[:size], self.speculative_num_steps
            )
            chains = self._draft_worker.run_chain(
                first,
                rest,
                self._last_and_bonus[:size],
                positions,
                slots,
                self.temperatures[:size],
                self.speculative_num_steps,
                self._forward,
            )
            return tuple(chains)

        with forward_context(ForwardContext(attn_backend=self.draft_attn_backend), forward_batch=rest):
            self.backend.capture_one(
                self._make_graph_key(size), run_once, capture_inputs=None, post_warmup_hook=None
            )

    def _forward(self, forward_batch: ForwardBatch, backend) -> Tensor:
        with forward_context(ForwardContext(attn_backend=backend), forward_batch=forward_batch):
            backend.init_forward_metadata_in_graph(forward_batch)
            output = self.model_runner.model.forward(
                forward_batch.input_ids, forward_batch.positions, forward_batch
            )
        return output.next_token_logits

    def _make_batches(self, size: int) -> tuple[ForwardBatch, ForwardBatch]:
        buffers, device = self.buffers, self.device
        shared = {
            "batch_size": size,
            "input_ids": None,
            "req_pool_indices": buffers.req_pool_indices[:size],
            "seq_lens": self._draft_lens[:size],
            "seq_lens_cpu": self._draft_lens_cpu[:size],
            "seq_lens_sum": int(self._draft_lens_cpu[:size].sum()),
            "return_logprob": False,
            "spec_algorithm": self.model_runner.spec_algorithm,
            "capture_hidden_mode": CaptureHiddenMode.NULL,
        }
        positions = torch.zeros(2 * size, dtype=torch.int64, device=device)
        first = ForwardBatch(
            forward_mode=ForwardMode.DRAFT_EXTEND_V2,
            out_cache_loc=torch.zeros(2 * size, dtype=torch.int64, device=device),
            positions=positions,
            extend_seq_lens=torch.full((size,), 2, dtype=torch.int32, device=device),
            extend_seq_lens_cpu=[2] * size,
            spec_info=make_two_token_input(positions, size),
            **shared,
        )
        rest = ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            out_cache_loc=torch.zeros(
                size * (self.speculative_num_steps - 1), dtype=torch.int64, device=device
            ),
            # FlashInfer's planner reads the lengths from here.
            positions=self._draft_lens[:size],
            spec_info=EagleDraftInput(
                num_tokens_per_req=1,
                num_tokens_for_logprob_per_req=1,
                capture_hidden_mode=CaptureHiddenMode.NULL,
            ),
            **shared,
        )
        for batch in (first, rest):
            self.model_runner.kv_index_translator.bind_runner_slots(batch)
        return first, rest

    def _plan(self, first: ForwardBatch, rest: ForwardBatch, in_capture: bool = False) -> None:
        self._two_token_backend.init_forward_metadata_out_graph(first, in_capture=in_capture)
        self.draft_attn_backend.init_forward_metadata_out_graph(rest, in_capture=in_capture)
        for batch in (first, rest):
            batch.mark_forward_metadata_ready()

    # -- replay ----------------------------------------------------------------------------------------------------

    def replay(
        self,
        last_and_bonus: Tensor,
        seq_lens: Tensor,
        seq_lens_cpu: Tensor | None,
        req_pool_indices: Tensor,
        temperatures: Tensor,
    ) -> DraftChains:
        """Draft with the graph of the next captured batch size.

        Args:
            last_and_bonus: [batch, 2]. seq_lens: [batch], tokens with target KV, and the same on the host if it has it
                (some attention backends do without).
            req_pool_indices: [batch]. temperatures: [batch, 1].
        Returns:
            Views of the graph's output, valid until the next replay.
        """
        batch_size = seq_lens.shape[0]
        size = self._pad_to_bucket(batch_size, self.capture_bs)
        if size != batch_size:
            self._fill(size, batch_size)
        self._last_and_bonus[:batch_size] = last_and_bonus
        self.buffers.seq_lens[:batch_size] = seq_lens
        self._draft_lens[:batch_size] = seq_lens + 1
        self.buffers.req_pool_indices[:batch_size] = req_pool_indices
        self.temperatures[:batch_size] = temperatures
        first, rest = self._batches[size]
        if seq_lens_cpu is not None:
            self._draft_lens_cpu[:batch_size] = seq_lens_cpu + 1
        for planned in (first, rest):
            planned.seq_lens_cpu = None if seq_lens_cpu is None else self._draft_lens_cpu[:size]
            planned.seq_lens_sum = None if seq_lens_cpu is None else int(self._draft_lens_cpu[:size].sum())
        rest.positions = self._draft_lens[:size]
        self._plan(first, rest)
        tokens, probs = self._replay_graph(self._make_graph_key(size), rest)
        return DraftChains(tokens[:batch_size], probs[:batch_size])

    def _fill(self, size: int, start: int) -> None:
        """Let the slots from `start` on be harmless: request row 0, whose KV slots are all the padding slot 0."""
        self._last_and_bonus[start:size] = 0
        self.buffers.seq_lens[start:size] = 1
        self._draft_lens[start:size] = 2
        self._draft_lens_cpu[start:size] = 2
        self.buffers.req_pool_indices[start:size] = 0
        self.temperatures[start:size] = 1
