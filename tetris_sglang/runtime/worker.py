"""TETRIS's speculative worker: what SGLang asks of one, and the parts of a step put together."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.runtime_context import get_device, get_parallel, get_schedule, get_spec
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

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
from tetris_sglang.drafting.vocabulary import VocabularyMap
from tetris_sglang.estimates.estimator import AcceptanceEstimator
from tetris_sglang.observers import Observer
from tetris_sglang.runtime.acceptance_rules import Acceptance, CoupledAcceptance, DrawnAcceptance
from tetris_sglang.runtime.drafts.base import Draft
from tetris_sglang.runtime.drafts.dflash import BlockKV, BlockPasses
from tetris_sglang.runtime.drafts.kind import DFLASH, HEADS, NGRAM, STANDALONE, current_kind
from tetris_sglang.runtime.drafts.kv import ModelKV
from tetris_sglang.runtime.drafts.model import ModelDraft
from tetris_sglang.runtime.drafts.ngram import NgramDraft
from tetris_sglang.runtime.drafts.passes import DraftPasses
from tetris_sglang.runtime.drafts.replacement import DraftReplacer
from tetris_sglang.runtime.drafts.spec import DraftSpec
from tetris_sglang.runtime.drafts.tokenizers import find_vocabulary
from tetris_sglang.runtime.drafts.workers import WORKERS
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
from tetris_sglang.runtime.reports.traffic import TextRecorder
from tetris_sglang.runtime.request_texts import RequestTexts
from tetris_sglang.runtime.requests.seeds import RequestSeeds, install_sampler
from tetris_sglang.runtime.requests.weights import RequestWeights
from tetris_sglang.runtime.step import StepRunner
from tetris_sglang.runtime.verify import graph_tier
from tetris_sglang.texts import trust

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
        self._kind = current_kind()
        self._ranks = Ranks(get_parallel().tp_group)
        # What only the first rank may have: a file, and a clock.
        alike = replace(self.config, record=None, record_text=None, phase_times=False)
        self._ranks.require_alike((alike, self._kind), "TETRIS's settings")

        self._target_worker = target_worker
        self._draft_worker = self._replacer = None
        if self._kind != NGRAM:
            self._draft_worker = WORKERS[self._kind](server_args, gpu_id, nccl_port, target_worker)
            self._replacer = DraftReplacer(self._draft_worker, target_worker.model_runner.model)
        self._vocabulary = self._find_vocabulary() if self._kind == STANDALONE else None
        logger.info("TETRIS: %s draft, %s", self._kind, self.config)

    # -- what SGLang asks of a speculative worker ------------------------------------------------------------------

    @property
    def draft_parallel_layout(self):
        return None if self._draft_worker is None else self._draft_worker.parallel_layout

    @property
    def spec_v2_attn_backends(self) -> tuple:
        """Those for which SGLang keeps lengths on the host; the draft asks for them itself where its are (`know_lengths`)."""
        return (self._target_worker.model_runner.attn_backend,)

    def alloc_memory_pool(self, **pools) -> None:
        """The pools are there: all that keeps something for every request is made."""
        super().alloc_memory_pool(**pools)
        runner, config = self._target_worker.model_runner, self.config
        spec = self._spec = DraftSpec(
            self.speculative_num_steps,
            self.speculative_num_draft_tokens,
            reads_hidden_states=self._kind in HEADS,
            draws=config.draws_drafts,
        )
        if spec.num_children > 1 and self.device == "cuda":
            check_kv_pool(runner.token_to_kv_pool)
        num_slots = len(runner.req_to_token_pool.req_to_token)
        self._operations = get_operations(self.device, config.selection)
        # The worker's seed, which is resolved and the same on all ranks; the arguments have what was given.
        self._seeds = RequestSeeds(num_slots, self._target_worker.random_seed, get_parallel().dp_rank, self.device)
        sampler = install_sampler(runner, self._operations.draw, keeps_laws=config.draws_drafts)
        self._acceptance: Acceptance = CoupledAcceptance(self._operations)
        if config.draws_drafts:
            is_block = config.acceptance == "block"
            self._acceptance = DrawnAcceptance(self._operations, sampler, is_block, spec.num_children)
        self._texts = RequestTexts(
            runner.req_to_token_pool,
            runner.model_config.vocab_size,
            self.speculative_num_draft_tokens,
            are_searched=self._kind == NGRAM or config.calibration,
            are_shared=config.shared_texts,
        )
        self._weights = RequestWeights(self.device)
        self._metrics = StepMetrics(self.speculative_num_steps, self._ranks.is_first)
        steps_together = 1 if self.device == "cuda" else 8  # captured there
        self._estimator = AcceptanceEstimator(spec.num_steps, self.device, steps_together) if config.calibration else None
        self._draft = self._make_draft(spec)
        self._recorder = self._make_recorder(num_slots)
        self._text_recorder: TextRecorder | None = None
        if config.record_text is not None and self._ranks.is_first:
            self._text_recorder = TextRecorder(config.record_text, get_parallel().dp_rank)

    def _find_vocabulary(self) -> VocabularyMap | None:
        runners = self._target_worker.model_runner, self._draft_worker.draft_runner
        sizes = (runner.model_config.vocab_size for runner in runners)
        vocabulary = find_vocabulary(self.server_args, *sizes)
        return None if vocabulary is None else vocabulary.to(self.device)

    def _make_draft(self, spec: DraftSpec) -> Draft:
        estimate = self._estimator or trust
        if self._kind == NGRAM:
            return NgramDraft(spec.num_steps, self._texts, estimate)
        target, perturb = self._target_worker.model_runner, self._operations.perturb
        # What a drawn token has in common with a match must not reach selection.
        texts = self._texts if self.config.calibration and not self.config.draws_drafts else None
        passes: DraftPasses
        if self._kind == DFLASH:
            passes = BlockPasses(self._draft_worker, target, spec, estimate, perturb, texts)
            return ModelDraft(passes, BlockKV(passes), target, self._acceptance)
        vocab_size = target.model_config.vocab_size
        passes = DraftPasses(self._draft_worker, spec, estimate, perturb, texts, vocab_size, self._vocabulary)
        return ModelDraft(passes, ModelKV(passes), target, self._acceptance)

    def _make_recorder(self, num_slots: int) -> StepRecorder | None:
        if self.config.record is None or not self._ranks.is_first:
            return None
        return StepRecorder(
            self.config,
            draft=self._kind,
            num_nodes=self._draft.count_nodes(self.speculative_num_steps),
            num_slots=num_slots,
            device=self.device,
        )

    def init_cuda_graphs(self) -> None:
        """The attention backends are there: passes run, are captured and timed, and steps can."""
        super().init_cuda_graphs()
        graph_runner = self._target_worker.model_runner.decode_cuda_graph_runner  # None on a CPU, or without graphs
        batch_sizes = [] if graph_runner is None else graph_runner.capture_bs
        num_nodes = self._draft.count_nodes(self.speculative_num_steps)
        self._draft.capture(batch_sizes, capacity_shares(num_nodes) if self.config.capacity_is_automatic else None)
        limits = self._make_limits()
        if self.device == "cuda":
            runner = self._target_worker.model_runner
            warm_up(
                self._operations,
                runner.req_to_token_pool.size,
                sorted({limits.count_nodes(depth) for depth in limits.depths}),
                self.speculative_num_draft_tokens,
                self._spec.num_children > 1,
                runner.req_to_token_pool.req_to_token,
                runner.token_to_kv_pool,
            )
        phases = PhaseTimer(self.config.phase_times, self._metrics.count_phase, on_cuda=self.device == "cuda")
        self._planner = StepPlanner(self._make_policy(), limits, self._metrics, self.device, self._ranks)
        self._observers = self._make_observers(batch_sizes)
        self._steps = StepRunner(
            self._target_worker,
            self.speculative_num_draft_tokens,
            planner=self._planner,
            draft=self._draft,
            weights=self._weights,
            operations=self._operations,
            acceptance=self._acceptance,
            texts=self._texts,
            ranks=self._ranks,
            phases=phases,
            observers=self._observers,
        )
        reports = (self._metrics, self._planner, self._estimator, phases)
        self.tetris_reports = [report for report in reports if report is not None]
        """What /server_info shows (runtime/reports/metrics.py)."""

    def _make_observers(self, batch_sizes: Sequence[int]) -> list[Observer]:
        learners = [learner for learner in (self._texts, self._weights, self._estimator) if learner is not None]
        reporters = [each for each in (self._recorder, self._text_recorder, self._metrics) if each is not None]
        if not batch_sizes:
            return [*learners, *reporters]
        from tetris_sglang.runtime.cuda.captured_observers import CapturedObservers

        captured = CapturedObservers(
            learners,
            self._texts,
            batch_sizes=batch_sizes,
            width=self.speculative_num_draft_tokens,
            max_depth=self.speculative_num_steps,
            has_combs=self._spec.num_children > 1,
            has_evidence=self._estimator is not None and not self.config.draws_drafts,
            device=self.device,
        )
        return [captured, *reporters]

    def forward_batch_generation(self, batch, on_publish=None, grammar_barrier=None, pp_proxy_tensors=None):
        """Run one scheduler iteration: a prefill, or one step."""
        if batch.forward_mode.is_extend() or batch.is_extend_in_batch:
            self._seeds.add_prefilled(batch.reqs, batch.req_pool_indices)
            self._seeds.give(batch)
            return self._prefill(batch, on_publish)
        self._seeds.give(batch)
        return self._steps.run(batch, on_publish, grammar_barrier)

    def on_verify_complete_cpu(self, num_correct_drafts_per_req: list[int], batch_size: int = 0) -> None:
        self._metrics.count_accepted(num_correct_drafts_per_req)
        self._planner.after_result(sum(num_correct_drafts_per_req))
        if self._recorder is not None:
            self._recorder.write()

    def note_request_finished(self, *, rid: str, natural_stop: bool) -> None:
        if self._text_recorder is not None:
            self._text_recorder.finish(rid)

    def replace_draft(self, model_path: str, load_format: str) -> tuple[bool, str]:
        """See `drafts/replacement.py`; whether it was done, and what to tell."""
        if self._replacer is None:
            return (
                False,
                f"model_path {model_path}: this server drafts from texts, and has no draft to replace. Start one with it",
            )
        success, message = self._replacer.replace(model_path, load_format)
        if success:
            self._planner.forget()
            if self._estimator is not None:
                self._estimator.forget()
        return success, message

    def clear_cache_pool(self) -> None:
        """SGLang's cache is flushed: what requests wrote goes with it."""
        self._texts.forget()

    def _prefill(self, batch, on_publish) -> GenerationBatchResult:
        # SGLang may rebind batch fields during the target's pass; the draft reads the same tokens.
        input_ids = batch.input_ids
        count_written(batch)
        self._planner.after_prefill()
        result = self._target_worker.forward_batch_generation(
            batch, capture_hidden_mode=self._draft.target_hidden_mode, return_kv_loc_plan=True
        )
        (result.next_token_ids,) = self._ranks.share([result.next_token_ids])
        kv_loc_plan, result.kv_loc_plan = result.kv_loc_plan, None
        result.new_seq_lens = batch.seq_lens
        if on_publish is not None:
            on_publish(result.new_seq_lens)
        hidden_states, result.logits_output.hidden_states = result.logits_output.hidden_states, None
        for observer in self._observers:
            observer.begin(batch, result.next_token_ids)
        result.next_draft_input = self._draft.prefill(batch, input_ids, hidden_states, result.next_token_ids, kv_loc_plan)
        return result

    # -- planning --------------------------------------------------------------------------------------------------

    def _make_limits(self) -> DraftLimits:
        draft = self._draft

        def fit_rows(batch_size: int, rows: int) -> int | None:
            return graph_tier(self._target_worker, batch_size, rows)

        return DraftLimits(draft.depths, draft.count_nodes, fit_rows)

    def _make_policy(self) -> CapacityPolicy:
        config = self.config
        if not config.capacity_is_automatic:
            return FixedCapacity(per_request=config.capacity_per_request, absolute=config.capacity_tokens)
        max_batch_size = self._target_worker.model_runner.req_to_token_pool.size
        max_rows = max_batch_size * self.speculative_num_draft_tokens
        seed = load_or_time_passes(
            self._target_worker,
            None if self._kind == NGRAM else self._draft,
            num_draft_tokens=self.speculative_num_draft_tokens,
            max_rows=max_rows,
            ranks=self._ranks,
        )
        num_nodes = self._draft.count_nodes(self.speculative_num_steps)
        return AutoCapacity(
            StepTimeModel(seed, max_rows=max_rows, max_batch_size=max_batch_size),
            AcceptCurves(self.speculative_num_steps, capacity_shares(num_nodes)),
        )
