"""Drafting without a model: what followed the last time a text, first of all the request's own, ended as it ends now."""

from __future__ import annotations

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.speculative.eagle_info import EagleDraftInput
from torch import Tensor

from tetris_sglang.drafting import Calibrate, Proposal, propose_matches, trust
from tetris_sglang.packing import AcceptedTokens
from tetris_sglang.runtime.drafts.windows import Window, make_draft_input
from tetris_sglang.runtime.texts import RequestTexts
from tetris_sglang.texts import trust_match_lens


class NgramDraft:
    """Looks up the requests' texts on the device.

    Differs from upstream's NGRAM (sglang/srt/speculative/ngram_worker.py): that one asks a corpus on the host, and waits
    for the last step's tokens to get there. And it takes another request's text only where that shares much more.
    """

    target_hidden_mode = CaptureHiddenMode.NULL
    calibrate: Calibrate = trust
    texts: RequestTexts
    """Given by the worker when the pools are there."""

    num_extension = 0
    """See `ModelDraft.num_extension`: there are no passes here, so nothing behind them."""

    def count_nodes(self, depth: int) -> int:
        return depth

    def prefill(
        self, batch, input_ids: Tensor, hidden_states: None, next_token_ids: Tensor, kv_loc_plan
    ) -> EagleDraftInput:
        """See `ModelDraft.prefill`: the texts are all there is."""
        return self._hand_over(next_token_ids)

    def propose(self, batch, depth: int) -> Proposal:
        """See `ModelDraft.propose`."""
        self.texts.flush()
        rows = batch.req_pool_indices
        match = self.texts.recent.find(rows, depth)
        shared = match.match_lens[:, None] + torch.arange(depth, device=rows.device)
        return propose_matches(match, self.calibrate, trust_match_lens(shared))

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
        max_accepted: int,
    ) -> EagleDraftInput:
        """See `ModelDraft.after_undrafted`: nothing is left undone here."""
        return self._hand_over(accepted.bonus_tokens)

    @staticmethod
    def _hand_over(bonus_tokens: Tensor) -> EagleDraftInput:
        return make_draft_input(Window(bonus_tokens.to(torch.int64).unsqueeze(1)), bonus_tokens)
