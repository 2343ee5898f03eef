"""Drafting a block in one pass: DFlash (arXiv:2602.06036; sglang/srt/models/dflash.py has the model).

The draft reads the bonus token and a mask token for each place behind it, and every one of these rows sees all of them. Of the
text before it has keys and values, which are not its own layers' but projections of the target's states. The embedding and the
output layer are the target's.

What is drafted at a place does not depend on what is drafted before it, so behind a runner-up the block goes on as behind the
likeliest token: the nodes are the block's most likely prefixes (`drafting.propose_block`). Sampled requests draft with the
noise that the target will draw with, place by place, where SGLang's own DFLASH drafts the likeliest tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from sglang.srt.distributed.communication_op import tensor_model_parallel_all_gather
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.runtime_context import get_parallel
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang.srt.speculative.dflash_utils import parse_dflash_draft_config
from torch import Tensor

from tetris_sglang.acceptance import RequestNoise
from tetris_sglang.drafting import ChainGrower, Proposal, propose_block
from tetris_sglang.runtime.drafts.kv import DraftKV
from tetris_sglang.runtime.drafts.passes import DraftPasses, Places
from tetris_sglang.runtime.drafts.spec import DraftSpec
from tetris_sglang.runtime.drafts.windows import Window, narrow_window
from tetris_sglang.runtime.request_texts import RequestTexts
from tetris_sglang.texts import Calibrate, Match

_CHILDREN = 4
"""Tokens offered at each place of a tree."""


def make_block_input(positions: Tensor) -> DFlashVerifyInput:
    """The spec input of a block at `positions` [batch, width]; no mask: the model's attention looks both ways."""
    return DFlashVerifyInput(
        draft_token=None,
        positions=positions.reshape(-1),
        draft_token_num=positions.shape[1],
        capture_hidden_mode=CaptureHiddenMode.NULL,
    )


def _block_positions(places: Places) -> Tensor:
    """[batch, width] int64."""
    slots = places.next_slots
    return places.next_positions[:, None] + torch.arange(slots.shape[1], device=slots.device)


