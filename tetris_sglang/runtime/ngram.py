"""Drafting without a model: what followed the last time a text, first of all the request's own, ended as it ends now."""

from __future__ import annotations

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.speculative.eagle_info import EagleDraftInput
from torch import Tensor

from tetris_sglang.drafting import (
    CalibrateRequests,
    Proposal,
    continue_texts,
    merge_branches,
    propose_by_lookup,
    put_others,
    trust_all,
    trust_match_lens,
)
from tetris_sglang.kernels.reference import AcceptedTokens
from tetris_sglang.runtime.texts import RequestTexts
from tetris_sglang.runtime.windows import Window, make_draft_input


class NgramDraft:
    """Looks up the requests' texts on the device.

    Differs from upstream's NGRAM (sglang/srt/speculative/ngram_worker.py): that one asks a corpus on the host, and waits
    for the last step's tokens to get there. And it takes another request's text only where that shares much more.

    Args:
        topk: branches per request. num_draft_tokens: columns of the grid.
    """

    target_hidden_mode = CaptureHiddenMode.NULL
    calibrate: CalibrateRequests = staticmethod(trust_all)
    texts: RequestTexts
    """Given by the worker when the pools are there."""

    num_continued = 0
    """See `ModelDraft.num_continued`: there are no passes here, so nothing behind them."""

    def __init__(self, *, topk: int, num_draft_tokens: int) -> None:
        self._topk, self._width = topk, num_draft_tokens

    def count_nodes(self, depth: int) -> int:
        return min(self._width - 1, self._topk * depth)

    def prefill(
        self, batch, input_ids: Tensor, hidden_states: None, next_token_ids: Tensor, kv_loc_plan
    ) -> EagleDraftInput:
        """See `ModelDraft.prefill`: the texts are all there is."""
        return self._hand_over(next_token_ids)

    def propose(self, batch, depth: int) -> Proposal:
        """See `ModelDraft.propose`."""
        rows = batch.req_pool_indices
        precedent, calibrate = self.texts.recent.find(rows, depth), self.calibrate(rows)
        if self._topk == 1:
            shared = precedent.match_lens[:, None] + torch.arange(depth, device=rows.device)
            return continue_texts(precedent, calibrate, trust_match_lens(shared))
        own = propose_by_lookup(
            self.texts.tokens,
            rows,
            batch.seq_lens + 1,
            depth=depth,
            branches=self._topk,
            window=self.texts.window(batch.seq_lens_cpu),
        )
        tokens, probs, evidence = put_others(own.tokens, own.probs, precedent)
        return merge_branches(tokens, probs, self.count_nodes(depth), calibrate, evidence)

    def after_verify(
        self, batch, accepted: AcceptedTokens, hidden_states: None, qo_indptr: Tensor, depth: int
    ) -> EagleDraftInput:
        """See `ModelDraft.after_verify`."""
        return self._hand_over(accepted.bonus_tokens)

    def after_undrafted(
        self,
        batch,
        draft_input: EagleDraftInput,
        accepted: AcceptedTokens,
        hidden_states: None,
        qo_indptr: Tensor,
        most_accepted: int,
    ) -> EagleDraftInput:
        """See `ModelDraft.after_undrafted`: nothing is left undone here."""
        return self._hand_over(accepted.bonus_tokens)

    @staticmethod
    def _hand_over(bonus_tokens: Tensor) -> EagleDraftInput:
        return make_draft_input(Window(bonus_tokens.to(torch.int64).unsqueeze(1)), bonus_tokens)
