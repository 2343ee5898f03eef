"""What SGLang changes in a request's logits before sampling, for the rows of a ragged verify pass.

Order as in SamplingBatchInfo.apply_logits_bias: penalties, min_new_tokens, grammar mask, logit bias.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tetris_sglang.drafting import Grid, ancestor_mask
from tetris_sglang.runtime.host_copy import send
from tetris_sglang.runtime.request_texts import RequestTexts

_PENALTIES = {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0}
"""SGLang's names, and the values that change nothing."""
_STEPS_IN_FLIGHT = 2
"""Steps whose tokens the host may not know yet."""
_ROWS_AT_ONCE = 256
"""Rows that are penalised together: with 150 thousand tokens a tensor of them takes 150 MB."""


def adjust_logits(
    logits: Tensor, batch, grid: Grid, requests: Tensor, columns: Tensor, texts: RequestTexts, grammar_mask
) -> None:
    """Apply, in place, what a decode step at each row's position would apply.

    Args:
        logits: [tokens, vocab].
        batch: the decode ScheduleBatch, its lengths without the roots.
        requests, columns: [tokens] int64, each row's place in the grid.
        texts: what the requests have written, roots included.
        grammar_mask: SGLang's GrammarMask over the packed rows, or None.
    Sync: none. Looks at the requests one by one only while one with a penalty or min_new_tokens is running.
    """
    if _any_penalizer(batch.sampling_info):
        wishes = [req.sampling_params for req in batch.reqs]
        if any(getattr(params, name) != neutral for params in wishes for name, neutral in _PENALTIES.items()):
            _penalise(logits, batch, grid, requests, columns, texts)
        if any(params.min_new_tokens for params in wishes):
            _forbid_early_stop(logits, batch, grid, requests, columns)
    if grammar_mask is not None:
        grammar_mask.apply(logits)
    if batch.sampling_info.logit_bias is not None:
        logits.add_(batch.sampling_info.logit_bias[requests])


def count_written(batch) -> None:
    """Let a prefill's penalties count what its requests have written: those that were retracted go on here.

    SGLang counts from nothing again (`Req.reset_for_retract`), and would let them stop late and repeat themselves once.

    Args:
        batch: a prefill inside SGLang's forward isolation: what its penalties add up to is for this pass alone.
    Sync: none. Looks at the requests one by one only while one with a penalty or min_new_tokens is among them.
    """
    info = batch.sampling_info
    if info.acc_additive_penalties is None:
        return
    vocab_size, device = info.acc_additive_penalties.shape[1], info.acc_additive_penalties.device
    for i, req in enumerate(batch.reqs):
        if not req.output_ids:
            continue
        params = req.sampling_params
        counts = torch.bincount(torch.tensor(req.output_ids), minlength=vocab_size)
        is_written = counts > 0
        penalties = -params.frequency_penalty * counts - params.presence_penalty * is_written
        if len(req.output_ids) < params.min_new_tokens:
            penalties[_stop_token_ids(req, vocab_size)] = float("-inf")
        info.acc_additive_penalties[i] = send(penalties, device)
        if info.acc_scaling_penalties is not None:
            info.acc_scaling_penalties[i] = send(torch.where(is_written, params.repetition_penalty, 1.0), device)


def _any_penalizer(sampling_info) -> bool:
    """Whether a running request has a penalty or min_new_tokens. Under overlap scheduling SGLang hands on sums alone."""
    orchestrator = sampling_info.penalizer_orchestrator
    return sampling_info.acc_additive_penalties is not None or (orchestrator is not None and orchestrator.is_required)


