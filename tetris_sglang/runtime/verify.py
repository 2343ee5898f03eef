"""One ragged target pass over the selected draft tokens of the whole batch.

Numbering: a request's verified tokens are columns of a strided [batch, width] grid, width = --speculative-num-draft-tokens;
column 0 is the bonus token of the step before (the root), columns 1..draft_lens are the selected drafts. Only the target's
pass is
packed: its rows are the grid's selected cells in row-major order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.logprob_processor import compute_spec_logprobs
from sglang.srt.mem_cache.kv_loc_plan import IdSpaceKind
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.speculative.eagle_info import EagleVerifyInput
from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout, round_up_grid
from sglang.srt.speculative.spec_utils import GrammarTree, build_grammar_vocab_mask
from torch import Tensor

from tetris_sglang.drafting import Grid, TreeShape, ancestor_mask
from tetris_sglang.packing import AcceptedTokens, PackedTokens
from tetris_sglang.runtime.host_copy import know_lengths
from tetris_sglang.runtime.logits import adjust_logits
from tetris_sglang.runtime.request_texts import RequestTexts

_ADJUSTED = ("grammars", "acc_additive_penalties", "acc_scaling_penalties", "logit_bias")
"""Of SamplingBatchInfo: what `adjust_logits` has done."""
_PER_REQUEST = ("temperatures", "top_ps", "top_ks", "min_ps", "sampling_seed")
"""Sampling settings that a request's rows share."""


@dataclass
class TetrisVerifyInput(EagleVerifyInput):
    """A verify input that carries the ragged layout to the attention backend."""

    ragged_verify_layout: RaggedVerifyLayout | None = None
    parents: Tensor | None = None
    """[batch, width] int64, see `TreeShape`: what a captured pass makes the mask of. None: chains, or the mask is there."""

    def generate_attn_arg_prefill(
        self,
        *,
        req_pool_indices: Tensor,
        paged_kernel_lens: Tensor,
        paged_kernel_lens_sum: int,
        translator,
        plan,
        kind: IdSpaceKind = IdSpaceKind.FULL,
    ):
        """What FlashInfer plans an eager ragged pass with: KV indices, the two indptrs, and the mask of trees.

        Waits for the lengths where there are trees.
        """
        layout = self.ragged_verify_layout
        kv_lens = paged_kernel_lens + layout.verify_lens
        kv_indptr = torch.nn.functional.pad(kv_lens.cumsum(0, dtype=torch.int32), (1, 0))
        kv_indices = torch.empty(paged_kernel_lens_sum + layout.graph_num_tokens, dtype=torch.int32, device=kv_lens.device)
        translator.pack_read_stream(
            plan,
            req_pool_indices=req_pool_indices,
            seq_lens=kv_lens,
            indptr=kv_indptr,
            out=kv_indices,
            kind=kind,
            num_token_blocks=None,
            kv_lens_sum=paged_kernel_lens_sum,
        )
        mask = None if self.custom_mask is None else self._flat_mask(kv_lens)
        return kv_indices, kv_indptr, layout.qo_indptr_device, mask

    def _flat_mask(self, kv_lens: Tensor) -> Tensor:
        """FlashInfer's mask before packing: for every verified row one bool per key of its request, one after the other."""
        width, layout = self.draft_token_num, self.ragged_verify_layout
        ancestors = self.custom_mask.view(-1, width, width)
        requests = torch.arange(len(kv_lens), device=kv_lens.device).repeat_interleave(layout.verify_lens)
        columns = torch.arange(len(requests), device=kv_lens.device) - layout.extend_start_loc[requests]
        row_lens = kv_lens[requests].long()
        rows = torch.arange(len(requests), device=kv_lens.device).repeat_interleave(row_lens)
        keys = torch.arange(len(rows), device=kv_lens.device) - (row_lens.cumsum(0) - row_lens)[rows]
        requests, columns = requests[rows], columns[rows].long()
        nodes = keys - (kv_lens - layout.verify_lens)[requests]
        return (nodes < 0) | ancestors[requests, columns, nodes.clamp(min=0)]


