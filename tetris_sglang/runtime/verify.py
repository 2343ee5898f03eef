"""One ragged target pass over the selected draft tokens of the whole batch.

Numbering: a request's verified tokens are columns of a strided [batch, width] grid, width = num_steps + 1; column 0 is
the bonus token of the step before (the root), columns 1..draft_lens are the selected drafts. Only the target's pass is
packed: its rows are the grid's selected cells in row-major order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.logprob_processor import compute_spec_logprobs
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.speculative.eagle_info import EagleVerifyInput
from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout
from sglang.srt.speculative.spec_utils import GrammarTree, build_grammar_vocab_mask
from torch import Tensor

from tetris_sglang.runtime.logits import adjust_logits


@dataclass
class TetrisVerifyInput(EagleVerifyInput):
    """A verify input that carries the ragged layout to the attention backend."""

    ragged_verify_layout: RaggedVerifyLayout | None = None


class PackedRows(NamedTuple):
    """The grid cells that the target verifies."""

    requests: Tensor
    """[tokens] int64, the batch row of each packed token."""
    columns: Tensor
    """[tokens] int64, its grid column."""
    verify_lens: Tensor
    """[batch] int32, draft_lens + 1."""
    num_tokens: int


def pack_rows(draft_lens: Tensor, num_tokens: int) -> PackedRows:
    """Lay out sum(draft_lens + 1) tokens, request after request.

    Args:
        draft_lens: [batch] int32.
        num_tokens: sum(draft_lens) + batch, known to the host because selection fills the capacity; no sync.
    """
    batch_size, device = draft_lens.shape[0], draft_lens.device
    verify_lens = draft_lens + 1
    requests = torch.repeat_interleave(
        torch.arange(batch_size, device=device), verify_lens, output_size=num_tokens
    )
    ends = verify_lens.cumsum(0)
    columns = torch.arange(num_tokens, device=device) - (ends - verify_lens)[requests]
    return PackedRows(requests, columns, verify_lens, num_tokens)


def forward_target(batch, target_worker, candidates: Tensor, rows: PackedRows) -> ForwardBatch:
    """Run the target over the packed tokens; returns its forward batch and output.

    Args:
        batch: the decode ScheduleBatch inside SGLang's forward isolation; seq_lens = tokens with target KV.
        candidates: [batch, width] int64, roots and drafts.
    """
    positions = batch.seq_lens[rows.requests] + rows.columns
    slots = batch.req_to_token_pool.req_to_token[batch.req_pool_indices[rows.requests], positions]
    ends = rows.verify_lens.cumsum(0, dtype=torch.int32)
    qo_indptr = torch.nn.functional.pad(ends, (1, 0))
    batch.input_ids = candidates[rows.requests, rows.columns]
    batch.out_cache_loc = slots.to(torch.int64)
    batch.forward_mode = ForwardMode.TARGET_VERIFY
    batch.spec_info = TetrisVerifyInput(
        draft_token=batch.input_ids,
        custom_mask=None,
        positions=positions,
        retrieve_index=None,
        retrieve_next_token=None,
        retrieve_next_sibling=None,
        retrieve_cum_len=None,
        spec_steps=candidates.shape[1] - 1,
        topk=1,
        draft_token_num=candidates.shape[1],
        capture_hidden_mode=CaptureHiddenMode.NULL,
        seq_lens_sum=batch.seq_lens_sum,
        seq_lens_cpu=batch.seq_lens_cpu,
        ragged_verify_layout=RaggedVerifyLayout(
            verify_lens=rows.verify_lens,
            graph_num_tokens=rows.num_tokens,
            extend_start_loc=qo_indptr[:-1],
            qo_indptr_device=qo_indptr,
        ),
    )
    forward_batch = ForwardBatch.init_new(
        batch,
        target_worker.model_runner,
        capture_hidden_mode=CaptureHiddenMode.NULL,
        return_hidden_states_before_norm=False,
    )
    result = target_worker.forward_batch_generation(batch=None, forward_batch=forward_batch, is_verify=True)
    return forward_batch, result


def sample_target(
    batch,
    sampler,
    logits_output: LogitsProcessorOutput,
    candidates: Tensor,
    rows: PackedRows,
    grammar_barrier,
) -> Tensor:
    """Draw the target's own token for every packed row, with the sampler that serves without speculation.

    Every row is sampled exactly as a decode step of its request at that position would be: same penalties, grammar
    mask, bias, temperature, filters (and their order), seed and position.

    Args:
        logits_output: next_token_logits [tokens, vocab], overwritten.
        candidates: [batch, width] int64.
        grammar_barrier: advances the grammars over the step before (SGLang, under overlap), or None.
    Returns:
        target_tokens [batch, width] int64; columns beyond a request's draft_lens hold 0.
    """
    sampling_info: SamplingBatchInfo = batch.sampling_info
    logits = logits_output.next_token_logits
    grammar_mask = _grammar_mask(batch, candidates, rows, grammar_barrier) if batch.has_grammar else None
    adjust_logits(logits, batch, rows, grammar_mask)
    logprob_logits = logits.clone() if batch.return_logprob else None

    requests = rows.requests
    tokens = sampler(
        logits_output,
        replace(
            sampling_info,
            temperatures=sampling_info.temperatures[requests],
            top_ps=sampling_info.top_ps[requests],
            top_ks=sampling_info.top_ks[requests],
            min_ps=sampling_info.min_ps[requests],
            sampling_seed=None
            if sampling_info.sampling_seed is None
            else sampling_info.sampling_seed[requests],
            grammars=None,
            acc_additive_penalties=None,
            acc_scaling_penalties=None,
            logit_bias=None,
        ),
        False,
        [],
        [],
        positions=batch.spec_info.positions,
    )
    target_tokens = torch.zeros_like(candidates)
    target_tokens[requests, rows.columns] = tokens.to(torch.int64)
    if logprob_logits is not None:
        _compute_logprobs(batch, logits_output, logprob_logits, target_tokens, rows)
    return target_tokens


def _grammar_mask(batch, candidates: Tensor, rows: PackedRows, grammar_barrier):
    """SGLang's grammar mask over the strided chains, cut down to the packed rows."""
    mask = build_grammar_vocab_mask(
        reqs=batch.reqs,
        tree=GrammarTree.from_linear_chain(candidates),
        sampling_info=batch.sampling_info,
        device=candidates.device,
        barrier=grammar_barrier,
    )
    if mask is None:
        return None
    packed = rows.requests * candidates.shape[1] + rows.columns
    return mask._replace(vocab_mask=mask.vocab_mask[packed])


def _compute_logprobs(batch, logits_output, logits: Tensor, target_tokens: Tensor, rows: PackedRows) -> None:
    """Fill the output logprobs in the strided layout that SGLang's result processing reads."""
    width = target_tokens.shape[1]
    strided = logits.new_zeros(target_tokens.numel(), logits.shape[-1])
    strided[rows.requests * width + rows.columns] = logits
    logits_output.next_token_logits = strided
    compute_spec_logprobs(batch, logits_output, target_tokens.reshape(-1), chain_stride=width)
    logits_output.next_token_logits = None
