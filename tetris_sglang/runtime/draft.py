"""Drafting chains with a standalone model.

Differs from upstream's STANDALONE (sglang/srt/speculative/standalone_worker_v2.py) in two ways:

- The draft sees the whole prompt at the target's own positions. Upstream feeds it the EAGLE shift, that is the prompt
  without its first token.
- There is no draft-extend pass. Drafting has already written the draft KV of every accepted token but the deepest one,
  so the first pass of each step takes two tokens per request: the last committed token (rewritten with the same value,
  or written for the first time if all drafts were accepted) and the bonus token. D drafts cost D passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.speculative.eagle_info import EagleDraftExtendInput, EagleDraftInput
from sglang.srt.speculative.standalone_worker_v2 import StandaloneDraftWorker
from torch import Tensor


class DraftChains(NamedTuple):
    tokens: Tensor
    """[batch, depth] int64, the draft's most likely continuation."""
    probs: Tensor
    """[batch, depth] float32, the draft's probability of each token given the ones before it."""


def make_draft_input(last_tokens: Tensor, bonus_tokens: Tensor) -> EagleDraftInput:
    """What one step hands to the next one, in the fields that SGLang's relay carries between iterations.

    Args:
        last_tokens: [batch] the last token with target KV, at position seq_lens - 1. Travels as `topk_index`.
        bonus_tokens: [batch] the token after it, without KV.
    """
    last_tokens = last_tokens.to(torch.int64).unsqueeze(1)
    return EagleDraftInput(
        topk_p=torch.ones_like(last_tokens, dtype=torch.float32),
        topk_index=last_tokens,
        bonus_tokens=bonus_tokens,
        num_tokens_per_req=1,
        num_tokens_for_logprob_per_req=1,
        capture_hidden_mode=CaptureHiddenMode.NULL,
    )


def make_two_token_input(positions: Tensor, batch_size: int) -> EagleDraftExtendInput:
    """The spec input of the pass over [last, bonus]; logits are wanted after the bonus token only.

    Args:
        positions: [2 * batch_size], request after request.
    """
    counts = torch.full((batch_size,), 2, dtype=torch.int32, device=positions.device)
    return EagleDraftExtendInput(
        num_tokens_per_req=2,
        num_tokens_for_logprob_per_req=1,
        positions=positions,
        num_correct_drafts=counts,
        num_accept_tokens=counts,
        select_index=torch.arange(1, 2 * batch_size, 2, device=positions.device),
        capture_hidden_mode=CaptureHiddenMode.NULL,
    )


