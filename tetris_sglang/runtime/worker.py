"""The TETRIS worker: draft for every request, select batch-wide, verify in one ragged pass, accept, commit.

Whatever drafts (`runtime/drafts/model.py`, `runtime/drafts/ngram.py`) answers the same few questions: `prefill`, `propose`, `after_verify`.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import replace

import torch
from sglang.srt.layers.moe.utils import speculative_moe_a2a_backend_context, speculative_moe_backend_context
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.runtime_context import get_device, get_parallel, get_schedule, get_spec
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_utils import draft_tp_context
from sglang.srt.speculative.standalone_worker_v2 import StandaloneWorkerV2
from torch import Tensor

from tetris_sglang.capacity import (
    AcceptCurves,
    AutoCapacity,
    CapacityPolicy,
    DraftLimits,
    FixedCapacity,
    StepTimeModel,
    capacity_shares,
)
from tetris_sglang.config import TetrisConfig
from tetris_sglang.drafting import Grid, TreeShape, make_grid
from tetris_sglang.estimates import Calibration, EvidenceOffsets
from tetris_sglang.estimates.estimator import AcceptanceLearner
from tetris_sglang.runtime.drafts.kind import HEADS, NGRAM, STANDALONE, current_kind
from tetris_sglang.runtime.drafts.model import HeadDraft, StandaloneDraft
from tetris_sglang.runtime.drafts.ngram import NgramDraft
from tetris_sglang.runtime.inventory import verify_landed
from tetris_sglang.runtime.kv_moves import check_kv_pool
from tetris_sglang.runtime.logits import count_written
from tetris_sglang.runtime.operations import get_operations, warm_up
from tetris_sglang.runtime.planning.pass_timing import load_or_time_passes
from tetris_sglang.runtime.planning.planner import StepPlanner
from tetris_sglang.runtime.ranks import Ranks
from tetris_sglang.runtime.reports.metrics import StepMetrics
from tetris_sglang.runtime.reports.phases import PhaseTimer
from tetris_sglang.runtime.reports.recording import StepRecorder
from tetris_sglang.runtime.requests.options import RequestWeights, combine_weights
from tetris_sglang.runtime.requests.seeds import RequestSeeds, install_sampler
from tetris_sglang.runtime.texts import RequestTexts
from tetris_sglang.runtime.verify import (
    commit_paths,
    compute_logprobs,
    forward_target,
    graph_tier,
    make_grammar_tree,
    sample_target,
)
from tetris_sglang.selection import RequestPace
from tetris_sglang.texts import INITIAL_OFFSETS

logger = logging.getLogger(__name__)


class TetrisWorker(BaseSpecWorker):
    """SGLang's speculative worker interface (the V2 schema, overlap or not) for TETRIS on any draft."""

    def __init__(self, server_args, gpu_id, nccl_port, target_worker) -> None:
        super().__init__()
        verify_landed()
        self.server_args = server_args
        self.device = get_device().device
        self.page_size = get_schedule().page_size
        self.speculative_algorithm = SpeculativeAlgorithm.from_string(get_spec().speculative_algorithm)
        self.speculative_num_steps = get_spec().speculative_num_steps
        self.speculative_num_draft_tokens = get_spec().speculative_num_draft_tokens
        self.config = TetrisConfig.from_environment(self.speculative_num_steps)
        self._operations = get_operations(self.device, self.config.selection)
        self.phases = PhaseTimer(enabled=self.config.phase_times, on_cuda=self.device == "cuda")
        self._ranks = Ranks(get_parallel().tp_group)
        # What only the first rank may have: a file, and a clock.
        alike = replace(self.config, record=None, phase_times=False)
        self._ranks.require_alike((alike, current_kind()), "TETRIS's settings")
        self.metrics = StepMetrics(self._ranks.is_first)
        self._request_weights = RequestWeights(self.device)

        self._target_worker = target_worker
        kind = current_kind()
        if kind == NGRAM:
            self._draft_worker = None
            self._draft = NgramDraft()
        else:
            worker_class = HeadDraft if kind in HEADS else StandaloneDraft
            self._draft = self._draft_worker = worker_class(server_args, gpu_id, nccl_port, target_worker)
        self.learner = self.recorder = self._pace = None
        if kind == STANDALONE:
            StandaloneWorkerV2._validate_vocab_compatibility(
                self,
                target_vocab_size=target_worker.model_runner.model_config.vocab_size,
                target_tokenizer=target_worker.tokenizer,
            )
        logger.info("TETRIS: %s draft, %s", kind, self.config)

    # -- what SGLang asks of a speculative worker ------------------------------------------------------------------

    @property
    def draft_parallel_layout(self):
        return None if self._draft_worker is None else self._draft_worker.parallel_layout

    @property
    def spec_v2_attn_backends(self) -> tuple:
        draft = self._draft_worker
        if draft is None:
            return super().spec_v2_attn_backends
        return (
            self._target_worker.model_runner.attn_backend,
            draft.draft_attn_backend,
            draft.draft_extend_attn_backend or draft.draft_runner.attn_backend,
        )

    def alloc_memory_pool(self, **pools) -> None:
        super().alloc_memory_pool(**pools)
        if get_spec().speculative_eagle_topk > 1 and self.device == "cuda":
            check_kv_pool(self._target_worker.model_runner.token_to_kv_pool)
            check_kv_pool(self._draft_worker.draft_runner.token_to_kv_pool)
        pool = self._target_worker.model_runner.req_to_token_pool
        are_searched = self._draft_worker is None or self.config.calibration
        self._texts = RequestTexts(
            pool,
            self._target_worker.model_runner.model_config.vocab_size,
            self.speculative_num_draft_tokens,
            are_searched,
            self.config.shared_texts,
        )
        # The worker's, which is resolved and the same on all ranks; the arguments have what was given.
        self._seeds = RequestSeeds(
            len(pool.req_to_token), self._target_worker.random_seed, get_parallel().dp_rank, self.device
        )
        install_sampler(self._target_worker.model_runner, self._operations.draw)
        if are_searched:
            self._draft.texts = self._texts
        if self._draft_worker is not None:
            self._draft.alloc_missed(pool, self._ranks)
            self._draft.perturb = self._operations.perturb
        if self.config.calibration:
            self.learner = AcceptanceLearner(
                Calibration(
                    self.speculative_num_steps + self._draft.num_extension, self.device, refresh_every=1
                ),
                EvidenceOffsets(INITIAL_OFFSETS, self.device),
            )
            self._draft.calibrate = self.learner.calibrate
        if self.config.fairness:
            self._pace = RequestPace(len(pool.req_to_token), self.config.fairness, self.device)
        if self.config.record is not None and self._ranks.is_first:
            self.recorder = StepRecorder(
                self.config,
                draft=current_kind(),
                topk=get_spec().speculative_eagle_topk,
                num_nodes=self._draft.count_nodes(self.speculative_num_steps),
                num_extension=self._draft.num_extension,
                num_slots=len(pool.req_to_token),
                device=self.device,
            )

    def init_cuda_graphs(self) -> None:
        super().init_cuda_graphs()
        limits = self._make_limits()
        if self.device == "cuda":
            pool = self._target_worker.model_runner.req_to_token_pool
            warm_up(
                self._operations,
                pool.size,
                sorted({limits.count_nodes(depth) for depth in limits.depths}),
                self.speculative_num_draft_tokens,
                pool.req_to_token,
            )
        self.planner = StepPlanner(self._make_policy(), limits, self.metrics, self.device, self._ranks)

    def forward_batch_generation(self, batch, on_publish=None, grammar_barrier=None, pp_proxy_tensors=None):
        """Run one scheduler iteration: a prefill, or one draft-select-verify step."""
        if batch.forward_mode.is_extend() or batch.is_extend_in_batch:
            return self._prefill(batch, on_publish)
        return self._step(batch, on_publish, grammar_barrier)

    def on_verify_complete_cpu(self, num_correct_drafts_per_req: list[int], batch_size: int = 0) -> None:
        accepted = sum(num_correct_drafts_per_req)
        self.metrics.count_accepted(accepted)
        self.planner.after_result(accepted)
        if self.recorder is not None:
            self.recorder.write()

    def clear_cache_pool(self) -> None:
        """SGLang's cache is flushed: what requests wrote goes with it."""
        self._texts.forget()

    # -- the two kinds of iteration --------------------------------------------------------------------------------

    def _prefill(self, batch, on_publish) -> GenerationBatchResult:
        self._request_weights.add_prefilled(batch.reqs)
        self._seeds.add_prefilled(batch.reqs, batch.req_pool_indices)
        self._seeds.give(batch)
        if self.recorder is not None:
            self.recorder.add_prefilled(batch.reqs, batch.req_pool_indices)
        if self._pace is not None:
            self._pace.forget(batch.req_pool_indices)
        # SGLang may rebind batch fields during the target's pass; the draft reads the same tokens.
        input_ids = batch.input_ids
        count_written(batch)
        self.planner.after_prefill()
        result = self._target_worker.forward_batch_generation(
            batch, capture_hidden_mode=self._draft.target_hidden_mode, return_kv_loc_plan=True
        )
        (result.next_token_ids,) = self._ranks.share([result.next_token_ids])
        kv_loc_plan, result.kv_loc_plan = result.kv_loc_plan, None
        result.new_seq_lens = batch.seq_lens
        if on_publish is not None:
            on_publish(result.new_seq_lens)
        hidden_states, result.logits_output.hidden_states = result.logits_output.hidden_states, None
        self._texts.add_prompts(batch, result.next_token_ids)
        with self._draft_context():
            result.next_draft_input = self._draft.prefill(
                batch, input_ids, hidden_states, result.next_token_ids, kv_loc_plan
            )
        return result

    def _step(self, batch, on_publish, grammar_barrier) -> GenerationBatchResult:
        self.phases.begin_step()
        seq_lens, batch_size = batch.seq_lens, len(batch.reqs)
        req_to_token = batch.req_to_token_pool.req_to_token
        draft_input = batch.spec_info
        roots = draft_input.bonus_tokens
        self._seeds.give(batch)

        adjustment = self._request_weights.adjust(batch.reqs)
        plan = self.planner.plan(batch, batch_size if adjustment is None else adjustment.num_speculating)
        depth, capacity_tokens = plan
        num_tokens = batch_size + capacity_tokens
        tier = self._fit_rows(batch_size, num_tokens)
        proposal = draft_lens = None
        if capacity_tokens:
            with self.phases("draft"), self._draft_context():
                proposal = self._draft.propose(batch, depth)

        with self.phases("select"):
            if proposal is not None:
                pace_weights = None if self._pace is None else self._pace.weights(batch.req_pool_indices)
                weights = combine_weights(pace_weights, adjustment)
                self.planner.after_draft(
                    proposal, plan, weights, 1.0 if adjustment is None else adjustment.mean_weight
                )
                draft_lens = self._operations.select_drafts(proposal, capacity_tokens, weights)
            # SGLang reads results in rows of a fixed width.
            max_depth = depth + self._draft.num_extension if capacity_tokens else 0
            max_drafts = min(max_depth, capacity_tokens)
            grid = make_grid(roots, proposal, max_depth, self.speculative_num_draft_tokens)
            if draft_lens is not None:
                draft_lens, grid = self._share_drafts(draft_lens, grid)
            packed = self._operations.pack_grid(
                draft_lens, grid, seq_lens, req_to_token, batch.req_pool_indices, tier or num_tokens
            )
            if grid.shape is not None:
                # Read before the scheduler may give a finished request's row to another one.
                columns = seq_lens[:, None] + torch.arange(grid.tokens.shape[1], device=seq_lens.device)
                grid_slots = req_to_token[batch.req_pool_indices[:, None], columns].to(torch.int64)

        # Copied to the host while the target's pass runs.
        grammar_tree = make_grammar_tree(grid) if batch.has_grammar else None
        with self.phases("verify"):
            forward_batch, target_result = forward_target(
                batch,
                self._target_worker,
                packed,
                grid,
                self._draft.target_hidden_mode,
                max_drafts=max_drafts if tier is None else None,
            )
            logits_output = target_result.logits_output

        with self.phases("sample"):
            tokens, logprob_logits = sample_target(
                batch,
                self._target_worker.model_runner.sampler,
                logits_output,
                grid,
                packed,
                num_tokens,
                self._texts,
                grammar_tree,
                grammar_barrier,
            )
            (tokens,) = self._ranks.share([tokens])
            accepted = self._operations.accept_grid(tokens, packed, grid, seq_lens)
            if accepted.path is not None:
                kv_pool = self._target_worker.model_runner.token_to_kv_pool
                commit_paths(kv_pool, grid_slots, accepted.path, accepted.accept_lens)
            if on_publish is not None:
                # The next step waits for this, and for nothing that follows.
                on_publish(accepted.new_seq_lens)
            if logprob_logits is not None:
                compute_logprobs(batch, logits_output, logprob_logits, accepted, packed, max_drafts)
            accept_lens = accepted.accept_lens + 1  # SGLang counts the bonus token in
            hidden_states, logits_output.hidden_states = logits_output.hidden_states, None
            self._texts.append(batch, accepted.target_tokens[:, : max_drafts + 1], accept_lens)
            rows = batch.req_pool_indices
            if self.recorder is not None:
                self.recorder.add(proposal, grid, accepted, packed.verify_lens, rows, depth)
            if self._pace is not None and capacity_tokens:
                # A plain step is as fast for everybody.
                self._pace.observe(rows, accept_lens)
            if proposal is not None and self.learner is not None:
                self.learner.add(proposal, grid, accepted, packed.verify_lens)
            if depth:
                next_draft_input = self._draft.after_verify(
                    batch, accepted, hidden_states, packed.qo_indptr, depth
                )
            else:
                with self._draft_context():
                    next_draft_input = self._draft.after_undrafted(
                        batch, draft_input, accepted, hidden_states, packed.qo_indptr, max_drafts
                    )
        num_drafted = 0 if proposal is None else proposal.tokens.shape[1]
        self.metrics.count_step(
            batch_size=batch_size,
            depth=depth,
            drafted=batch_size * num_drafted,
            selected=capacity_tokens,
            verified_rows=int(forward_batch.input_ids.shape[0]),
        )
        self.phases.end_step()
        return GenerationBatchResult(
            logits_output=logits_output,
            next_token_ids=accepted.target_tokens.reshape(-1),
            speculative_num_draft_tokens=self.speculative_num_draft_tokens,
            next_draft_input=next_draft_input,
            accept_lens=accept_lens,
            cap_lens=packed.verify_lens,
            # SGLang sums this per request, for DSPARK alone; here it carries the drafted tokens (runtime/reports/metrics.py).
            block_accept_lens=torch.full_like(accept_lens, num_drafted),
            new_seq_lens=accepted.new_seq_lens,
            can_run_cuda_graph=target_result.can_run_cuda_graph,
            routed_experts_output=target_result.routed_experts_output,
            indexer_topk_output=target_result.indexer_topk_output,
            extra_keep_alive_refs=[forward_batch],
        )

    def _share_drafts(self, draft_lens: Tensor, grid: Grid) -> tuple[Tensor, Grid]:
        """What all ranks verify."""
        # The tokens first: kernels are compiled for aligned ones.
        tokens, *shape, draft_lens = self._ranks.share([grid.tokens, *(grid.shape or ()), draft_lens])
        return draft_lens, Grid(tokens, grid.max_depth, TreeShape(*shape) if shape else None)

    @contextlib.contextmanager
    def _draft_context(self):
        if self._draft_worker is None:
            yield
            return
        with (
            draft_tp_context(self._draft_worker.parallel_layout),
            speculative_moe_backend_context(),
            speculative_moe_a2a_backend_context(),
        ):
            yield

    # -- planning --------------------------------------------------------------------------------------------------

    def _make_limits(self) -> DraftLimits:
        num_steps, num_extension = self.speculative_num_steps, self._draft.num_extension
        depths = range(1, num_steps + 1) if self._draft_worker is None else self._draft_worker.depths
        return DraftLimits(
            depths=[0, *depths] if num_extension else depths,
            count_nodes=self._draft.count_nodes,
            fit_rows=self._fit_rows,
            num_extension=num_extension,
        )

    def _make_policy(self) -> CapacityPolicy:
        config = self.config
        if not config.capacity_is_automatic:
            return FixedCapacity(per_request=config.capacity_per_request, absolute=config.capacity_tokens)
        max_batch_size = self._target_worker.model_runner.req_to_token_pool.size
        max_rows = max_batch_size * self.speculative_num_draft_tokens
        seed = load_or_time_passes(
            self._target_worker,
            self._draft_worker,
            num_draft_tokens=self.speculative_num_draft_tokens,
            max_rows=max_rows,
            ranks=self._ranks,
        )
        num_nodes = self._draft.count_nodes(self.speculative_num_steps)
        return AutoCapacity(
            StepTimeModel(seed, max_rows=max_rows, max_batch_size=max_batch_size),
            AcceptCurves(self.speculative_num_steps, capacity_shares(num_nodes)),
        )

    def _fit_rows(self, batch_size: int, rows: int) -> int | None:
        """The rows of the target's graph that takes `rows`; None where the pass has as many as there are."""
        return graph_tier(self._target_worker, batch_size, rows) if self.device == "cuda" else None
