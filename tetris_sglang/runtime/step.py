"""One decode step of TETRIS (arXiv:2502.15197): plan, draft, select, pack, verify, accept, observe."""

from __future__ import annotations

from collections.abc import Sequence

from sglang.srt.managers.utils import GenerationBatchResult
from torch import Tensor

from tetris_sglang.capacity import StepPlan
from tetris_sglang.drafting import Grid, Proposal, TreeShape, make_grid
from tetris_sglang.observers import Observer, StepRecord
from tetris_sglang.packing import AcceptedTokens, PackedTokens, constant
from tetris_sglang.runtime.acceptance_rules import Acceptance
from tetris_sglang.runtime.drafts.base import Draft
from tetris_sglang.runtime.kv_moves import commit_paths
from tetris_sglang.runtime.operations import Operations
from tetris_sglang.runtime.planning.planner import StepPlanner
from tetris_sglang.runtime.ranks import Ranks
from tetris_sglang.runtime.reports.phases import PhaseTimer
from tetris_sglang.runtime.request_texts import RequestTexts
from tetris_sglang.runtime.requests.weights import RequestWeights, Wishes
from tetris_sglang.runtime.verify import (
    compute_logprobs,
    forward_target,
    graph_tier,
    make_grammar_tree,
    sample_target,
)


class StepRunner:
    """Runs the decode steps of one scheduler process.

    Args:
        target_worker: SGLang's, of the target. width: columns of the grid, the root's included.
        observers: learn from every step, in this order.
    """

    def __init__(
        self,
        target_worker,
        width: int,
        *,
        planner: StepPlanner,
        draft: Draft,
        weights: RequestWeights,
        operations: Operations,
        acceptance: Acceptance,
        texts: RequestTexts,
        ranks: Ranks,
        phases: PhaseTimer,
        observers: Sequence[Observer],
    ) -> None:
        self._target_worker, self._width = target_worker, width
        self._planner, self._draft, self._weights, self._operations = planner, draft, weights, operations
        self._acceptance = acceptance
        self._texts, self._ranks, self._phases, self._observers = texts, ranks, phases, observers

    def run(self, batch, on_publish, grammar_barrier) -> GenerationBatchResult:
        """Emit one token or more for every request of a ScheduleBatch, in SGLang's forward isolation."""
        phases, sampler = self._phases, self._target_worker.model_runner.sampler
        phases.begin_step()
        draft_input, batch_size = batch.spec_info, len(batch.reqs)
        wishes = self._weights.get_wishes(batch.reqs)
        plan = self._planner.plan(batch, wishes)
        max_drafts = min(plan.depth, plan.capacity_tokens)
        num_tokens = batch_size + plan.capacity_tokens
        tier = graph_tier(self._target_worker, batch_size, num_tokens)

        with phases("draft"):
            proposal = self._draft.propose(batch, plan.depth) if plan.capacity_tokens else None

        # Of all drafted tokens of the batch the C with the largest survivals, and a root per request, in one ragged pass.
        with phases("select"):
            grid = make_grid(draft_input.bonus_tokens, proposal, plan.depth, self._width)
            draft_lens = None if proposal is None else self._select(batch, proposal, plan, wishes)
            draft_lens, grid = self._share(draft_lens, grid)
            table, rows = batch.req_to_token_pool.req_to_token, batch.req_pool_indices
            packed = self._operations.pack_grid(draft_lens, grid, batch.seq_lens, table, rows, tier or num_tokens)

        # Copied to the host while the target's pass runs.
        grammar_tree = make_grammar_tree(grid) if batch.has_grammar else None
        with phases("verify"):
            result = forward_target(
                batch,
                self._target_worker,
                packed,
                grid,
                self._draft.target_hidden_mode,
                max_drafts if tier is None else None,
            )

        with phases("sample"):
            tokens, logprob_logits = sample_target(
                batch,
                sampler,
                result.logits_output,
                grid,
                packed,
                num_tokens,
                self._texts,
                grammar_tree,
                grammar_barrier,
            )
            accepted = self._accept(batch, tokens, packed, grid, proposal)
            if on_publish is not None:
                # The next step waits for this, and for nothing that follows.
                on_publish(accepted.new_seq_lens)
            if logprob_logits is not None:
                compute_logprobs(batch, result.logits_output, logprob_logits, accepted, packed, max_drafts)
            hidden_states, result.logits_output.hidden_states = result.logits_output.hidden_states, None
            record = StepRecord(batch, plan, proposal, grid, packed, accepted, max_drafts)
            for observer in self._observers:
                observer.observe(record)
            next_draft_input = self._draft.hand_over(record, draft_input, hidden_states)
        phases.end_step()
        return make_result(record, result, next_draft_input)

    def _select(self, batch, proposal: Proposal, plan: StepPlan, wishes: Wishes | None) -> Tensor:
        """Algorithm 1 over the survivals of the whole batch, each times what its request's tokens count.

        Returns:
            draft_lens [batch] int32, sum = capacity_tokens.
        """
        self._planner.after_draft(proposal, plan, wishes)
        weights = None if wishes is None else wishes.weights
        return self._operations.select_drafts(proposal.survival, plan.capacity_tokens, weights)

    def _accept(self, batch, tokens: Tensor, packed: PackedTokens, grid: Grid, proposal: Proposal | None) -> AcceptedTokens:
        """Keep drafts, from each root on; `tokens` [num_tokens] are the target's draws."""
        (tokens,) = self._ranks.share([tokens])
        accepted = self._acceptance.accept(batch, tokens, packed, grid, proposal)
        commit_paths(self._target_worker.model_runner.token_to_kv_pool, packed, accepted)
        return accepted

    def _share(self, draft_lens: Tensor | None, grid: Grid) -> tuple[Tensor | None, Grid]:
        """What all ranks verify: the first one's drafts, as chains where nothing else was selected."""
        if draft_lens is None:
            return None, grid
        # The tokens first: kernels are compiled for aligned ones.
        tokens, *shape, draft_lens = self._ranks.share([grid.tokens, *(grid.shape or ()), draft_lens])
        grid = Grid(tokens, grid.max_depth, TreeShape(*shape) if shape else None)
        return draft_lens, self._operations.drop_leaves(grid, draft_lens)


def make_result(record: StepRecord, result, next_draft_input) -> GenerationBatchResult:
    """What SGLang wants to know of a step.

    Args:
        result: of the target's pass.
    """
    accepted, packed = record.accepted, record.packed
    is_plain, batch_size, device = record.proposal is None, len(packed.verify_lens), packed.verify_lens.device
    num_drafted = 0 if is_plain else record.proposal.tokens.shape[1]
    return GenerationBatchResult(
        logits_output=result.logits_output,
        next_token_ids=accepted.target_tokens.reshape(-1),
        speculative_num_draft_tokens=accepted.target_tokens.shape[1],
        next_draft_input=next_draft_input,
        # SGLang counts the bonus token in.
        accept_lens=constant(batch_size, 1, device) if is_plain else accepted.num_accepted + 1,
        cap_lens=packed.verify_lens,
        # SGLang sums this per request, for DSPARK alone; here it carries the drafted tokens (runtime/reports/metrics.py).
        block_accept_lens=constant(batch_size, num_drafted, device),
        new_seq_lens=accepted.new_seq_lens,
        can_run_cuda_graph=result.can_run_cuda_graph,
        routed_experts_output=result.routed_experts_output,
        indexer_topk_output=result.indexer_topk_output,
        extra_keep_alive_refs=result.extra_keep_alive_refs,
    )
