"""Acceptance over ragged chains: a draft token is accepted iff it is the target's own token there."""

from typing import NamedTuple

import torch
from torch import Tensor


class AcceptResult(NamedTuple):
    num_accepted: Tensor
    """[batch] int32, draft tokens accepted, 0..draft_lens."""
    bonus_tokens: Tensor
    """[batch] int64, the target's token after the last accepted one."""


def accept_chain(candidates: Tensor, target_tokens: Tensor, draft_lens: Tensor) -> AcceptResult:
    """Accept each request's longest verified draft prefix that equals the target's own tokens.

    Numbering is strided: width = max_draft + 1, column 0 is the root (the last committed token), columns
    1..draft_lens[r] are request r's selected drafts. What stands in later columns never matters.

    Greedy decoding: let target_tokens be the argmax of each verified row. The output is then token for token
    what the target alone would produce.

    Sampling: let target_tokens[r, j] be drawn with the noise of row j's place in the text: y_n = g(p(. | text before n),
    E_n), where E_n are random numbers of request and place alone and g(p, E) has distribution p (`noise.draw`). Then the
    token emitted at n is y_n,
    whoever proposed it: an accepted draft equals it, and the bonus is it. By induction the text is the one that decoding token
    by token with these E would give, whatever was drafted and selected, and whether or not that looked at E. It has the
    target's distribution: the text before n is a function of earlier E, so E_n is independent of it.

    (Draws made anew in every step are exact as well, for drafts and selection that do not see them:
    what is not accepted is drawn again, but only rows that were not reached are.)

    Args:
        candidates: [batch, width] int64.
        target_tokens: [batch, width] int64; column j is the target's token after column j of candidates.
        draft_lens: [batch] integers in 0..width - 1.
    Returns:
        AcceptResult; the request emits num_accepted drafts and one bonus token.
    Raises:
        ValueError: shapes that do not fit together.
    Sync: none; CUDA-graph safe.
    Example: candidates [[7, 1, 2, 3]], target_tokens [[1, 2, 9, 4]]
        draft_lens [3] -> num_accepted [2], bonus_tokens [9]
        draft_lens [1] -> num_accepted [1], bonus_tokens [2]
    """
    batch, width = candidates.shape
    if target_tokens.shape != (batch, width) or draft_lens.shape != (batch,):
        raise ValueError(
            f"candidates {tuple(candidates.shape)} need target_tokens of the same shape and draft_lens "
            f"[{batch}], got {tuple(target_tokens.shape)} and {tuple(draft_lens.shape)}"
        )
    selected = torch.arange(width - 1, device=candidates.device) < draft_lens[:, None]
    matches = (candidates[:, 1:] == target_tokens[:, :-1]) & selected
    num_accepted = matches.cumprod(dim=1).sum(dim=1)
    bonus_tokens = target_tokens.gather(1, num_accepted[:, None]).squeeze(1)
    return AcceptResult(num_accepted.to(torch.int32), bonus_tokens)
