"""All of the draft's passes of a step as one CUDA graph per batch size and depth.

Upstream captures the draft's single-token passes and its extend pass separately. TETRIS's first pass comes before the others
in the same step, so everything from the window of new tokens to the proposal is one graph. Of the depths the full one is
captured, and what halving it gives: a step drafts less where that pays.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.speculative.eagle_draft_cuda_graph_runner import EAGLEDraftCudaGraphRunner
from sglang.srt.speculative.eagle_info import EagleDraftInput
from sglang.srt.utils import get_available_gpu_memory
from torch import Tensor

from tetris_sglang.acceptance import RequestNoise
from tetris_sglang.capacity import measure_curves
from tetris_sglang.drafting import Proposal, TreeShape
from tetris_sglang.runtime.cuda.draft_attention import DraftAttention, plans_on_device
from tetris_sglang.runtime.drafts.dflash import BlockPasses, make_block_input
from tetris_sglang.runtime.drafts.passes import DraftPasses
from tetris_sglang.runtime.drafts.windows import Window, make_window_input

logger = logging.getLogger(__name__)


def capture_drafts(passes: DraftPasses, states: Tensor | None, shares: Sequence[float] | None) -> DraftGraphs:
    """Capture for every batch size that SGLang captures.

    Args:
        states: [slots, window_width, size], the target's states that go with the windows of the requests in these slots.
        shares: as in `Draft.capture`.
    """
    worker = passes.worker
    started_at, before = time.perf_counter(), get_available_gpu_memory(worker.device, worker.gpu_id)
    graphs = (BlockGraphs if isinstance(passes, BlockPasses) else DraftGraphs)(passes, states, shares)
    after = get_available_gpu_memory(worker.device, worker.gpu_id)
    logger.info(
        "TETRIS: captured drafts of %s batch sizes to the depths %s in %.1f s, %.2f GiB",
        len(graphs.capture_bs),
        graphs.depths,
        time.perf_counter() - started_at,
        before - after,
    )
    return graphs


def captured_depths(num_steps: int) -> list[int]:
    """Ascending: num_steps, half of it, half of that, rounded up, down to 1. Each is a graph per batch size.

    Example: 6 -> [1, 2, 3, 6]
    """
    depths = [num_steps]
    while depths[-1] > 1:
        depths.append((depths[-1] + 1) // 2)
    return depths[::-1]


class DraftGraphs(EAGLEDraftCudaGraphRunner):
    """Upstream's capture loop, buffers and backend around `DraftPasses.run`."""

    def __init__(
        self,
        passes: DraftPasses,
        states: Tensor | None,
        shares: Sequence[float] | None,
        depths: Sequence[int] | None = None,
    ) -> None:
        self._passes, self._spec, self._states = passes, passes.spec, states
        self._shares = None if shares is None else torch.tensor(shares, dtype=torch.float32, device=passes.runner.device)
        self._width = passes.spec.window_width
        self.depths = depths or captured_depths(passes.spec.num_steps)
        self._batches: dict[int, tuple[ForwardBatch, ForwardBatch]] = {}
        """The captured batches by size: the window's pass and the others (of a block: itself). They view the static buffers."""
        self._parts: tuple[str, ...] = ()
        """Of a proposal, in the order of a graph's outputs."""
        self._outputs: dict[tuple[int, int], list[Tensor]] = {}
        """Where the graphs of a batch size and a depth leave their proposals. Not in the memory that SGLang's graphs share: the
        target's would overwrite them."""
        self._all_greedy = True
        self._attention: dict[int, DraftAttention] = {}
        """By batch size, where the graphs plan their attention."""
        self.plans_on_device = self._can_plan_on_device()
        super().__init__(passes.worker)

    def _can_plan_on_device(self) -> bool:
        target = self._passes.worker.target_worker.model_runner
        return plans_on_device(target.attn_backend, self._passes.runner.attn_backend)

    def can_run(self, batch_size: int) -> bool:
        return batch_size <= self.max_bs

    # -- capture ---------------------------------------------------------------------------------------------------

    def capture(self) -> None:
        with torch.device(self.device):
            self._tokens = torch.zeros((self.max_bs, self._width), dtype=torch.int64)
            self._counts = torch.zeros(self.max_bs, dtype=torch.int64)
            # The draft's KV lengths while it drafts: the window counts.
            self._draft_lens = torch.zeros(self.max_bs, dtype=torch.int64)
            # Scales of 0: greedily.
            self._seeds = torch.zeros(self.max_bs, dtype=torch.int64)
            self._scales = torch.zeros(self.max_bs, dtype=torch.float32)
        self._draft_lens_cpu = torch.zeros(self.max_bs, dtype=torch.int64)
        self._fill(self.max_bs, 0)
        self._window_backend.init_cuda_graph_state(self.max_bs, self._width * self.max_bs)
        super().capture()

    @property
    def _window_backend(self):
        return self._passes.runner.attn_backend

    def capture_one_shape(self, size: int, forward, *_, **__) -> None:
        first, rest = self._batches[size] = self._make_batches(size)
        # Once for all depths: every graph reads, or rewrites, the same plan.
        if self.plans_on_device:
            self._attention[size] = DraftAttention(self._window_backend, size, self._width)
            self._attention[size].capture(first)
            first.mark_forward_metadata_ready()
            rest.mark_forward_metadata_ready()
        else:
            self._plan(first, rest, in_capture=True)
        for depth in reversed(self.depths):
            with forward_context(ForwardContext(attn_backend=self.draft_attn_backend), forward_batch=rest):
                self.backend.capture_one(
                    self._key(size, depth),
                    self._make_run(size, depth, first, rest),
                    capture_inputs=None,
                    post_warmup_hook=None,
                )

    def _key(self, size: int, depth: int):
        return self._make_graph_key(size, variant_label=f"depth {depth}")

    def _make_run(self, size: int, depth: int, first: ForwardBatch, rest: ForwardBatch) -> Callable[[], list[Tensor]]:
        """What is captured: the parts of the proposal that there are, those of its shape last."""
        buffers = self.buffers

        def run_once() -> list[Tensor]:
            rows, seq_lens = buffers.req_pool_indices[:size], buffers.seq_lens[:size]
            self._set_draft_lens(size)
            window = self._window(size)
            noise = RequestNoise(self._seeds[:size], self._scales[:size])
            places = self._passes.locate(window, seq_lens, rows, depth)
            match = self._passes.find_match(rows, depth)
            # Each pass replaces the states that the others read.
            first.spec_info.hidden_states = None if window.hidden_states is None else window.hidden_states.flatten(0, 1)
            proposal = self._passes.run(first, rest, window, places, noise, match, depth, self._forward)
            return self._keep(proposal, size, depth)

        return run_once

    def _keep(self, proposal: Proposal, size: int, depth: int) -> list[Tensor]:
        parts = {name: part for name, part in proposal._asdict().items() if part is not None and name != "shape"}
        self._parts = tuple(parts)
        made = [*parts.values(), *(proposal.shape or ())]
        if self._shares is not None:
            # No request is in row 0 (`_fill`).
            is_real = self.buffers.req_pool_indices[:size] > 0
            made.append(measure_curves(proposal.survival, proposal.depths, depth, self._shares, is_real))
        if (size, depth) not in self._outputs:  # SGLang runs what it captures twice before
            self._outputs[size, depth] = [torch.empty_like(each, memory_format=torch.contiguous_format) for each in made]
        for kept, each in zip(self._outputs[size, depth], made, strict=True):
            kept.copy_(each)
        return self._outputs[size, depth]

    def _set_draft_lens(self, size: int) -> None:
        torch.add(self.buffers.seq_lens[:size], 1 - self._spec.shift, out=self._draft_lens[:size])

    def _forward(self, forward_batch: ForwardBatch, backend):
        if self.plans_on_device:
            is_window = backend is self._window_backend
            number = 0 if is_window else 1 + self.draft_attn_backend.attn_backends.index(backend)
            backend = self._attention[forward_batch.batch_size].plan(number, forward_batch)
            return self._passes.forward(forward_batch, backend)
        with forward_context(ForwardContext(attn_backend=backend), forward_batch=forward_batch):
            backend.init_forward_metadata_in_graph(forward_batch)
        return self._passes.forward(forward_batch, backend)

    def _window(self, size: int) -> Window:
        counts = None if self._spec.keeps_kv else self._counts[:size]
        states = None if self._states is None else self._states[self.buffers.req_pool_indices[:size]]
        return Window(self._tokens[:size], counts, states)

    def _make_batches(self, size: int) -> tuple[ForwardBatch, ForwardBatch]:
        buffers, device, width = self.buffers, self.device, self._width
        shared = {
            "batch_size": size,
            "input_ids": None,
            "req_pool_indices": buffers.req_pool_indices[:size],
            "seq_lens": self._draft_lens[:size],
            "seq_lens_cpu": self._draft_lens_cpu[:size],
            "seq_lens_sum": int(self._draft_lens_cpu[:size].sum()),
            "return_logprob": False,
            "spec_algorithm": self.model_runner.spec_algorithm,
            "capture_hidden_mode": self._spec.hidden_mode,
        }
        positions = torch.zeros(width * size, dtype=torch.int64, device=device)
        first = ForwardBatch(
            forward_mode=ForwardMode.DRAFT_EXTEND_V2,
            out_cache_loc=torch.zeros(width * size, dtype=torch.int64, device=device),
            positions=positions,
            extend_seq_lens=torch.full((size,), width, dtype=torch.int32, device=device),
            extend_seq_lens_cpu=[width] * size,
            spec_info=make_window_input(self._window(size), positions),
            **shared,
        )
        rest = ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            out_cache_loc=torch.zeros(size * (self.speculative_num_steps - 1), dtype=torch.int64, device=device),
            # FlashInfer's planner reads the lengths from here.
            positions=self._draft_lens[:size],
            spec_info=EagleDraftInput(
                num_tokens_per_req=1,
                num_tokens_for_logprob_per_req=1,
                capture_hidden_mode=self._spec.hidden_mode,
            ),
            **shared,
        )
        for batch in (first, rest):
            self.model_runner.kv_index_translator.bind_runner_slots(batch)
        return first, rest

    def _plan(self, first: ForwardBatch, rest: ForwardBatch | None, in_capture: bool = False) -> None:
        """`rest` None: there is no pass but the window's."""
        self._window_backend.init_forward_metadata_out_graph(first, in_capture=in_capture)
        first.mark_forward_metadata_ready()
        if rest is not None:
            self.draft_attn_backend.init_forward_metadata_out_graph(rest, in_capture=in_capture)
            rest.mark_forward_metadata_ready()

    # -- replay ----------------------------------------------------------------------------------------------------

    def replay(
        self,
        window: Window,
        seq_lens: Tensor,
        seq_lens_cpu: Tensor | None,
        req_pool_indices: Tensor,
        noise: RequestNoise | None,
        depth: int,
    ) -> Proposal:
        """Draft with the graph of the next captured batch size.

        Args:
            seq_lens: [batch], tokens with target KV, and the same on the host where attention is planned there.
            req_pool_indices: [batch]. noise: [batch]; None: all requests are greedy.
            depth: one of `depths`.
        Returns:
            Overwritten by the next one of this size and depth.
        """
        batch_size = seq_lens.shape[0]
        size = self._pad_to_bucket(batch_size, self.capture_bs)
        if size != batch_size:
            self._fill(size, batch_size)
        static = [self._tokens, self.buffers.seq_lens, self.buffers.req_pool_indices]
        values = [window.tokens, seq_lens, req_pool_indices]
        if not self._spec.keeps_kv:
            static.append(self._counts)
            values.append(window.counts)
        if noise is not None:
            static.append(self._seeds)
            values.append(noise.seeds)
            self._scales[:batch_size] = noise.scales
        elif not self._all_greedy:
            self._scales.zero_()
        self._all_greedy = noise is None
        # Of one type: one launch.
        torch._foreach_copy_([each[:batch_size] for each in static], values)
        first, rest = self._batches[size]
        if not self.plans_on_device:
            self._set_draft_lens(size)
            self._plan_from_host(first, rest if depth > 1 else None, seq_lens_cpu, size)
        outputs = self._replay_graph(self._key(size, depth), rest)
        curves = None
        if self._shares is not None:
            *outputs, curves = outputs
        outputs = [output[:batch_size] for output in outputs]
        parts, shape = outputs[: len(self._parts)], outputs[len(self._parts) :]
        return Proposal(**dict(zip(self._parts, parts, strict=True)), shape=TreeShape(*shape) if shape else None, curves=curves)

    def _plan_from_host(self, first: ForwardBatch, rest: ForwardBatch | None, seq_lens_cpu: Tensor | None, size: int) -> None:
        """`seq_lens_cpu` as in `replay`."""
        if seq_lens_cpu is not None:
            self._draft_lens_cpu[: len(seq_lens_cpu)] = seq_lens_cpu + 1 - self._spec.shift
        for planned in filter(None, (first, rest)):
            planned.seq_lens_cpu = None if seq_lens_cpu is None else self._draft_lens_cpu[:size]
            planned.seq_lens_sum = None if seq_lens_cpu is None else int(self._draft_lens_cpu[:size].sum())
        if rest is not None:
            # FlashInfer's planner reads the lengths from here; the passes put their positions there.
            rest.positions = self._draft_lens[:size]
        self._plan(first, rest)

    def _fill(self, size: int, start: int) -> None:
        """Let the slots from `start` on be harmless: request row 0, whose KV slots are all the padding slot 0."""
        self._tokens[start:size] = 0
        self._counts[start:size] = 1
        self.buffers.seq_lens[start:size] = self._width
        self._draft_lens[start:size] = self._width + 1 - self._spec.shift
        self._draft_lens_cpu[start:size] = self._width + 1 - self._spec.shift
        self.buffers.req_pool_indices[start:size] = 0
        self._scales[start:size] = 0