class BlockPasses(DraftPasses):
    """Plans and runs a block's pass.

    Args:
        worker, spec, estimate, perturb, texts: as `DraftPasses`.
        target_runner: whose embedding and output layer are the draft's, too.
    """

    def __init__(
        self,
        worker,
        target_runner,
        spec: DraftSpec,
        estimate: Calibrate,
        perturb: Callable[..., Tensor],
        texts: RequestTexts | None,
    ) -> None:
        super().__init__(worker, spec, estimate, perturb, texts, target_runner.model_config.vocab_size)
        target = target_runner.model
        self._embed, self._lm_head, self._logits = target.get_input_embeddings(), target.lm_head, target.logits_processor
        self._mask_token = parse_dflash_draft_config(draft_hf_config=self.runner.model_config.hf_config).mask_token_id

    @property
    def depths(self) -> Sequence[int]:
        """A block is drafted whole, as the draft was trained: a narrower one costs as much where passes are bound by memory."""
        return (self.spec.num_steps,)

    def locate(self, window: Window, seq_lens: Tensor, req_pool_indices: Tensor, depth: int) -> Places:
        """Where a step writes: the window, and [batch, depth + 1] slots of the block, which begins at the bonus token."""
        return super().locate(window, seq_lens, req_pool_indices, depth + 2)

    def propose(self, batch, window: Window, noise: RequestNoise | None, depth: int) -> Proposal:
        """See `DraftPasses.propose`: writes the window's keys and values, then runs the block."""
        if self.runner.device == "cpu":
            window = narrow_window(window)
        rows = batch.req_pool_indices
        places = self.locate(window, batch.seq_lens, rows, depth)
        block = self._plan(batch, places)
        return self.run_block(block, window, places, noise, self.find_match(rows, depth), self.forward_block)

    def run_block(
        self,
        block: ForwardBatch,
        window: Window,
        places: Places,
        noise: RequestNoise | None,
        match: Match | None,
        forward: Callable[[ForwardBatch, Tensor], Tensor],
    ) -> Proposal:
        """A step over a planned batch; the same code eagerly and while a graph is captured.

        Args:
            noise: [batch], of the target's draws; None: all requests are greedy.
            forward: (block, embeds [rows, hidden_size]) -> [rows, hidden_size], after the last norm.
        """
        self.write(window.hidden_states.flatten(0, 1), places.window_positions.flatten(), places.window_slots.flatten())
        width = places.next_slots.shape[1]
        positions = _block_positions(places)
        block.positions, block.out_cache_loc = positions.reshape(-1), places.next_slots.reshape(-1)
        tokens = torch.nn.functional.pad(window.tokens[:, -1:], (0, width - 1), value=self._mask_token)
        hidden = forward(block, self._embed(tokens.reshape(-1))).unflatten(0, positions.shape)
        # Drawn with after the token before.
        return self._draft(hidden[:, 1:], positions[:, :-1], noise, match)

    def _draft(self, hidden: Tensor, positions: Tensor, noise: RequestNoise | None, match: Match | None) -> Proposal:
        """Args: hidden: [batch, depth, hidden_size], of the drafts' places; positions: [batch, depth], before them."""
        batch_size, depth = positions.shape
        if noise is not None:
            noise = RequestNoise(noise.seeds.repeat_interleave(depth), noise.scales.repeat_interleave(depth))
        num_choices = 1 if self.spec.num_children == 1 else _CHILDREN
        logits = self._compute_logits(hidden.flatten(0, 1))
        tokens, probs, _ = self._choose(logits, noise, positions.reshape(-1), num_choices)
        tokens, probs = (part.view(batch_size, depth, num_choices) for part in (tokens, probs))
        if num_choices > 1:
            return propose_block(tokens, probs, self.spec.count_nodes(depth), self._estimate, match)
        grower = ChainGrower(tokens[:, 0], probs[:, 0], self._estimate, match)
        for level in range(1, depth):
            grower.grow(tokens[:, level], probs[:, level])
        return grower.finish(depth)

    def write(self, states: Tensor, positions: Tensor, slots: Tensor) -> None:
        """Write the draft's keys and values of committed tokens.

        Args:
            states: [rows, state_size], the target's at these tokens. positions, slots: [rows] int64; slot 0 is for rows that
                are not real.
        """
        model, pool = self.runner.model, self.runner.token_to_kv_pool
        context = model.project_target_hidden(states)
        for layer in model.layers:
            attention = layer.self_attn
            keys, values = attention.kv_proj_only(model.prepare_context_hidden_for_kv(layer, context))
            keys = attention.apply_k_rope(positions, attention.apply_k_norm(keys))
            keys, values = (part.view(-1, attention.num_kv_heads, attention.head_dim) for part in (keys, values))
            cache = attention.attn
            pool.set_kv_buffer(cache, KVWriteLoc(slots, None), keys, values, cache.k_scale, cache.v_scale)

    def _plan(self, batch, places: Places) -> ForwardBatch:
        batch.forward_mode = ForwardMode.TARGET_VERIFY
        batch.input_ids, batch.out_cache_loc = None, places.next_slots.reshape(-1)
        batch.spec_info = make_block_input(_block_positions(places))
        forward_batch = ForwardBatch.init_new(
            batch, self.runner, capture_hidden_mode=CaptureHiddenMode.NULL, return_hidden_states_before_norm=False
        )
        forward_batch.return_logprob = False
        self.runner.attn_backend.init_forward_metadata(forward_batch)
        forward_batch.mark_forward_metadata_ready()
        return forward_batch

    def forward_block(self, block: ForwardBatch, embeds: Tensor) -> Tensor:
        """See `run_block`."""
        with forward_context(ForwardContext(attn_backend=self.runner.attn_backend), forward_batch=block):
            return self.runner.model.forward(None, block.positions, block, input_embeds=embeds).hidden_states

    def _compute_logits(self, hidden: Tensor) -> Tensor:
        """[rows, vocab]."""
        logits = self._logits._compute_lm_head(hidden, self._lm_head)
        if get_parallel().tp_size > 1:
            logits = tensor_model_parallel_all_gather(logits, dim=-1)
        return logits[:, : self._vocab_size]


class BlockKV(DraftKV):
    """Projections of the target's states, of whichever tokens."""

    _has_attention = False

    def prefill(self, batch, forward_batch) -> None:
        """See `DraftKV.prefill`."""
        self._passes.write(forward_batch.spec_info.hidden_states, forward_batch.positions, forward_batch.out_cache_loc)
        self.missed.forget(batch)

    def _write(self, batch, missed: Window, ends: Tensor, ends_cpu: Tensor | None) -> None:
        num_missed = missed.tokens.shape[1]
        offsets = torch.arange(-num_missed, 0, device=ends.device)
        positions = (ends[:, None] + offsets).clamp_(min=0)
        slots = self._table[batch.req_pool_indices[:, None], positions]
        slots = torch.where(offsets >= -missed.counts[:, None], slots, 0).to(torch.int64)
        self._passes.write(missed.hidden_states.flatten(0, 1), positions.flatten(), slots.flatten())
