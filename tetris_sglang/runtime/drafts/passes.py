"""The passes of a draft model: one over each request's window, the others over one token per request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.runtime_context import get_model
from sglang.srt.speculative.eagle_info import EagleDraftInput
from torch import Tensor

from tetris_sglang.acceptance import RequestNoise
from tetris_sglang.drafting import ChainGrower, CombGrower, Grower, Proposal
from tetris_sglang.drafting.vocabulary import VocabularyMap
from tetris_sglang.runtime.drafts.spec import DraftSpec
from tetris_sglang.runtime.drafts.windows import Window, make_window_input, narrow_window
from tetris_sglang.runtime.host_copy import know_lengths
from tetris_sglang.runtime.request_texts import RequestTexts
from tetris_sglang.texts import Calibrate, Match


class Places(NamedTuple):
    """Where the passes of a step write, per request."""

    window_positions: Tensor
    """[batch, width] int64."""
    window_slots: Tensor
    """[batch, width] int64; the padding slot 0 for what is not real."""
    next_positions: Tensor
    """[batch] int64, the position after the window's."""
    next_slots: Tensor
    """[batch, depth - 1] int64, of the passes behind it."""


class DraftPasses:
    """Plans and runs a draft model's passes.

    Args:
        worker: SGLang's draft worker.
        estimate: what the draft's probabilities are worth.
        perturb: as acceptance.noise.perturb, for the device.
        texts: where matches are looked up; None: drafts are scored without.
        vocab_size: of the target. vocabulary: the draft's own, where it is not the target's.
    """

    def __init__(
        self,
        worker,
        spec: DraftSpec,
        estimate: Calibrate,
        perturb: Callable[..., Tensor],
        texts: RequestTexts | None,
        vocab_size: int,
        vocabulary: VocabularyMap | None = None,
    ) -> None:
        self.worker, self.spec, self.texts = worker, spec, texts
        self.runner = worker.draft_runner
        self._estimate, self._perturb = estimate, perturb
        self._vocab_size, self._vocabulary = vocab_size, vocabulary

    @property
    def depths(self) -> Sequence[int]:
        """See `Draft`."""
        return range(1, self.spec.num_steps + 1)

    def know_lengths(self, batch) -> None:
        """Let the host have the batch's lengths, if it plans the draft's passes."""
        backends = self.runner.attn_backend, self.worker.draft_attn_backend
        if any(backend is not None and getattr(backend, "needs_cpu_seq_lens", True) for backend in backends):
            know_lengths(batch)

    def propose(self, batch, window: Window, noise: RequestNoise | None, depth: int) -> Proposal:
        """Plan and run a step's passes.

        Args:
            batch, depth: as in `Draft.propose`. window: complete but for what these passes write.
            noise: as in `run`.
        """
        if self.spec.keeps_kv:
            window = window._replace(counts=None)
        elif self.runner.device == "cpu":
            window = narrow_window(window)
        places = self.locate(window, batch.seq_lens, batch.req_pool_indices, depth)
        extra = 1 - self.spec.shift
        ends = batch.seq_lens + extra
        ends_cpu = None if batch.seq_lens_cpu is None else batch.seq_lens_cpu + extra
        first = self.plan_window(batch, window, places.window_positions, places.window_slots, ends, ends_cpu)
        rest = self.plan_rest(batch, places, ends, ends_cpu) if depth > 1 else None
        match = self.find_match(batch.req_pool_indices, depth)
        return self.run(first, rest, window, places, noise, match, depth, self.forward)

    def read(self, tokens: Tensor) -> Tensor:
        """The target's `tokens` as the draft reads them."""
        return tokens if self._vocabulary is None else self._vocabulary.read[tokens]

    def locate(self, window: Window, seq_lens: Tensor, req_pool_indices: Tensor, depth: int) -> Places:
        """Where the passes of a step write; see `Places`. Shapes depend on the arguments' shapes alone."""
        counts, device = window.counts, seq_lens.device
        width = window.tokens.shape[1]
        table = self.runner.req_to_token_pool.req_to_token
        end = seq_lens + 1 - self.spec.shift
        offsets = torch.arange(width, device=device) - width
        positions = (end[:, None] + offsets).clamp_(min=0)
        rows = req_pool_indices[:, None]
        slots = table[rows, positions].to(torch.int64)
        if counts is not None:
            slots = torch.where(offsets >= -counts[:, None], slots, 0)
        columns = end[:, None] + torch.arange(depth - 1, device=device)
        return Places(positions, slots, end, table[rows, columns].to(torch.int64))

    def find_match(self, rows: Tensor, depth: int) -> Match | None:
        """Of the requests in these slots [batch], as deep as `depth` passes draft; see `RecentTexts.find`."""
        return None if self.texts is None else self.texts.recent.find(rows, depth)

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
            forward: (forward_batch, attention backend) -> LogitsProcessorOutput of one row per request.
        """
        first.input_ids = window.tokens.reshape(-1)
        first.positions = places.window_positions.reshape(-1)
        first.out_cache_loc = places.window_slots.reshape(-1)
        output = forward(first, self.runner.attn_backend)
        # Drawn with after the token before.
        positions = places.next_positions + (self.spec.shift - 1)
        num_children = self.spec.num_children
        tokens, probs, law = self._choose(output.next_token_logits, noise, positions, num_children)
        laws = [law]
        grower: Grower = (ChainGrower if num_children == 1 else CombGrower)(tokens, probs, self._estimate, match)
        step_slots = places.next_slots.T.contiguous()
        backends: Sequence = self.worker.draft_attn_backend.attn_backends if depth > 1 else ()
        for step, backend in zip(range(depth - 1), backends, strict=False):
            rest.input_ids = grower.frontier_tokens.reshape(-1)
            rest.positions = places.next_positions + step
            rest.out_cache_loc = step_slots[step]
            if output.hidden_states is not None:
                rest.spec_info.hidden_states = output.hidden_states
            output = forward(rest, backend)
            positions = positions + 1
            tokens, probs, law = self._choose(output.next_token_logits, noise, positions, num_children)
            laws.append(law)
            grower.grow(tokens, probs)
        proposal = grower.finish(self.spec.count_nodes(depth))
        return proposal if law is None else proposal._replace(draft_probs=torch.stack(laws, dim=1))

    def _choose(
        self, logits: Tensor, noise: RequestNoise | None, positions: Tensor, count: int
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The `count` tokens to offer in each row, in the target's vocabulary, and how likely they are.

        Of drawn drafts selection may know nothing that depends on what was drawn (acceptance/recursive.py): the
        probabilities are then the law's largest ones, whichever tokens were drawn.

        Args:
            noise, positions: [rows]; see `Acceptance.draft_noise`.
        Returns:
            tokens, probs: as `most_likely`. law: [rows, vocab of the target], where drafts are drawn from it.
        """
        token_ids, law = self.worker.hot_token_id, None
        if self._vocabulary is not None:
            token_ids, logits = self._vocabulary.target_tokens, logits.index_select(1, self._vocabulary.draft_tokens)
        if noise is None:
            tokens, probs = most_likely(logits, count)
        elif not self.spec.draws:
            tokens, probs = most_likely(self._perturb(logits, noise, positions, token_ids), count)
        else:
            tokens = self._perturb(logits, noise, positions, token_ids).topk(count, dim=-1).indices
            law = self._law(logits, noise)
            greedy = most_likely(logits, count)[1]
            probs = torch.where(noise.scales[:, None] == 0, greedy, law.topk(count, dim=-1).values)
            if token_ids is not None:
                law = law.new_zeros(len(law), self._vocab_size).index_copy_(1, token_ids, law)
        return tokens if token_ids is None else token_ids[tokens], probs, law

    def _law(self, logits: Tensor, noise: RequestNoise) -> Tensor:
        """[rows, vocab] float32, what each row's token is drawn from; a greedy request's has one token."""
        scales = noise.scales[:, None]
        law = (logits.float() / scales.clamp(min=1e-5)).softmax(dim=-1)
        best = torch.zeros_like(law).scatter_(1, logits.argmax(dim=-1, keepdim=True), 1.0)
        return torch.where(scales == 0, best, law)

    def forward(self, forward_batch: ForwardBatch, backend):
        """One pass over a planned batch.

        Without `ModelRunner.forward` around it: copying the batch into static buffers and choosing a runner cost as much as
        the products of a small draft's pass (docs/lessons.md).
        """
        model = self.runner.model
        with (
            get_model().override(shared_experts=model.shared_experts_config),
            forward_context(ForwardContext(attn_backend=backend), forward_batch=forward_batch),
        ):
            return model.forward(self.read(forward_batch.input_ids), forward_batch.positions, forward_batch)

    def plan_window(
        self,
        batch,
        window: Window,
        positions: Tensor,
        slots: Tensor,
        ends: Tensor,
        ends_cpu: Tensor | None,
        has_attention: bool = True,
    ) -> ForwardBatch:
        """Plan a pass over `window` at `positions` [batch, width], which writes to `slots` [batch, width].

        Args:
            ends: [batch], the draft's KV lengths after the pass, and the same on the host if it knows them.
            has_attention: what has to be planned.
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
            self.runner,
            capture_hidden_mode=self.spec.hidden_mode,
            return_hidden_states_before_norm=False,
        )
        forward_batch.return_logprob = False
        forward_batch.extend_seq_lens_cpu = [width] * batch_size
        _set_lengths(forward_batch, ends, ends_cpu)
        if ends_cpu is not None:
            # Below zero where a request is shorter than its window: the first rows are not real and see nothing.
            forward_batch.extend_prefix_lens_cpu = (forward_batch.seq_lens_cpu - width).tolist()
        if has_attention:
            self.runner.attn_backend.init_forward_metadata(forward_batch)
        forward_batch.mark_forward_metadata_ready()
        return forward_batch

    def plan_rest(self, batch, places: Places, ends: Tensor, ends_cpu: Tensor | None) -> ForwardBatch:
        """Plan the attention of all further passes at once, as SGLang's multi-step draft backends do.

        Args:
            ends: as in `plan_window`.
        """
        batch.forward_mode = ForwardMode.DECODE
        batch.input_ids = None
        batch.out_cache_loc = places.next_slots.reshape(-1)
        batch.spec_info = EagleDraftInput(
            num_tokens_per_req=1,
            num_tokens_for_logprob_per_req=1,
            capture_hidden_mode=self.spec.hidden_mode,
        )
        forward_batch = ForwardBatch.init_new(
            batch,
            self.runner,
            capture_hidden_mode=self.spec.hidden_mode,
            return_hidden_states_before_norm=False,
        )
        forward_batch.return_logprob = False
        _set_lengths(forward_batch, ends, ends_cpu)
        # FlashInfer's planner reads the lengths from here.
        forward_batch.positions = places.next_positions
        self.worker.draft_attn_backend.init_forward_metadata(forward_batch)
        forward_batch.mark_forward_metadata_ready()
        return forward_batch


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