def make_verify_input(
    *,
    width: int,
    input_ids: Tensor | None,
    positions: Tensor | None,
    layout: RaggedVerifyLayout,
    hidden_mode: CaptureHiddenMode = CaptureHiddenMode.NULL,
    shape: TreeShape | None = None,
    max_depth: int = 0,
    has_mask: bool = False,
    batch=None,
) -> TetrisVerifyInput:
    """The verify input of a pass over packed tokens.

    Args:
        width: columns of the grid. hidden_mode: the target's states that the draft wants.
        shape: of trees, whose nodes are at most max_depth deep; None: chains.
        has_mask: whether trees come with a mask; a captured pass makes it.
        batch: the decode ScheduleBatch; None while a graph is captured.
    """
    mask = None
    if shape is not None and has_mask:
        mask = ancestor_mask(shape.parents[:, :width], max_depth).flatten()
    return TetrisVerifyInput(
        draft_token=input_ids,
        custom_mask=mask,
        positions=positions,
        retrieve_index=None,
        retrieve_next_token=None,
        retrieve_next_sibling=None,
        retrieve_cum_len=None,
        spec_steps=width - 1,
        # To SGLang a tree is what has more than one; it is irregular here.
        topk=1 if shape is None else -1,
        draft_token_num=width,
        capture_hidden_mode=hidden_mode,
        seq_lens_sum=None if batch is None else batch.seq_lens_sum,
        seq_lens_cpu=None if batch is None else batch.seq_lens_cpu,
        ragged_verify_layout=layout,
        parents=None if shape is None or has_mask else shape.parents,
    )


def graph_tier(target_worker, batch_size: int, num_tokens: int) -> int | None:
    """The rows of the smallest captured target pass that takes `num_tokens`; None where such a pass runs without a graph."""
    runner = target_worker.model_runner.decode_cuda_graph_runner  # None on a CPU
    if not getattr(runner, "ragged_verify_mode", False) or not runner.attn_backend.supports_ragged_verify_graph:
        return None
    if num_tokens > runner.capture_num_tokens[-1]:
        return None
    tier = round_up_grid(num_tokens, runner.capture_num_tokens)
    return tier if batch_size <= runner._ragged_capture_slots(tier) else None


def forward_target(
    batch,
    target_worker,
    packed: PackedTokens,
    grid: Grid,
    hidden_mode: CaptureHiddenMode,
    max_drafts: int | None = None,
):
    """Run the target over the packed tokens; returns SGLang's result of the pass.

    Args:
        batch: the decode ScheduleBatch inside SGLang's forward isolation; seq_lens = tokens with target KV.
        packed: as many rows as there are tokens, or as the pass's graph has.
        hidden_mode: the target's states that the draft wants.
        max_drafts: that any request verifies, where the host knows fewer than the grid has room for.
    """
    width = grid.tokens.shape[1]
    if packed.verify_lens.device.type == "cpu":
        width = int(packed.verify_lens.max())  # nobody waits for it there
    elif max_drafts is not None and grid.shape is None:
        width = max_drafts + 1
    is_eager = graph_tier(target_worker, len(packed.verify_lens), len(packed.input_ids)) is None
    if is_eager and getattr(target_worker.model_runner.attn_backend, "plans_eager_passes_on_host", False):
        know_lengths(batch)
    batch.input_ids = packed.input_ids
    batch.out_cache_loc = packed.slots
    batch.forward_mode = ForwardMode.TARGET_VERIFY
    batch.spec_info = make_verify_input(
        width=width,
        input_ids=packed.input_ids,
        positions=packed.positions,
        hidden_mode=hidden_mode,
        shape=grid.shape,
        max_depth=grid.max_depth,
        has_mask=is_eager,
        layout=RaggedVerifyLayout(
            verify_lens=packed.verify_lens,
            graph_num_tokens=packed.input_ids.shape[0],
            extend_start_loc=packed.qo_indptr[:-1],
            qo_indptr_device=packed.qo_indptr,
        ),
        batch=batch,
    )
    forward_batch = ForwardBatch.init_new(
        batch,
        target_worker.model_runner,
        capture_hidden_mode=hidden_mode,
        return_hidden_states_before_norm=False,
    )
    result = target_worker.forward_batch_generation(batch=None, forward_batch=forward_batch, is_verify=True)
    # The device reads it when the host has moved on.
    result.extra_keep_alive_refs = [forward_batch]
    return result


