"""Drafting without a model: what followed the last time a text, first of all the request's own, ended as it ends now."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.speculative.eagle_info import EagleDraftInput
from torch import Tensor

from tetris_sglang.drafting import Proposal, propose_matches
from tetris_sglang.observers import StepRecord
from tetris_sglang.runtime.drafts.windows import Window, make_draft_input
from tetris_sglang.runtime.request_texts import RequestTexts
from tetris_sglang.texts import Calibrate, trust_match_lens


class NgramDraft:
    """A `Draft` that looks up the requests' texts on the device.

    Differs from upstream's NGRAM (sglang/srt/speculative/ngram_worker.py): that one asks a corpus on the host, and waits
    for the last step's tokens to get there. And it takes another request's text only where that shares much more.

    Args:
        num_steps: the deepest draft. estimate: what the tokens of texts are worth.
    """

    target_hidden_mode = CaptureHiddenMode.NULL

    def __init__(self, num_steps: int, texts: RequestTexts, estimate: Calibrate) -> None:
        self.depths: Sequence[int] = range(1, num_steps + 1)
        self._texts, self._estimate = texts, estimate
        self._graphs: Any = None
        """`NgramGraphs`, on CUDA alone."""

    def capture(self, batch_sizes: Sequence[int], shares: Sequence[float] | None) -> None:
        """See `Draft`."""
        if not batch_sizes:
            return
        from tetris_sglang.runtime.cuda.ngram_graph import NgramGraphs

        self._graphs = NgramGraphs(self._look_up, batch_sizes, self.depths[-1], shares, self._texts.tokens.device)

    def count_nodes(self, depth: int) -> int:
        """See `Draft`."""
        return depth

    def prefill(self, batch, input_ids: Tensor, hidden_states: None, next_token_ids: Tensor, kv_loc_plan) -> EagleDraftInput:
        """See `Draft`: the texts are all there is."""
        return self._make_input(next_token_ids)

    def propose(self, batch, depth: int) -> Proposal:
        """See `Draft`."""
        self._texts.flush()
        rows = batch.req_pool_indices
        if self._graphs is not None and self._graphs.can_run(len(rows)):
            return self._graphs.replay(rows, depth)
        return self._look_up(rows, depth)

    def _look_up(self, rows: Tensor, depth: int) -> Proposal:
        """Of the requests in the slots `rows` [batch]. Sync: none; CUDA-graph safe."""
        match = self._texts.recent.find(rows, depth)
        shared = match.match_lens[:, None] + torch.arange(depth, device=rows.device)
        return propose_matches(match, self._estimate, trust_match_lens(shared))

    def hand_over(self, record: StepRecord, draft_input: EagleDraftInput, hidden_states: None) -> EagleDraftInput:
        """See `Draft`: nothing is left undone here."""
        return self._make_input(record.accepted.bonus_tokens)

    @staticmethod
    def _make_input(bonus_tokens: Tensor) -> EagleDraftInput:
        return make_draft_input(Window(bonus_tokens.to(torch.int64).unsqueeze(1)), bonus_tokens)
