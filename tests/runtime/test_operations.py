"""Selecting, packing and warming up, as a step does."""

from __future__ import annotations

import pytest
import torch

from tetris_sglang.portable_cpu.activate import activate

activate()  # as SGLang does, before its modules are imported
from tetris_sglang.drafting import Proposal, TreeShape, make_grid
from tetris_sglang.runtime.operations import get_operations, warm_up


@pytest.mark.parametrize("selection", ["tetris", "uniform", "random"])
def test_selection_fills_its_capacity_whatever_the_draft_thinks(selection):
    """The host counts on it: the number of verified rows is never read back."""
    survival = torch.tensor([[0.9, 1e-30, 1e-38], [0.0, 0.0, 0.0], [1e-38, 0.0, 0.0]])
    for capacity in (1, 4, 8, 9):
        draft_lens = get_operations("cpu", selection).select(survival, capacity)
        assert draft_lens.sum() == capacity


def test_warming_up_runs_every_operation_for_every_power_of_two():
    batches = []
    operations = get_operations("cpu", "tetris")

    def select(survival, capacity_tokens, weights=None):
        batches.append((*survival.shape, capacity_tokens, weights is not None))
        return operations.select(survival, capacity_tokens, weights)

    drawn = []
    watched = operations._replace(select=select, draw=lambda *rows: drawn.append(rows))
    warm_up(watched, 20, [3, 5], 6, True, torch.zeros(21, 16, dtype=torch.int32), None)
    assert drawn
    sizes, depths, are_weighted = (1, 2, 4, 8, 16, 20), (3, 5), (False, True)
    assert batches == [(size, d, size, weighted) for size in sizes for d in depths for weighted in are_weighted]


# A tree of the root 0 and nodes 1..5, of which 2 and 4 hang below 1, and 5 below 4; column 6 holds nothing.
TREE = TreeShape(torch.tensor([[0, 0, 1, 0, 1, 4]]), torch.tensor([[0, 1, 2, 1, 2, 3]]))


SURVIVAL = torch.tensor([[0.9, 0.8, 0.5, 0.4, 0.1]])
PROPOSAL = Proposal(torch.tensor([[11, 12, 13, 14, 15]]), SURVIVAL, SURVIVAL, TREE)


def test_a_trees_rows_take_their_depths_positions_and_their_columns_slots():
    grid = make_grid(torch.tensor([10]), PROPOSAL, 3, 7)
    req_to_token = torch.arange(100, 140).view(1, 40)
    packed = get_operations("cpu", "tetris").pack_grid(
        torch.tensor([4], dtype=torch.int32), grid, torch.tensor([20]), req_to_token, torch.tensor([0]), 5
    )
    assert packed.input_ids.tolist() == [10, 11, 12, 13, 14]
    assert packed.positions.tolist() == [20, 21, 22, 21, 22]
    assert packed.slots.tolist() == [120, 121, 122, 123, 124]