def sample_target(
    batch,
    sampler,
    logits_output: LogitsProcessorOutput,
    grid: Grid,
    packed: PackedTokens,
    num_tokens: int,
    texts: RequestTexts,
    grammar_tree: GrammarTree | None,
    grammar_barrier,
) -> tuple[Tensor, Tensor | None]:
    """Draw the target's own token for every packed row, with the sampler that serves without speculation.

    Every row is sampled exactly as a decode step of its request at that position would be: same penalties, grammar mask, bias,
    temperature, filters (and their order), seed and position.

    Args:
        logits_output: next_token_logits [rows, vocab], overwritten.
        num_tokens: rows that belong to a request; those after it, which fill a graph, are dropped.
        texts: what the requests have written, roots included.
        grammar_tree: from `make_grammar_tree`, if a request has a grammar.
    Returns:
        target_tokens [num_tokens] integers, and the logits they were drawn from [num_tokens, vocab] if a request wants
        log-probabilities.
    """
    sampling_info: SamplingBatchInfo = batch.sampling_info
    logits_output.next_token_logits = logits = logits_output.next_token_logits[:num_tokens]
    requests, columns = packed.requests[:num_tokens], packed.columns[:num_tokens]
    grammar_mask = None
    if grammar_tree is not None:
        grammar_mask = _grammar_mask(batch, grid, grammar_tree, requests, columns, grammar_barrier)
    adjust_logits(logits, batch, grid, requests, columns, texts, grammar_mask)
    logprob_logits = logits.clone() if batch.return_logprob else None
    changed = {name: None for name in _ADJUSTED if getattr(sampling_info, name) is not None}
    if grid.max_depth and not sampling_info.is_all_greedy:
        settings = {name: getattr(sampling_info, name) for name in _PER_REQUEST}
        changed |= {name: setting[requests] for name, setting in settings.items() if setting is not None}
    tokens = sampler(
        logits_output,
        replace(sampling_info, **changed) if changed else sampling_info,
        False,
        [],
        [],
        positions=packed.positions[:num_tokens],
    )
    return tokens, logprob_logits


def make_grammar_tree(grid: Grid) -> GrammarTree:
    """What grammars have to walk through, on its way to the host."""
    if grid.shape is None:
        return GrammarTree.from_linear_chain(grid.tokens)
    return GrammarTree.from_device(*_link_nodes(grid.shape), grid.tokens)


def _grammar_mask(batch, grid: Grid, tree: GrammarTree, requests: Tensor, columns: Tensor, grammar_barrier):
    """SGLang's grammar mask over the whole grid, cut down to the packed rows."""
    mask = build_grammar_vocab_mask(
        reqs=batch.reqs,
        tree=tree,
        sampling_info=batch.sampling_info,
        device=grid.tokens.device,
        barrier=grammar_barrier,
    )
    if mask is None:
        return None
    return mask._replace(vocab_mask=mask.vocab_mask[requests * grid.tokens.shape[1] + columns])


def _link_nodes(shape: TreeShape) -> tuple[Tensor, Tensor]:
    """Each column's first child and next sibling [batch, width] int64, -1 where there is none: how SGLang walks trees."""
    parents, width = shape.parents, shape.parents.shape[1]
    columns = torch.arange(width, device=parents.device)
    # The root is no child of its own, and neither are the columns that hold no node.
    is_node = shape.depths > 0
    children = (parents[:, None, :] == columns[:, None]) & is_node[:, None, :]
    siblings = (parents[:, None, :] == parents[:, :, None]) & (columns > columns[:, None])
    siblings &= is_node[:, None, :] & is_node[:, :, None]
    return tuple(torch.where(related.any(dim=2), related.int().argmax(dim=2), -1) for related in (children, siblings))


def compute_logprobs(
    batch,
    logits_output,
    logits: Tensor,
    accepted: AcceptedTokens,
    packed: PackedTokens,
    max_accepted: int,
) -> None:
    """Fill the output logprobs in the strided layout that SGLang's result processing reads.

    Args:
        logits: [num_tokens, vocab] from `sample_target`.
        max_accepted: drafts of any request, as far as the host knows: a stride is no longer than that takes.
    """
    num_tokens, stride = logits.shape[0], max_accepted + 1
    target_tokens = accepted.target_tokens[:, :stride]
    strided = logits.new_zeros(*target_tokens.shape, logits.shape[-1])
    if accepted.path is None:
        strided[packed.requests[:num_tokens], packed.columns[:num_tokens]] = logits
    else:
        rows = packed.qo_indptr[:-1, None] + accepted.path[:, :stride]
        strided[:] = logits[rows.clamp_(max=num_tokens - 1)]
    logits_output.next_token_logits = strided.flatten(0, 1)
    compute_spec_logprobs(batch, logits_output, target_tokens.reshape(-1), chain_stride=stride)
    logits_output.next_token_logits = None