class TetrisDraftWorker(StandaloneDraftWorker):
    """Owns the draft model, its KV pool (slots shared with the target) and its attention backends."""

    chain_graphs = None
    """The captured chains (runtime/cuda/draft_graph.py), on CUDA."""

    def prefill(self, batch, kv_loc_plan) -> None:
        """Run the draft over the same tokens that the target has just prefilled.

        Args:
            batch: the extend ScheduleBatch, input_ids still those of the target's pass.
            kv_loc_plan: the target pass's plan; the draft writes the same slots.
        """
        batch.spec_info = EagleDraftExtendInput(num_tokens_per_req=1, num_tokens_for_logprob_per_req=1)
        forward_batch = ForwardBatch.init_new(
            batch,
            self.draft_runner,
            capture_hidden_mode=CaptureHiddenMode.NULL,
            return_hidden_states_before_norm=False,
            kv_loc_plan=kv_loc_plan,
        )
        forward_batch.return_logprob = False
        self.draft_runner.forward(forward_batch)

    def _capture_cuda_graphs(self) -> None:
        """Called by SGLang when pools and backends are ready: one graph for the whole chain, not upstream's two."""
        self.cuda_graph_runner = self.cuda_graph_runner_for_draft_extend = None
        if self.device != "cuda" or self.speculative_num_steps < 2:
            return
        from tetris_sglang.runtime.cuda.draft_graph import capture_chains

        self.chain_graphs = capture_chains(self)

    def draft_chains(self, batch, depth: int) -> DraftChains:
        """Draft `depth` tokens for every request: one pass of two tokens, then depth - 1 of one.

        Args:
            batch: the decode ScheduleBatch inside SGLang's forward isolation, which undoes what is set here;
                batch.spec_info from `make_draft_input`, batch.seq_lens [batch] = tokens with target KV.
            depth: 1..num_steps.
        """
        draft_input, seq_lens = batch.spec_info, batch.seq_lens
        last_and_bonus = torch.stack(
            (draft_input.topk_index[:, 0], draft_input.bonus_tokens.to(torch.int64)), dim=1
        )
        temperatures = batch.sampling_info.temperatures
        if self.chain_graphs is not None and self.chain_graphs.can_run(len(batch.reqs)):
            chains = self.chain_graphs.replay(
                last_and_bonus, seq_lens, batch.seq_lens_cpu, batch.req_pool_indices, temperatures
            )
            return DraftChains(chains.tokens[:, :depth], chains.probs[:, :depth])

        positions, slots = self.locate(seq_lens, batch.req_pool_indices, depth)
        first = self._plan_two_tokens(batch, last_and_bonus, positions[:, :2], slots[:, :2])
        rest = self._plan_single_tokens(batch, positions[:, 1], slots[:, 2:]) if depth > 1 else None
        return self.run_chain(
            first, rest, last_and_bonus, positions, slots, temperatures, depth, self._forward
        )

    def locate(self, seq_lens: Tensor, req_pool_indices: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        """Positions and KV slots [batch, depth + 1] of the last committed token, the bonus token and all drafts but one."""
        positions = (seq_lens - 1).unsqueeze(1) + torch.arange(depth + 1, device=seq_lens.device)
        slots = self.req_to_token_pool.req_to_token[req_pool_indices.unsqueeze(1), positions]
        return positions, slots.to(torch.int64)

    def run_chain(
        self,
        first: ForwardBatch,
        rest: ForwardBatch | None,
        last_and_bonus: Tensor,
        positions: Tensor,
        slots: Tensor,
        temperatures: Tensor,
        depth: int,
        forward,
    ) -> DraftChains:
        """The passes of one step over planned batches; the same code eagerly and while a graph is captured.

        Args:
            first: for the pass of two tokens; rest: for the others.
            last_and_bonus: [batch, 2]. positions, slots: [batch, depth + 1], from `locate`.
            forward: (forward_batch, attention backend) -> logits [batch, vocab].
        """
        first.input_ids = last_and_bonus.reshape(-1)
        first.positions = positions[:, :2].reshape(-1)
        first.out_cache_loc = slots[:, :2].reshape(-1)
        tokens, probs = _most_likely(forward(first, self.draft_runner.attn_backend), temperatures)
        token_columns, prob_columns = [tokens], [probs]
        backends: Sequence = self.draft_attn_backend.attn_backends if depth > 1 else ()
        step_positions = positions[:, 2:].t().contiguous()
        step_slots = slots[:, 2:].t().contiguous()
        for step, backend in zip(range(depth - 1), backends, strict=False):
            rest.input_ids = tokens
            rest.positions = step_positions[step]
            rest.out_cache_loc = step_slots[step]
            tokens, probs = _most_likely(forward(rest, backend), temperatures)
            token_columns.append(tokens)
            prob_columns.append(probs)
        return DraftChains(torch.stack(token_columns, dim=1), torch.stack(prob_columns, dim=1))

    def _forward(self, forward_batch: ForwardBatch, backend) -> Tensor:
        with forward_context(ForwardContext(attn_backend=backend), forward_batch=forward_batch):
            return self.draft_runner.forward(forward_batch).logits_output.next_token_logits

    def _plan_two_tokens(self, batch, tokens: Tensor, positions: Tensor, slots: Tensor) -> ForwardBatch:
        """Plan the pass that writes the draft KV of [last, bonus] and returns the logits [batch, vocab] after bonus."""
        batch_size = tokens.shape[0]
        batch.input_ids = tokens.reshape(-1)
        batch.out_cache_loc = slots.reshape(-1)
        batch.forward_mode = ForwardMode.DRAFT_EXTEND_V2
        batch.extend_num_tokens = 2 * batch_size
        # SGLang takes extend lengths as two tensors or as two host lists; tensors need no host copy.
        batch.extend_lens = torch.full((batch_size,), 2, dtype=torch.int32, device=tokens.device)
        batch.prefix_lens = positions[:, 0].to(torch.int32)
        batch.spec_info = make_two_token_input(positions.reshape(-1), batch_size)
        forward_batch = ForwardBatch.init_new(
            batch,
            self.draft_runner,
            capture_hidden_mode=CaptureHiddenMode.NULL,
            return_hidden_states_before_norm=False,
        )
        forward_batch.return_logprob = False
        forward_batch.extend_seq_lens_cpu = [2] * batch_size
        if forward_batch.seq_lens_cpu is not None:
            forward_batch.extend_prefix_lens_cpu = (forward_batch.seq_lens_cpu - 1).tolist()
        self._advance_lengths(forward_batch)
        self.draft_runner.attn_backend.init_forward_metadata(forward_batch)
        forward_batch.mark_forward_metadata_ready()
        return forward_batch

    def _plan_single_tokens(self, batch, positions: Tensor, slots: Tensor) -> ForwardBatch:
        """Plan the attention of all one-token passes at once, as SGLang's multi-step draft backends do.

        Args:
            positions: [batch] of the bonus token. slots: [batch, depth - 1].
        """
        batch.forward_mode = ForwardMode.DECODE
        batch.input_ids = None
        batch.out_cache_loc = slots.reshape(-1)
        batch.spec_info = EagleDraftInput(
            num_tokens_per_req=1, num_tokens_for_logprob_per_req=1, capture_hidden_mode=CaptureHiddenMode.NULL
        )
        forward_batch = ForwardBatch.init_new(
            batch,
            self.draft_runner,
            capture_hidden_mode=CaptureHiddenMode.NULL,
            return_hidden_states_before_norm=False,
        )
        forward_batch.return_logprob = False
        self._advance_lengths(forward_batch)
        # FlashInfer's planner reads the lengths from here.
        forward_batch.positions = positions + 1
        self.draft_attn_backend.init_forward_metadata(forward_batch)
        forward_batch.mark_forward_metadata_ready()
        return forward_batch

    @staticmethod
    def _advance_lengths(forward_batch: ForwardBatch) -> None:
        """Count the bonus token, which the two-token pass writes: draft KV lengths are seq_lens + 1."""
        forward_batch.seq_lens = forward_batch.seq_lens + 1
        if forward_batch.seq_lens_cpu is not None:
            forward_batch.seq_lens_cpu = forward_batch.seq_lens_cpu + 1
            forward_batch.seq_lens_sum = int(forward_batch.seq_lens_cpu.sum())


def _most_likely(logits: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
    """The most likely token of each row and its probability at the request's temperature.

    The target accepts the token with its own probability at that temperature, so the draft's is read there too
    (SGLang sets a greedy request's temperature to 1).

    Args:
        logits: [batch, vocab]. temperatures: [batch, 1] float32.
    Returns:
        tokens [batch] int64, probs [batch] float32.
    """
    top, tokens = logits.max(dim=-1, keepdim=True)
    probs = ((logits - top).float() / temperatures).exp_().sum(dim=-1).reciprocal_()
    return tokens.squeeze(1), probs
