"""Drafting with a model: a standalone one, or one that reads the target's states (EAGLE, EAGLE3, multi-token prediction,
DFlash).

Each step's first pass takes a window of tokens per request: those whose draft KV is missing, the bonus token last. Further
passes take one token per request. Differs from upstream (sglang/srt/speculative/eagle_worker_v2.py) in this:

- The window's pass comes before drafting and returns what drafting starts from. Upstream runs it after verification, over
  the whole verified width. Windows are aligned to their ends, so all lengths are known on the host, whatever was accepted.
- A standalone draft sees the whole prompt at the target's own positions; upstream feeds it the EAGLE shift, that is the
  prompt without its first token. Drafting chains has already written the KV of every accepted token but the deepest, so
  the window is two tokens: the last committed one (rewritten with the same value, or written for the first time if all
  drafts were accepted) and the bonus token.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from sglang.srt.layers.moe.utils import speculative_moe_a2a_backend_context, speculative_moe_backend_context
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch
from sglang.srt.speculative.eagle_info import EagleDraftExtendInput, EagleDraftInput
from sglang.srt.speculative.eagle_utils import _eagle_prefill_tail_tokens
from sglang.srt.speculative.spec_utils import draft_tp_context
from torch import Tensor

from tetris_sglang.drafting import Proposal
from tetris_sglang.observers import StepRecord
from tetris_sglang.packing import keep_windows_reference
from tetris_sglang.runtime.acceptance_rules import Acceptance
from tetris_sglang.runtime.drafts.kv import DraftKV
from tetris_sglang.runtime.drafts.passes import DraftPasses
from tetris_sglang.runtime.drafts.windows import (
    Window,
    make_draft_input,
    read_window,
    relay_window,
    replace_bonus,
)
from tetris_sglang.runtime.host_copy import send


class ModelDraft:
    """A `Draft` with a model.

    Args:
        passes: of the draft. kv: what they read, complete; see `DraftKV`.
        target_runner: the target's ModelRunner.
        acceptance: says what is drawn with.
    """

    def __init__(
        self,
        passes: DraftPasses,
        kv: DraftKV,
        target_runner,
        acceptance: Acceptance,
    ) -> None:
        self.spec, self.runner = passes.spec, passes.runner
        self.target_hidden_mode = self.spec.target_hidden_mode
        self._target_runner, self._parallel_layout = target_runner, passes.worker.parallel_layout
        self._acceptance, self._passes, self._kv = acceptance, passes, kv
        self._states: Tensor | None = None
        """[slots, window_width, state_size], the target's states of the windows of the requests in these slots."""
        if kv.state_size is not None:
            table, dtype = self.runner.req_to_token_pool.req_to_token, self.runner.model_config.dtype
            size = len(table), self.spec.window_width, kv.state_size
            self._states = torch.zeros(size, dtype=dtype, device=table.device)
        self._graphs = None

    @property
    def depths(self) -> Sequence[int]:
        """See `Draft`."""
        return self._passes.depths if self._graphs is None else self._graphs.depths

    def count_nodes(self, depth: int) -> int:
        """See `Draft`."""
        return self.spec.count_nodes(depth)

    def capture(self, batch_sizes: Sequence[int], shares: Sequence[float] | None) -> None:
        """See `Draft`; a head's single pass runs eagerly."""
        if not batch_sizes or self.spec.num_steps < 2:
            return
        from tetris_sglang.runtime.cuda.draft_graph import capture_drafts

        with self._context():
            self._graphs = capture_drafts(self._passes, self._states, shares)

    @contextlib.contextmanager
    def _context(self) -> Iterator[None]:
        with (
            draft_tp_context(self._parallel_layout),
            speculative_moe_backend_context(),
            speculative_moe_a2a_backend_context(),
        ):
            yield

    # -- between the steps -----------------------------------------------------------------------------------------

    def prefill(
        self, batch, input_ids: Tensor, hidden_states: Tensor | None, next_token_ids: Tensor, kv_loc_plan
    ) -> EagleDraftInput:
        """See `Draft`: runs the draft over the same tokens."""
        with self._context():
            return self._prefill(batch, input_ids, hidden_states, next_token_ids, kv_loc_plan)

    def _prefill(
        self, batch, input_ids: Tensor, hidden_states: Tensor | None, next_token_ids: Tensor, kv_loc_plan
    ) -> EagleDraftInput:
        last_rows = send(batch.extend_lens, input_ids.device).cumsum(0) - 1
        batch.input_ids = input_ids
        if self.spec.shift:
            batch.input_ids = input_ids.roll(-1)
            batch.input_ids[last_rows] = _eagle_prefill_tail_tokens(batch, next_token_ids)
        batch.spec_info = EagleDraftExtendInput(
            hidden_states=hidden_states, num_tokens_per_req=1, num_tokens_for_logprob_per_req=1
        )
        forward_batch = ForwardBatch.init_new(
            batch,
            self.runner,
            capture_hidden_mode=CaptureHiddenMode.NULL,
            return_hidden_states_before_norm=False,
            kv_loc_plan=kv_loc_plan,
        )
        forward_batch.return_logprob = False
        self._kv.prefill(batch, forward_batch)

        # One token's KV is still missing, or (the shifted one) was just written and is written again.
        known = torch.stack((input_ids[last_rows].to(torch.int64), next_token_ids.to(torch.int64)), dim=1)
        states = None if hidden_states is None else hidden_states[last_rows].unsqueeze(1)
        counts = known.new_full((len(known),), 2 - self.spec.shift)
        return self._make_input(batch.req_pool_indices, Window(known, counts, states), next_token_ids)

    def hand_over(self, record: StepRecord, draft_input: EagleDraftInput, hidden_states: Tensor | None) -> EagleDraftInput:
        """See `Draft`."""
        if record.plan.depth:
            return self._after_drafted(record, hidden_states)
        return self._after_undrafted(record, draft_input, hidden_states)

    def _after_drafted(self, record: StepRecord, hidden_states: Tensor | None) -> EagleDraftInput:
        """The accepted tokens whose KV the draft's passes have not left."""
        accepted, packed, slots = record.accepted, record.packed, record.batch.req_pool_indices
        width = self.spec.window_width
        if self.spec.keeps_kv:
            known = torch.stack((accepted.last_tokens, accepted.bonus_tokens), dim=1)
            return self._make_input(slots, Window(known), accepted.bonus_tokens)
        if not slots.is_cuda:
            window = Window(*keep_windows_reference(accepted, packed.qo_indptr, hidden_states, width))
            return self._make_input(slots, window, accepted.bonus_tokens)
        from tetris_sglang.kernels.hand_over import keep_windows

        tokens, counts = keep_windows(accepted, packed.qo_indptr, hidden_states, self._states, slots, width)
        return relay_window(tokens, counts, accepted.bonus_tokens)

    def _after_undrafted(
        self, record: StepRecord, draft_input: EagleDraftInput, hidden_states: Tensor | None
    ) -> EagleDraftInput:
        """What a step in which the model did not run leaves undone."""
        accepted = record.accepted
        if not self._kv.missed.has_room:
            # It reads the requests' rows later than the target's pass did, which SGLang waits for before it writes them.
            self._target_runner.shared_read_done_event = None
            with self._context():
                window = self._kv.catch_up(record.batch, self._add_states(record.batch, read_window(draft_input)))
            draft_input = self._make_input(record.batch.req_pool_indices, window, accepted.bonus_tokens)
        # Every row is a root.
        states = None if hidden_states is None else hidden_states[: len(accepted.bonus_tokens)]
        self._kv.missed.push(record.batch, accepted.bonus_tokens, states)
        return replace_bonus(draft_input, accepted.bonus_tokens)

    def _make_input(self, rows: Tensor, window: Window, bonus_tokens: Tensor) -> EagleDraftInput:
        """As a window of full width, whatever `window` has, of the requests in the slots `rows` [batch]."""
        width = self.spec.window_width
        self._keep_states(rows, window)
        tokens = torch.nn.functional.pad(window.tokens, (width - window.tokens.shape[1], 0))
        return make_draft_input(Window(tokens, window.counts), bonus_tokens)

    def _keep_states(self, rows: Tensor, window: Window) -> None:
        if self._states is not None:
            first = self.spec.window_width - window.hidden_states.shape[1]
            self._states[rows, first:] = window.hidden_states.to(self._states.dtype)

    def _add_states(self, batch, window: Window) -> Window:
        """Those that were kept, to a window of full width."""
        return window if self._states is None else window._replace(hidden_states=self._states[batch.req_pool_indices])

    # -- drafting --------------------------------------------------------------------------------------------------

    def propose(self, batch, depth: int) -> Proposal:
        """See `Draft`."""
        if self._passes.texts is not None:
            self._passes.texts.flush()
        with self._context():
            return self._run_passes(batch, depth)

    def _run_passes(self, batch, depth: int) -> Proposal:
        window = read_window(batch.spec_info)
        if self._kv.missed.num_tokens(batch):
            window = self._kv.catch_up(batch, self._add_states(batch, window))
            self._keep_states(batch.req_pool_indices, window)
        noise = self._acceptance.draft_noise(batch)
        has_graph = self._graphs is not None and self._graphs.can_run(len(batch.reqs))
        if not has_graph or not self._graphs.plans_on_device:
            self._passes.know_lengths(batch)
        if has_graph:  # which reads the states where they are kept
            return self._graphs.replay(window, batch.seq_lens, batch.seq_lens_cpu, batch.req_pool_indices, noise, depth)
        return self._passes.propose(batch, self._add_states(batch, window), noise, depth)
