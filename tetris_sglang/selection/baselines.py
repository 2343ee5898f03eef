"""What TETRIS is measured against: `select_prefixes` itself, fed with another score.

The score is a constant, random, or the truth; every rule has the signature of `select_prefixes`.
"""

import torch
from torch import Tensor

from tetris_sglang.selection.batched import select_prefixes


def select_uniform(survival: Tensor, capacity_tokens: int, max_draft_lens: Tensor | None = None) -> Tensor:
    """Give every request the same number of draft tokens, the remainder one by one from the first request on.

    The usual fixed-length speculation at capacity_tokens = k * batch. Uses only the shape of `survival`;
    what a request cannot use because of `max_draft_lens` goes to the others.

    Example: [[.9, .8], [.5, .1]], 3 -> [2, 1]; [[.5, .1], [.9, .8]], 3 -> [2, 1]
    """
    return select_prefixes(torch.ones_like(survival), capacity_tokens, max_draft_lens)


def select_random(
    survival: Tensor,
    capacity_tokens: int,
    max_draft_lens: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Shuffle the batch's tokens, each request's own kept in order, and take the first `capacity_tokens`.

    Uses only the shape and device of `survival`. Within `max_draft_lens` the whole capacity is used.

    Args:
        generator: source of randomness on survival's device; default: torch's global one.
    """
    # 1 - rand lies in (0, 1]: a score of 0 would leave its token out.
    score = 1 - torch.rand(survival.shape, generator=generator, device=survival.device)
    return select_prefixes(score.sort(dim=1, descending=True).values, capacity_tokens, max_draft_lens)


def select_oracle(
    survival: Tensor,
    capacity_tokens: int,
    max_draft_lens: Tensor | None = None,
    *,
    num_accepted: Tensor,
) -> Tensor:
    """Verify only draft tokens that the target will accept: the bound no rule can beat in accepted tokens.

    Uses only the shape of `survival`.

    Args:
        num_accepted: [batch] integers, the draft tokens the target would accept if all were verified.
    Example: num_accepted [0, 2, 1], 2 -> [0, 1, 1]
    """
    accepted = torch.arange(survival.shape[1], device=survival.device) < num_accepted[:, None]
    return select_prefixes(accepted.to(torch.float32), capacity_tokens, max_draft_lens)
