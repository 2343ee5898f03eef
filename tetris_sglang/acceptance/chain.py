"""Acceptance over ragged chains: a draft token is accepted iff it is the target's own token there."""

from typing import NamedTuple

import torch
from torch import Tensor


class AcceptResult(NamedTuple):
    accept_lens: Tensor
    """[batch] int32, draft tokens accepted, 0..draft_lens."""
    bonus_tokens: Tensor
    """[batch] int64, the target's token after the last accepted one."""


def accept_chain(candidates: Tensor, target_tokens: Tensor, draft_lens: Tensor) -> AcceptResult:
    """Accept each request's longest verified draft prefix that equals the target's own tokens.

    Numbering is strided: width = max_draft + 1, column 0 is the root (the last committed token), columns
    1..draft_lens[r] are request r's selected drafts. What stands in later columns never matters.

    Greedy decoding: let target_tokens be the argmax of each verified row. The output is then token for token
    what the target alone would produce.

    Sampling: let target_tokens[r, j] be drawn from the target's distribution p_j in row j, independently of
    the drafts (`sample_rows`, or SGLang's own sampler with its per-request seeds). This is target-only
    acceptance, the rule "accept draft x with probability p_j(x), else draw from p_j without x, renormalised",
    in another coupling:
        P(accept x) = P(y = x) = p_j(x), and given y != x, y ~ p_j(y) / (1 - p_j(x)).
    The output distribution is exactly the target's, for any draft and any selection. What a step emits is
    y_0, ..., y_accept: an accepted draft x_j+1 equals y_j, and the bonus is y at the first mismatch or after
    the last selected draft. Row j is used only when the tokens before it equal its context, so y_j is a fresh
    draw from p(. | what was emitted); drafts and selection decide only how many draws the step may use. The
    one condition: they must not see this step's draws.

    Args:
        candidates: [batch, width] int64.
        target_tokens: [batch, width] int64; column j is the target's token after column j of candidates.
        draft_lens: [batch] integers in 0..width - 1.
    Returns:
        AcceptResult; the request emits accept_lens drafts and one bonus token.
    Raises:
        ValueError: shapes that do not fit together.
    Sync: none; CUDA-graph safe.
    Example: candidates [[7, 1, 2, 3]], target_tokens [[1, 2, 9, 4]]
        draft_lens [3] -> accept_lens [2], bonus_tokens [9]
        draft_lens [1] -> accept_lens [1], bonus_tokens [2]
    """
    batch, width = candidates.shape
    if target_tokens.shape != (batch, width) or draft_lens.shape != (batch,):
        raise ValueError(
            f"candidates {tuple(candidates.shape)} need target_tokens of the same shape and draft_lens "
            f"[{batch}], got {tuple(target_tokens.shape)} and {tuple(draft_lens.shape)}"
        )
    selected = torch.arange(width - 1, device=candidates.device) < draft_lens[:, None]
    matches = (candidates[:, 1:] == target_tokens[:, :-1]) & selected
    accept_lens = matches.cumprod(dim=1).sum(dim=1)
    bonus_tokens = target_tokens.gather(1, accept_lens[:, None]).squeeze(1)
    return AcceptResult(accept_lens.to(torch.int32), bonus_tokens)
