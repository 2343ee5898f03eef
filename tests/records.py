"""Steps as observers see them, without a server."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import torch

from tetris_sglang.capacity import StepPlan
from tetris_sglang.drafting import Proposal, make_grid
from tetris_sglang.observers import StepRecord
from tetris_sglang.packing import AcceptedTokens


def make_record(
    proposal: Proposal | None,
    *,
    selected: Sequence[int],
    num_accepted: Sequence[int],
    depth: int = 0,
    max_depth: int | None = None,
    path: list[list[int]] | None = None,
    slots: Sequence[int] | None = None,
    width: int | None = None,
) -> StepRecord:
    """A step that selected and accepted so many drafts of each request, which tokens they were being of no account.

    Args:
        depth: passes of the draft. max_depth: of any node; default: as many as there are nodes.
        path: of trees, see `AcceptedTokens`. slots: where the requests run. width: columns of the grid.
    """
    batch_size = len(selected)
    num_nodes = 0 if proposal is None else proposal.tokens.shape[1]
    width = num_nodes + 1 if width is None else width
    roots = torch.zeros(batch_size, dtype=torch.int64)
    grid = make_grid(roots, proposal, num_nodes if max_depth is None else max_depth, width)
    verify_lens = torch.tensor(selected, dtype=torch.int32) + 1
    accepted = AcceptedTokens(
        num_accepted=torch.tensor(num_accepted, dtype=torch.int32),
        bonus_tokens=roots,
        last_tokens=roots,
        new_seq_lens=roots,
        target_tokens=torch.zeros(batch_size, width, dtype=torch.int64),
        path=None if path is None else torch.tensor(path),
    )
    rows = torch.arange(batch_size) if slots is None else torch.tensor(slots)
    batch = SimpleNamespace(reqs=[None] * batch_size, req_pool_indices=rows)
    packed = SimpleNamespace(verify_lens=verify_lens, input_ids=torch.zeros(sum(selected) + batch_size))
    return StepRecord(batch, StepPlan(depth, sum(selected)), proposal, grid, packed, accepted, max(selected))