def _penalise(logits: Tensor, batch, grid: Grid, requests: Tensor, columns: Tensor, texts: RequestTexts) -> None:
    """Frequency, presence and repetition penalties, over what a request has written and, in a draft's row, over the drafts
    before it and itself: the row counts only if they are accepted.

    Upstream's speculation counts one token per step for all rows, and under overlap scheduling the tokens of one step
    before (patches/README.md).
    """
    device = logits.device
    settings = send([[float(getattr(req.sampling_params, name)) for name in _PENALTIES] for req in batch.reqs], device)
    max_written = max(len(req.output_ids) for req in batch.reqs) + _STEPS_IN_FLIGHT * texts.max_emitted
    counts = texts.count(
        batch.req_pool_indices,
        send([len(req.origin_input_ids) for req in batch.reqs], device),
        batch.seq_lens + 1,
        max_written,
        logits.shape[1],
    )
    drafted = grid.tokens[requests, 1:]
    if grid.shape is None:
        counting = torch.arange(1, grid.tokens.shape[1], device=device) <= columns[:, None]
    else:
        counting = ancestor_mask(grid.shape.parents, grid.max_depth)[requests, columns, 1:]
    again = ((drafted[:, :, None] == drafted[:, None, :]) & counting[:, None, :]).sum(dim=2)
    for begin in range(0, len(logits), _ROWS_AT_ONCE):
        rows = slice(begin, begin + _ROWS_AT_ONCE)
        at = requests[rows]
        _penalise_rows(logits[rows], counts[at], settings[at], drafted[rows], again[rows])


def _penalise_rows(logits: Tensor, counts: Tensor, settings: Tensor, drafted: Tensor, again: Tensor) -> None:
    """Some five tensors of the logits' size are alive at once.

    Args:
        logits: [rows, vocab], overwritten. counts: [rows, vocab], how often each token was written.
        settings: [rows, 3], as in _PENALTIES.
        drafted: [rows, drafts] tokens. again: the same, how often each of them comes on top.
    """
    frequency, presence, repetition = settings.unsqueeze(-1).unbind(1)

    def penalise(logits: Tensor, counts: Tensor) -> Tensor:
        reduced = logits - frequency * counts - presence
        scaled = torch.where(reduced < 0, reduced * repetition, reduced / repetition)
        return torch.where(counts > 0, scaled, logits.float())

    at_drafted = penalise(logits.gather(1, drafted), counts.gather(1, drafted) + again)
    logits.copy_(penalise(logits, counts))
    logits.scatter_(1, drafted, at_drafted.to(logits.dtype))


def _forbid_early_stop(logits: Tensor, batch, grid: Grid, requests: Tensor, columns: Tensor) -> None:
    """Mask stop tokens in rows whose output is shorter than min_new_tokens, exactly per row.

    Upstream's speculation masks by the number of steps, not of tokens (penaltylib/min_new_tokens.py).
    """
    depths = columns if grid.shape is None else grid.shape.depths[requests, columns]
    bounds = send([len(req.origin_input_ids) + req.sampling_params.min_new_tokens for req in batch.reqs], logits.device)
    # The token drawn in a row lands at position seq_lens + depth + 1.
    early = batch.seq_lens[requests] + depths + 1 < bounds[requests]
    stop_mask = torch.zeros(len(batch.reqs), logits.shape[-1], dtype=torch.bool)
    for i, req in enumerate(batch.reqs):
        if req.sampling_params.min_new_tokens:
            stop_mask[i, _stop_token_ids(req, logits.shape[-1])] = True
    logits.masked_fill_(send(stop_mask, logits.device)[requests] & early.unsqueeze(1), float("-inf"))


def _stop_token_ids(req, vocab_size: int) -> list[int]:
    """The ids that SGLang's BatchedMinNewTokensPenalizer forbids. A tokenizer may know more of them than the model."""
    tokenizer = req.tokenizer
    ids = set(req.sampling_params.stop_token_ids or ()) | set(req.eos_token_ids or ())
    if tokenizer is not None:
        ids |= set(tokenizer.additional_stop_token_ids or ()) | {tokenizer.eos_token_id}
    return sorted(token_id for token_id in ids if token_id is not None and token_id < vocab_size)