class BlockGraphs(DraftGraphs):
    """A DFlash draft's block, of one depth: its keys and values, its pass and what is made of it."""

    _passes: BlockPasses

    def __init__(self, passes: BlockPasses, states: Tensor, shares: Sequence[float] | None) -> None:
        super().__init__(passes, states, shares, passes.depths)

    def _can_plan_on_device(self) -> bool:
        return False

    def _make_batches(self, size: int) -> tuple[ForwardBatch, ForwardBatch]:
        buffers, device, rows = self.buffers, self.device, self._width * size
        block = ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=size,
            input_ids=torch.zeros(rows, dtype=torch.int64, device=device),
            req_pool_indices=buffers.req_pool_indices[:size],
            seq_lens=buffers.seq_lens[:size],
            seq_lens_cpu=self._draft_lens_cpu[:size],
            seq_lens_sum=int(self._draft_lens_cpu[:size].sum()),
            out_cache_loc=torch.zeros(rows, dtype=torch.int64, device=device),
            positions=torch.zeros(rows, dtype=torch.int64, device=device),
            return_logprob=False,
            spec_algorithm=self.model_runner.spec_algorithm,
            spec_info=make_block_input(torch.zeros((size, self._width), dtype=torch.int64, device=device)),
            capture_hidden_mode=CaptureHiddenMode.NULL,
        )
        self.model_runner.kv_index_translator.bind_runner_slots(block)
        return block, block

    def _plan(self, first: ForwardBatch, rest: ForwardBatch | None, in_capture: bool = False) -> None:
        if not in_capture and first.seq_lens_cpu is not None:
            # Where there are no masks SGLang plans this pass from the host's lengths, which count the block.
            first.seq_lens_cpu = first.seq_lens_cpu + self._width
        super()._plan(first, None, in_capture)

    def _make_run(self, size: int, depth: int, first: ForwardBatch, rest: ForwardBatch) -> Callable[[], list[Tensor]]:
        def run_once() -> list[Tensor]:
            self._set_draft_lens(size)
            window, rows = self._window(size), self.buffers.req_pool_indices[:size]
            noise = RequestNoise(self._seeds[:size], self._scales[:size])
            places = self._passes.locate(window, self.buffers.seq_lens[:size], rows, depth)
            match = self._passes.find_match(rows, depth)
            proposal = self._passes.run_block(first, window, places, noise, match, self._forward_block)
            return self._keep(proposal, size, depth)

        return run_once

    def _forward_block(self, block: ForwardBatch, embeds: Tensor) -> Tensor:
        backend = self._window_backend
        with forward_context(ForwardContext(attn_backend=backend), forward_batch=block):
            backend.init_forward_metadata_in_graph(block)
        return self._passes.forward_block(block, embeds)
