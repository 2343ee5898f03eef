"""Block verification: a chain of drafts drawn from q is judged as a whole.

Sun et al., "Block Verification Accelerates Speculative Decoding", arXiv:2403.10444, for ragged blocks. With x_1..x_L a
request's verified drafts, w_0 = 1 and w_i = min(1, w_(i-1) p(x_i | x_<i) / q(x_i | x_<i)), the drafts up to i are kept with
probability

    h_L = w_L,      h_i = s_i / (s_i + 1 - w_i)  for i < L,      s_i = sum over x of (w_i p(x | x_<=i) - q(x | x_<=i))+,

and the largest i that is kept counts. Behind it a token is drawn from (w_i p - q)+, behind x_L from p. Of all rules that
draw drafts from q it accepts the most of one chain. What was drafted behind x_L was not verified and must not enter: L is
where the block ends.

It is exact under the conditions of `acceptance/recursive.py`: L >= i may depend on the tokens before x_i alone.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tetris_sglang.acceptance.chain import AcceptResult


def accept_block(
    tokens: Tensor,
    draft_lens: Tensor,
    target_probs: Tensor,
    first_rows: Tensor,
    draft_probs: Tensor,
    uniforms: Tensor,
    draw: Callable[[Tensor], Tensor],
) -> AcceptResult:
    """Accept the longest prefix that block verification keeps.

    Args:
        tokens: [batch, width] int64, the grid. draft_lens: [batch] integers, columns verified after the root.
        target_probs, first_rows: as in `accept_recursively`.
        draft_probs: [batch, width - 1, vocab] float32, q that drew each column after the root.
        uniforms: [batch, width - 1] float32 in [0, 1), new in every step.
        draw: as in `accept_recursively`.
    Sync: none.
    """
    batch, width = tokens.shape
    requests = torch.arange(batch, device=tokens.device)

    def rows(columns: int | Tensor) -> Tensor:
        """Of what was verified; nobody looks at the others'."""
        return (first_rows + columns).clamp(max=len(target_probs) - 1)

    weight = torch.ones(batch, dtype=target_probs.dtype, device=tokens.device)
    num_accepted = torch.zeros(batch, dtype=torch.int64, device=tokens.device)
    kept_weight = weight
    for column in range(1, width):
        token = tokens[:, column]
        before, here = rows(column - 1), rows(column)
        ratio = target_probs[before, token] / draft_probs[requests, column - 1, token]
        weight = (weight * ratio).clamp(max=1)
        keep = weight
        if column < width - 1:
            surplus = (weight[:, None] * target_probs[here] - draft_probs[:, column]).clamp(min=0).sum(dim=1)
            # Without a surplus nothing could be drawn behind: then a longer prefix is kept, or none.
            inside = surplus / (surplus + 1 - weight).clamp(min=torch.finfo(surplus.dtype).tiny)
            keep = torch.where(column < draft_lens, inside, weight)
        kept = (column <= draft_lens) & (uniforms[:, column - 1] < keep)
        num_accepted = torch.where(kept, column, num_accepted)
        kept_weight = torch.where(kept, weight, kept_weight)
    own = target_probs[rows(num_accepted)]
    q = draft_probs[requests, num_accepted.clamp(max=width - 2)]
    residual = (kept_weight[:, None] * own - q).clamp(min=0)
    # Nothing is left where the laws are equal but for rounding.
    is_own = (num_accepted == draft_lens) | (residual.sum(dim=1) == 0)
    weights = torch.where(is_own[:, None], own, residual)
    return AcceptResult(num_accepted.to(torch.int32), draw(weights))
