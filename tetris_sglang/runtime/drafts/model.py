"""Drafting with a model: a standalone one, or a head (EAGLE, EAGLE3, multi-token prediction) that reads the target's states.

Each step's first pass takes a window of tokens per request: those whose draft KV is missing, the bonus token last. Further
passes take one token per request and branch. Differs from upstream (sglang/srt/speculative/eagle_worker_v2.py) in this:

- The window's pass comes before drafting and returns what drafting starts from. Upstream runs it after verification, over
  the whole verified width. Windows are aligned to their ends, so all lengths are known on the host, whatever was accepted.
- A standalone draft sees the whole prompt at the target's own positions; upstream feeds it the EAGLE shift, that is the
  prompt without its first token. Drafting chains has already written the KV of every accepted token but the deepest, so
  the window is two tokens: the last committed one (rewritten with the same value, or written for the first time if all
  drafts were accepted) and the bonus token.
- A branch of a tree attends to its own ancestors. Upstream's branches keep the KV that earlier tokens left in their rows,
  also when the node expanded there descends from another row's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.runtime_context import get_model
from sglang.srt.speculative.eagle_info import EagleDraftExtendInput, EagleDraftInput
from sglang.srt.speculative.eagle_utils import (
    _eagle_prefill_tail_tokens,
    get_draft_input_from_target_hidden_dim,
)
from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker
from sglang.srt.speculative.standalone_worker_v2 import StandaloneDraftWorker
from torch import Tensor

from tetris_sglang.acceptance import RequestNoise, perturb
from tetris_sglang.drafting import (
    Calibrate,
    ChainGrower,
    Proposal,
    TreeGrower,
    propose_matches,
    count_nodes,
    trust,
)
from tetris_sglang.packing import AcceptedTokens
from tetris_sglang.runtime.drafts.catch_up import MissedTokens
from tetris_sglang.runtime.drafts.windows import (
    Window,
    align_right,
    make_draft_input,
    make_window_input,
    narrow_window,
    read_window,
    slide_window,
)
from tetris_sglang.runtime.host_copy import send
from tetris_sglang.runtime.kv_moves import move_kv
from tetris_sglang.runtime.ranks import Ranks
from tetris_sglang.runtime.requests.seeds import request_noise
from tetris_sglang.runtime.texts import RequestTexts
from tetris_sglang.texts import Match

_CATCH_UP_ROWS = 4096
"""Rows of one pass that catches up."""


class Places(NamedTuple):
    """Where the passes of a step write, per request."""

    window_positions: Tensor
    """[batch, width] int64."""
    window_slots: Tensor
    """[batch, width] int64; the padding slot 0 for what is not real."""
    branch_positions: Tensor
    """[batch] int64, the position after the window's."""
    branch_slots: Tensor
    """[batch, branches, depth - 1] int64."""


