"""Drafting without a model: what followed the last time the request's own text ended as it ends now."""

from __future__ import annotations

from itertools import accumulate

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.speculative.eagle_info import EagleDraftInput
from torch import Tensor

from tetris_sglang.drafting import CalibrateRequests, Proposal, merge_branches, propose_by_lookup, trust_all
from tetris_sglang.kernels.reference import AcceptedTokens
from tetris_sglang.runtime.windows import Window, make_draft_input

WINDOW = 2048
"""Tokens of a text, the newest, that are searched: what a step pays for however short the texts are."""


class NgramDraft:
    """Keeps every request's tokens on the device, so that a step looks up its drafts without waiting for the host.

    Differs from upstream's NGRAM (sglang/srt/speculative/ngram_worker.py): that one asks a corpus on the host, and waits
    for the last step's tokens to get there.

    Args:
        topk: branches per request. num_draft_tokens: columns of the grid.
    """

    target_hidden_mode = CaptureHiddenMode.NULL
    calibrate: CalibrateRequests = staticmethod(trust_all)

    def __init__(self, *, topk: int, num_draft_tokens: int) -> None:
        self._topk, self._width = topk, num_draft_tokens
        self._history: Tensor | None = None

    def alloc_history(self, req_to_token_pool) -> None:
        """One row per request slot, wide enough for what the last step of the longest request drafts."""
        rows, columns = req_to_token_pool.req_to_token.shape
        self._history = torch.zeros(
            (rows, columns + self._width), dtype=torch.int32, device=req_to_token_pool.req_to_token.device
        )

    def count_nodes(self, depth: int) -> int:
        return min(self._width - 1, self._topk * depth)

    def prefill(
        self, batch, input_ids: Tensor, hidden_states: None, next_token_ids: Tensor, kv_loc_plan
    ) -> EagleDraftInput:
        """Write down the prompts, prefixes from the cache included; see `ModelDraft.prefill`."""
        device = self._history.device
        texts = [torch.frombuffer(req.get_fill_ids(), dtype=torch.int64) for req in batch.reqs]
        lens = [len(text) for text in texts]
        # One copy for all: where each text begins in it, and which column its tokens go to.
        starts = torch.tensor([0, *accumulate(lens)][:-1])
        columns = torch.arange(sum(lens)) - starts.repeat_interleave(torch.tensor(lens))
        rows = batch.req_pool_indices.repeat_interleave(
            torch.tensor(lens).to(device, non_blocking=True), output_size=sum(lens)
        )
        self._history[rows, columns.to(device, non_blocking=True)] = torch.cat(texts).to(
            device, torch.int32, non_blocking=True
        )
        self._history[batch.req_pool_indices, batch.seq_lens] = next_token_ids.to(torch.int32)
        return self._hand_over(next_token_ids)

    def propose(self, batch, depth: int) -> Proposal:
        """See `ModelDraft.propose`."""
        window = min(WINDOW, self._history.shape[1])
        if batch.seq_lens_cpu is not None:
            # A power of two: few shapes. Looking at less than the window finds the same where texts are shorter.
            window = min(window, 1 << int(batch.seq_lens_cpu.max() + 1).bit_length())
        found = propose_by_lookup(
            self._history,
            batch.req_pool_indices,
            batch.seq_lens + 1,
            depth=depth,
            branches=self._topk,
            window=window,
        )
        return merge_branches(
            found.tokens, found.probs, self.count_nodes(depth), self.calibrate(batch.req_pool_indices)
        )

    def after_verify(
        self, batch, accepted: AcceptedTokens, hidden_states: None, qo_indptr: Tensor
    ) -> EagleDraftInput:
        """Write down what was emitted; see `ModelDraft.after_verify`."""
        # What stands beyond the accepted tokens lies beyond the text, too, until it is overwritten.
        columns = torch.arange(1, accepted.target_tokens.shape[1] + 1, device=batch.seq_lens.device)
        self._history[batch.req_pool_indices[:, None], batch.seq_lens[:, None] + columns] = (
            accepted.target_tokens.to(torch.int32)
        )
        return self._hand_over(accepted.bonus_tokens)

    def after_plain(
        self, batch, draft_input: EagleDraftInput, accepted: AcceptedTokens, hidden_states: None
    ) -> EagleDraftInput:
        """See `ModelDraft.after_plain`: nothing is left undone here."""
        return self.after_verify(batch, accepted, hidden_states, None)

    @staticmethod
    def _hand_over(bonus_tokens: Tensor) -> EagleDraftInput:
        return make_draft_input(Window(bonus_tokens.to(torch.int64).unsqueeze(1)), bonus_tokens)
