"""What SGLang changes in a request's logits before sampling, for the rows of a ragged verify pass.

Order as in SamplingBatchInfo.apply_logits_bias: min_new_tokens, grammar mask, logit bias. Penalties that depend on
earlier output tokens are refused per request (runtime/requests.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from tetris_sglang.runtime.host_copy import send


def adjust_logits(logits: Tensor, batch, requests: Tensor, depths: Tensor, grammar_mask) -> None:
    """Apply, in place, what a decode step at each row's position would apply.

    Args:
        logits: [tokens, vocab].
        requests, depths: [tokens] int64, each row's place in the batch, and the drafts between it and its root.
        grammar_mask: SGLang's GrammarMask over the packed rows, or None.
    """
    if any(req.sampling_params.min_new_tokens for req in batch.reqs):
        _forbid_early_stop(logits, batch, requests, depths)
    if grammar_mask is not None:
        grammar_mask.apply(logits)
    if batch.sampling_info.logit_bias is not None:
        logits.add_(batch.sampling_info.logit_bias[requests])


def _forbid_early_stop(logits: Tensor, batch, requests: Tensor, depths: Tensor) -> None:
    """Mask stop tokens in rows whose output is shorter than min_new_tokens, exactly per row.

    Upstream's speculation masks by the number of steps, not of tokens (penaltylib/min_new_tokens.py).
    """
    device = logits.device
    bounds = send(
        [len(req.origin_input_ids) + req.sampling_params.min_new_tokens for req in batch.reqs], device
    )
    # The token drawn in a row lands at position seq_lens + depth + 1.
    early = batch.seq_lens[requests] + depths + 1 < bounds[requests]
    stop_mask = torch.zeros(len(batch.reqs), logits.shape[-1], dtype=torch.bool)
    for i, req in enumerate(batch.reqs):
        if req.sampling_params.min_new_tokens:
            stop_mask[i, sorted(_stop_token_ids(req))] = True
    logits.masked_fill_(send(stop_mask, device)[requests] & early.unsqueeze(1), float("-inf"))


def _stop_token_ids(req) -> set[int]:
    """The ids that SGLang's BatchedMinNewTokensPenalizer forbids."""
    tokenizer = req.tokenizer
    ids = set(req.sampling_params.stop_token_ids or ()) | set(req.eos_token_ids or ())
    if tokenizer is not None:
        ids |= set(tokenizer.additional_stop_token_ids or ()) | {tokenizer.eos_token_id}
    return {token_id for token_id in ids if token_id is not None}