class ModelDraft:
    """Mixin over SGLang's draft workers, which own the model, its KV pool (slots shared with the target) and its backends.

    Attributes:
        shift: positions by which the draft's KV entry of a token lies before the token's own. A head's entry p belongs to
            the target's state at p and the token at p + 1.
    """

    shift = 0
    calibrate: Calibrate = trust
    """What the draft's probabilities are worth."""
    perturb: Callable[..., Tensor] = staticmethod(perturb)
    """As acceptance.noise.perturb, for the device."""
    target_state_size: int | None = None
    """Values of the target's state that the draft reads with a token; None: none."""
    texts: RequestTexts | None = None
    """Where matches are looked up; None: drafts are scored without."""
    captured = None
    """The captured passes (runtime/cuda/draft_graph.py), on CUDA."""

    @property
    def reads_hidden_states(self) -> bool:
        return self.shift == 1

    @property
    def num_extension(self) -> int:
        """Tokens of a chain behind the last pass's, or the root's: no pass drafts them, they continue a match."""
        return self.speculative_num_draft_tokens - 1 - self.speculative_num_steps if self.topk == 1 else 0

    @property
    def leaves_kv(self) -> bool:
        """Whether drafting leaves the KV of accepted tokens in place, but for the deepest one's and for extension ones':
        heads miss the target's states, trees the places."""
        return self.topk == 1 and not self.reads_hidden_states

    @property
    def has_full_windows(self) -> bool:
        """Whether every step's window is as wide as any."""
        return self.leaves_kv and not self.num_extension

    @property
    def window_width(self) -> int:
        passes = 1 if self.leaves_kv else self.speculative_num_steps
        return 1 + passes + self.num_extension

    @property
    def hidden_mode(self) -> CaptureHiddenMode:
        return CaptureHiddenMode.LAST if self.reads_hidden_states else CaptureHiddenMode.NULL

    @property
    def target_hidden_mode(self) -> CaptureHiddenMode:
        """What the target's passes have to keep."""
        return CaptureHiddenMode.FULL if self.reads_hidden_states else CaptureHiddenMode.NULL

    @property
    def depths(self) -> Sequence[int]:
        """To which it can draft with passes, ascending, 1 and num_steps among them."""
        return range(1, self.speculative_num_steps + 1) if self.captured is None else self.captured.depths

    def count_nodes(self, depth: int) -> int:
        """Tokens that a request drafts with `depth` passes."""
        return min(self.speculative_num_draft_tokens - 1, count_nodes(depth, self.topk) + self.num_extension)

    def alloc_missed(self, req_to_token_pool, ranks: Ranks) -> None:
        """Where tokens wait that steps without the draft emit; when the pools are there."""
        table = req_to_token_pool.req_to_token
        if self.reads_hidden_states:
            self.target_state_size = get_draft_input_from_target_hidden_dim(self.draft_runner)
        self._missed = MissedTokens(
            table.shape[0],
            max_emitted=1 + self.num_extension,
            hidden_size=self.target_state_size,
            dtype=self.draft_runner.model_config.dtype,
            device=table.device,
            ranks=ranks,
        )

    def init_attention_backend(self) -> None:
        super().init_attention_backend()
        backend = self.draft_runner.attn_backend
        if hasattr(backend, "use_paged"):
            # FlashInfer would read a pass's own keys from its rows, those that are not real included, instead of the cache.
            backend.use_paged = True

    # -- between the steps -----------------------------------------------------------------------------------------

    def prefill(
        self, batch, input_ids: Tensor, hidden_states: Tensor | None, next_token_ids: Tensor, kv_loc_plan
    ) -> EagleDraftInput:
        """Run the draft over the tokens that the target has just prefilled.

        Args:
            batch: the extend ScheduleBatch.
            input_ids: [num_tokens] those of the target's pass.
            hidden_states: [num_tokens, hidden_size] the target's, if the draft reads them.
            next_token_ids: [batch] the target's next tokens.
            kv_loc_plan: the target pass's plan; the draft writes the same slots.
        """
        last_rows = send(batch.extend_lens, input_ids.device).cumsum(0) - 1
        batch.input_ids = input_ids
        if self.shift:
            batch.input_ids = input_ids.roll(-1)
            batch.input_ids[last_rows] = _eagle_prefill_tail_tokens(batch, next_token_ids)
        batch.spec_info = EagleDraftExtendInput(
            hidden_states=hidden_states, num_tokens_per_req=1, num_tokens_for_logprob_per_req=1
        )
        forward_batch = ForwardBatch.init_new(
            batch,
            self.draft_runner,
            capture_hidden_mode=CaptureHiddenMode.NULL,
            return_hidden_states_before_norm=False,
            kv_loc_plan=kv_loc_plan,
        )
        forward_batch.return_logprob = False
        self._redraft_prefixes(batch)
        self.draft_runner.forward(forward_batch)
        self._missed.forget_rows(batch.req_pool_indices)

        # One token's KV is still missing, or (the shifted one) was just written and is written again.
        known = torch.stack((input_ids[last_rows].to(torch.int64), next_token_ids.to(torch.int64)), dim=1)
        states = None if hidden_states is None else hidden_states[last_rows].unsqueeze(1)
        return self._hand_over(known, known.new_full((len(known),), 2 - self.shift), states, next_token_ids)

    def after_verify(
        self, batch, accepted: AcceptedTokens, hidden_states: Tensor | None, qo_indptr: Tensor, depth: int
    ) -> EagleDraftInput:
        """Hand the accepted tokens to the next step.

        Args:
            batch: the decode ScheduleBatch, its lengths still those of before.
            hidden_states: [num_tokens, hidden_size] the target's, in packed rows, if the draft reads them.
            qo_indptr: [batch + 1], where each request's rows begin.
            depth: passes that drafted.
        """
        width = self.window_width
        if self.leaves_kv:
            known = torch.stack((accepted.last_tokens, accepted.bonus_tokens), dim=1)
            if not self.num_extension:
                return self._hand_over(known, None, None, accepted.bonus_tokens)
            # Continued tokens that were accepted are missing, too.
            tokens = align_right(accepted.target_tokens, accepted.accept_lens + 1)[:, -width:-2]
            counts = (accepted.accept_lens + (2 - depth)).clamp(min=2)
            return self._hand_over(torch.cat((tokens, known), dim=1), counts, None, accepted.bonus_tokens)
        counts = accepted.accept_lens + 1
        tokens = align_right(accepted.target_tokens[:, :width], counts)
        states = None
        if hidden_states is not None:
            columns = accepted.path
            if columns is None:
                columns = torch.arange(width, device=counts.device)
            rows = align_right((qo_indptr[:-1, None] + columns).long(), counts)
            states = hidden_states[rows.clamp_(max=hidden_states.shape[0] - 1)]
        return self._hand_over(tokens, counts, states, accepted.bonus_tokens)

    def after_undrafted(
        self,
        batch,
        draft_input: EagleDraftInput,
        accepted: AcceptedTokens,
        hidden_states: Tensor | None,
        qo_indptr: Tensor,
        max_accepted: int,
    ) -> EagleDraftInput:
        """Hand on what a step in which the draft did not run leaves undone.

        Args:
            batch, hidden_states, qo_indptr: as for `after_verify`.
            draft_input: the step's own.
            max_accepted: of any request's drafts, as far as the host knows; 0: nothing was verified.
        """
        if not self._missed.has_room(1 + max_accepted):
            # It reads the requests' rows later than the target's pass did, which SGLang waits for before it writes them.
            self.target_worker.model_runner.shared_read_done_event = None
            self._catch_up(batch)
        window = read_window(draft_input)
        if self.has_full_windows:
            window = window._replace(counts=None)
        if max_accepted:
            columns = torch.arange(1 + max_accepted, device=qo_indptr.device)
            rows = (qo_indptr[:-1, None] + columns).long()
            emitted = Window(accepted.target_tokens[:, : len(columns)], accepted.accept_lens + 1)
        else:
            rows = qo_indptr[:-1, None].long()
            emitted = Window(accepted.bonus_tokens[:, None])
        if hidden_states is not None:
            emitted = emitted._replace(hidden_states=hidden_states[rows.clamp_(max=len(hidden_states) - 1)])
        left, window = slide_window(window, emitted)
        self._missed.push(batch.req_pool_indices, left)
        return make_draft_input(window, accepted.bonus_tokens)

    def _hand_over(
        self, tokens: Tensor, counts: Tensor | None, hidden_states: Tensor | None, bonus_tokens: Tensor
    ) -> EagleDraftInput:
        """As a window of full width, whatever `tokens` [batch, n] has."""
        missing = self.window_width - tokens.shape[1]
        if hidden_states is not None:
            hidden_states = torch.nn.functional.pad(
                hidden_states, (0, 0, self.window_width - hidden_states.shape[1], 0)
            )
        tokens = torch.nn.functional.pad(tokens, (missing, 0))
        return make_draft_input(Window(tokens, counts, hidden_states), bonus_tokens)

    # -- drafting --------------------------------------------------------------------------------------------------

    def propose(self, batch, depth: int) -> Proposal:
        """Draft every request to `depth`.

        Args:
            batch: the decode ScheduleBatch inside SGLang's forward isolation, which undoes what is set here;
                batch.spec_info from `make_draft_input`, batch.seq_lens [batch] = tokens with target KV.
            depth: 0..num_steps; 0: from their texts alone, where chains go on.
        """
        if self.texts is not None:
            self.texts.flush()
        if depth == 0:
            match = self.texts.recent.find(batch.req_pool_indices, self.num_extension)
            return propose_matches(match, self.calibrate)
        window = read_window(batch.spec_info)
        if self._missed.num_tokens:
            self._catch_up(batch)
        noise = request_noise(batch.sampling_info)
        if self.captured is not None and self.captured.can_run(len(batch.reqs)):
            return self.captured.replay(
                window, batch.seq_lens, batch.seq_lens_cpu, batch.req_pool_indices, noise, depth
            )
        if self.has_full_windows:
            window = window._replace(counts=None)
        elif self.device == "cpu":
            window = narrow_window(window)
        places = self.locate(window, batch.seq_lens, batch.req_pool_indices, depth)
        extra = 1 - self.shift
        ends = batch.seq_lens + extra
        ends_cpu = None if batch.seq_lens_cpu is None else batch.seq_lens_cpu + extra
        first = self._plan_window(batch, window, places.window_positions, places.window_slots, ends, ends_cpu)
        rest = self._plan_branches(batch, places, ends, ends_cpu) if depth > 1 else None
        match = self.find_match(batch.req_pool_indices, depth)
        return self.run(first, rest, window, places, noise, match, depth, self.forward_model)

    def locate(self, window: Window, seq_lens: Tensor, req_pool_indices: Tensor, depth: int) -> Places:
        """Where the passes of a step write; see `Places`. Shapes depend on the arguments' shapes alone."""
        counts, device = window.counts, seq_lens.device
        width = window.tokens.shape[1]
        table = self.req_to_token_pool.req_to_token
        end = seq_lens + 1 - self.shift
        offsets = torch.arange(width, device=device) - width
        positions = (end[:, None] + offsets).clamp_(min=0)
        rows = req_pool_indices[:, None]
        slots = table[rows, positions].to(torch.int64)
        if counts is not None:
            slots = torch.where(offsets >= -counts[:, None], slots, 0)
        # Branch b lies b * num_steps further on, as upstream's draft attention backends expect.
        branch = torch.arange(self.topk, device=device) * self.speculative_num_steps
        step = torch.arange(depth - 1, device=device)
        columns = end[:, None] + (branch[:, None] + step).flatten()
        branch_slots = table[rows, columns].to(torch.int64).unflatten(1, (self.topk, depth - 1))
        return Places(positions, slots, end, branch_slots)

    def find_match(self, rows: Tensor, depth: int) -> Match | None:
        """Of the requests in these slots [batch], as deep as `depth` passes draft; see `RecentTexts.find`."""
        return None if self.texts is None else self.texts.recent.find(rows, depth + self.num_extension)

    def run(
        self,
        first: ForwardBatch,
        rest: ForwardBatch | None,
        window: Window,
        places: Places,
        noise: RequestNoise | None,
        match: Match | None,
        depth: int,
        forward: Callable,
    ) -> Proposal:
        """The passes of one step over planned batches; the same code eagerly and while a graph is captured.

        Args:
            first: for the window's pass; rest: for the others.
            noise: [batch], of the target's draws; None: all requests are greedy.
            forward: (forward_batch, attention backend) -> LogitsProcessorOutput of one row per request (and branch).
        """
        branches = self.topk
        first.input_ids = window.tokens.reshape(-1)
        first.positions = places.window_positions.reshape(-1)
        first.out_cache_loc = places.window_slots.reshape(-1)
        output = forward(first, self.draft_runner.attn_backend)
        # Drawn with after the token before.
        positions = places.branch_positions + (self.shift - 1)
        tokens, probs = self._most_likely(output.next_token_logits, noise, positions)
        grower = (ChainGrower if branches == 1 else TreeGrower)(tokens, probs, self.calibrate, match)
        states = output.hidden_states
        if states is not None:
            states = states[:, None].expand(-1, branches, -1)
        noise = None if noise is None else noise.repeat(branches)
        positions = positions.repeat_interleave(branches)
        step_slots = places.branch_slots.permute(2, 0, 1).contiguous()
        backends: Sequence = self.draft_attn_backend.attn_backends if depth > 1 else ()
        for step, backend in zip(range(depth - 1), backends, strict=False):
            if grower.frontier_rows is not None:
                self._inherit(places.branch_slots[:, :, :step], grower.frontier_rows)
                if states is not None:
                    states = states.gather(1, grower.frontier_rows[:, :, None].expand_as(states))
            rest.input_ids = grower.frontier_tokens.reshape(-1)
            rest.positions = (places.branch_positions + step).repeat_interleave(branches)
            rest.out_cache_loc = step_slots[step].reshape(-1)
            if states is not None:
                rest.spec_info.hidden_states = states.flatten(0, 1)
            output = forward(rest, backend)
            positions = positions + 1
            tokens, probs = self._most_likely(output.next_token_logits, noise, positions)
            grower.grow(tokens.unflatten(0, (-1, branches)), probs.unflatten(0, (-1, branches)))
            if states is not None:
                states = output.hidden_states.unflatten(0, (-1, branches))
        return grower.finish(self.count_nodes(depth))

    def _inherit(self, branch_slots: Tensor, parent_rows: Tensor) -> None:
        """Give every branch the KV of the branch that it now continues.

        Args:
            branch_slots: [batch, branches, written]. parent_rows: [batch, branches].
        """
        source = branch_slots.gather(1, parent_rows[:, :, None].expand_as(branch_slots))
        move_kv(self.draft_runner.token_to_kv_pool, branch_slots.flatten(1), source.flatten(1))

    def _most_likely(
        self, logits: Tensor, noise: RequestNoise | None, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The `topk` tokens of each row that the target most likely draws, in its vocabulary; see `most_likely`.

        Args:
            noise, positions: [rows], of the target's draws.
        """
        if noise is not None:
            logits = self.perturb(logits, noise, positions, self.hot_token_id)
        tokens, probs = most_likely(logits, self.topk)
        return tokens if self.hot_token_id is None else self.hot_token_id[tokens], probs

    def forward_model(self, forward_batch: ForwardBatch, backend):
        """One pass over a planned batch.

        Without `ModelRunner.forward` around it: copying the batch into static buffers and choosing a runner cost as much as
        the products of a small draft's pass (docs/experiments.md).
        """
        model = self.draft_runner.model
        with (
            get_model().override(shared_experts=model.shared_experts_config),
            forward_context(ForwardContext(attn_backend=backend), forward_batch=forward_batch),
        ):
            return model.forward(forward_batch.input_ids, forward_batch.positions, forward_batch)

    def _catch_up(self, batch) -> None:
        """Write the draft's KV of the tokens before the window that steps without the draft emitted."""
        missed = self._missed.take(batch.req_pool_indices)
        change = 1 - self.shift - self.window_width
        ends_cpu = None if batch.seq_lens_cpu is None else batch.seq_lens_cpu + change
        self._write(batch, missed, batch.seq_lens + change, ends_cpu)

    def _redraft_prefixes(self, batch) -> None:
        """Write the draft's KV of the ends of prefixes from the cache: their requests may have ended without drafting.

        A head would need the target's states there, which nobody keeps.
        """
        max_missed = self._missed.max_tokens
        if self.reads_hidden_states or not max_missed:
            return
        prefix_lens = batch.prefix_lens
        lens = [
            # Of a long prompt's later pieces, the earlier ones are the prefix.
            min(prefix_len, max_missed + self.window_width) if req.extend_batch_idx == 1 else 0
            for req, prefix_len in zip(batch.reqs, prefix_lens, strict=True)
        ]
        if not any(lens):
            return
        tokens = torch.zeros((len(lens), max(lens)), dtype=torch.int64)
        for row, (req, prefix_len, n) in enumerate(zip(batch.reqs, prefix_lens, lens, strict=True)):
            if n:
                tokens[row, -n:] = torch.tensor(req.get_fill_ids()[prefix_len - n : prefix_len])
        device = batch.seq_lens.device
        ends_cpu = torch.tensor(prefix_lens)
        missed = Window(send(tokens, device), send(lens, device))
        batch = copy.copy(batch)
        batch.return_logprob = False
        self._write(batch, missed, send(ends_cpu, device), ends_cpu)

    def _write(self, batch, missed: Window, ends: Tensor, ends_cpu: Tensor | None) -> None:
        """Write the draft's KV of the last tokens before `ends` [batch], the columns of `missed`; changes `batch`."""
        batch_size, num_missed = missed.tokens.shape
        table, rows = self.req_to_token_pool.req_to_token, batch.req_pool_indices[:, None]
        # A request that does not reach back so far begins at its first token, and ends before the others' last columns.
        starts = (ends - num_missed).clamp(min=0)
        starts_cpu = None if ends_cpu is None else (ends_cpu - num_missed).clamp(min=0)
        width = max(1, _CATCH_UP_ROWS // batch_size)
        for first in range(0, num_missed, width):
            last = min(first + width, num_missed)
            positions = starts[:, None] + torch.arange(first, last, device=ends.device)
            columns = positions - (ends - num_missed)[:, None]
            is_real = (columns >= num_missed - missed.counts[:, None]) & (columns < num_missed)
            slots = torch.where(is_real, table[rows, positions], 0).to(torch.int64)
            columns = columns.clamp_(max=num_missed - 1)
            states = missed.hidden_states
            if states is not None:
                states = states.gather(1, columns[:, :, None].expand(-1, -1, states.shape[2]))
            part = Window(missed.tokens.gather(1, columns), None, states)
            forward_batch = self._plan_window(
                batch,
                part,
                positions,
                slots,
                starts + last,
                None if starts_cpu is None else starts_cpu + last,
            )
            forward_batch.input_ids = part.tokens.reshape(-1)
            forward_batch.positions = positions.reshape(-1)
            forward_batch.out_cache_loc = slots.reshape(-1)
            self.forward_model(forward_batch, self.draft_runner.attn_backend)

    def _plan_window(
        self,
        batch,
        window: Window,
        positions: Tensor,
        slots: Tensor,
        ends: Tensor,
        ends_cpu: Tensor | None,
    ) -> ForwardBatch:
        """Plan a pass over `window` at `positions` [batch, width], which writes to `slots` [batch, width].

        Args:
            ends: [batch], the draft's KV lengths after the pass, and the same on the host if it knows them.
        """
        batch_size, width = window.tokens.shape
        batch.input_ids = window.tokens.reshape(-1)
        batch.out_cache_loc = slots.reshape(-1)
        batch.forward_mode = ForwardMode.DRAFT_EXTEND_V2
        batch.extend_num_tokens = width * batch_size
        # SGLang takes extend lengths as two tensors or as two host lists; tensors need no host copy.
        batch.extend_lens = torch.full((batch_size,), width, dtype=torch.int32, device=window.tokens.device)
        # Below zero where a request is shorter than its window: FlashInfer takes queries for lengths less prefixes.
        batch.prefix_lens = (ends - width).to(torch.int32)
        batch.spec_info = make_window_input(window, positions.reshape(-1))
        forward_batch = ForwardBatch.init_new(
            batch,
            self.draft_runner,
            capture_hidden_mode=self.hidden_mode,
            return_hidden_states_before_norm=False,
        )
        forward_batch.return_logprob = False
        forward_batch.extend_seq_lens_cpu = [width] * batch_size
        _set_lengths(forward_batch, ends, ends_cpu)
        if ends_cpu is not None:
            # Below zero where a request is shorter than its window: the first rows are not real and see nothing.
            forward_batch.extend_prefix_lens_cpu = (forward_batch.seq_lens_cpu - width).tolist()
        self.draft_runner.attn_backend.init_forward_metadata(forward_batch)
        forward_batch.mark_forward_metadata_ready()
        return forward_batch

    def _plan_branches(self, batch, places: Places, ends: Tensor, ends_cpu: Tensor | None) -> ForwardBatch:
        """Plan the attention of all further passes at once, as SGLang's multi-step draft backends do.

        Args:
            ends: as in `_plan_window`.
        """
        branches = self.topk
        batch.forward_mode = ForwardMode.DECODE
        batch.input_ids = None
        batch.out_cache_loc = places.branch_slots.reshape(-1)
        batch.spec_info = EagleDraftInput(
            num_tokens_per_req=branches,
            num_tokens_for_logprob_per_req=branches,
            capture_hidden_mode=self.hidden_mode,
        )
        forward_batch = ForwardBatch.init_new(
            batch,
            self.draft_runner,
            capture_hidden_mode=self.hidden_mode,
            return_hidden_states_before_norm=False,
        )
        forward_batch.return_logprob = False
        _set_lengths(forward_batch, ends, ends_cpu)
        # FlashInfer's planner reads the lengths from here.
        forward_batch.positions = places.branch_positions.repeat_interleave(branches)
        self.draft_attn_backend.init_forward_metadata(forward_batch)
        forward_batch.mark_forward_metadata_ready()
        return forward_batch

    def _rebuild_topk1_chain_buffers(self) -> None:
        """What SGLang builds its own chains from, and why it wants no more than num_steps + 1 tokens in one."""

    def _capture_cuda_graphs(self) -> None:
        """Called by SGLang when pools and backends are ready: one graph for all passes of a step, not upstream's two."""
        self.cuda_graph_runner = self.cuda_graph_runner_for_draft_extend = None
        if self.device != "cuda" or self.speculative_num_steps < 2:
            return
        from tetris_sglang.runtime.cuda.draft_graph import capture_drafts

        self.captured = capture_drafts(self)


class StandaloneDraft(ModelDraft, StandaloneDraftWorker):
    """A language model of its own."""


class HeadDraft(ModelDraft, EagleDraftWorker):
    """EAGLE, EAGLE3 and multi-token prediction: embedding (and output layer) of the target, and its hidden states."""

    shift = 1


def _set_lengths(forward_batch: ForwardBatch, ends: Tensor, ends_cpu: Tensor | None) -> None:
    """The KV lengths of a pass."""
    forward_batch.seq_lens = ends
    if ends_cpu is not None:
        forward_batch.seq_lens_cpu = ends_cpu
        forward_batch.seq_lens_sum = int(ends_cpu.sum())


def most_likely(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The tokens of the largest logits of each row, and by how much: their softmax.

    Of a greedy request's logits that is the draft's probability. Where noise is added, it says how far ahead of the others
    a token is in the race that the target runs, too (acceptance/noise.py).

    Args:
        logits: [rows, vocab].
    Returns:
        tokens [rows, count] int64, probs [rows, count] float32.
    """
    if count == 1:
        top, tokens = logits.max(dim=-1, keepdim=True)
        return tokens, (logits - top).float().exp_().sum(dim=-1, keepdim=True).reciprocal_()
    top, tokens = logits.topk(count, dim=-1)
    return tokens, (top.float() - logits.float().logsumexp(dim=-1, keepdim=True)).exp_()
