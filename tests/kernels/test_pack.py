"""Packing: the torch operations' own layout, and surplus rows that do no harm."""

import pytest
import torch

from tests.kernels.batches import DEVICE, Batch, Trees, assert_equal, on_device
from tetris_sglang.kernels.pack import pack_rows
from tetris_sglang.packing import pack_rows_reference

BOTH = pytest.mark.parametrize("pack", [pack_rows, pack_rows_reference])


def arguments(case: Batch) -> list[torch.Tensor]:
    return [case.draft_lens, case.candidates, case.seq_lens, case.req_to_token, case.req_pool_indices]


@BOTH
def test_every_row_is_a_cell_of_the_grid_in_order(pack):
    """The definition, read aloud."""
    case = Batch.random(batch=21, width=6, seed=1, vocab=99)
    packed = pack(*on_device(*arguments(case)), case.num_tokens + 2)
    rows = []
    for request, draft_len in enumerate(case.draft_lens.tolist()):
        for column in range(draft_len + 1):
            position = int(case.seq_lens[request]) + column
            slot = int(case.req_to_token[case.req_pool_indices[request], position])
            rows.append((request, column, position, int(case.candidates[request, column]), slot))
    rows += [(20, 0, 0, 0, 0)] * 2
    fields = (packed.requests, packed.columns, packed.positions, packed.input_ids, packed.slots)
    assert list(zip(*(field.tolist() for field in fields), strict=True)) == rows
    assert packed.verify_lens.tolist() == [draft_len + 1 for draft_len in case.draft_lens.tolist()]
    assert packed.qo_indptr.diff().tolist() == packed.verify_lens.tolist()
    assert packed.qo_indptr[0] == 0 and packed.qo_indptr[-1] == len(rows) - 2


@BOTH
def test_docstring_example(pack):
    draft_lens, seq_lens = torch.tensor([1, 0], dtype=torch.int32), torch.tensor([5, 9])
    table = torch.arange(40, dtype=torch.int32).view(2, 20)
    candidates, pool_rows = torch.tensor([[7, 8], [9, 4]]), torch.tensor([1, 0])
    packed = pack(*on_device(draft_lens, candidates, seq_lens, table, pool_rows), 4)
    assert packed.requests.tolist() == [0, 0, 1, 1]
    assert packed.columns.tolist() == [0, 1, 0, 0]
    assert packed.qo_indptr.tolist() == [0, 2, 3]
    assert packed.positions.tolist() == [5, 6, 9, 0]
    assert packed.input_ids.tolist() == [7, 8, 9, 0]
    assert packed.slots.tolist() == [25, 26, 9, 0]


@pytest.mark.parametrize("batch", [1, 2, 15, 16, 17, 257])
@pytest.mark.parametrize("width", [1, 2, 7, 17])
def test_equals_torch(batch, width):
    for surplus, dtype in [(0, torch.int64), (3, torch.int32), (5 * width + 300, torch.int64)]:
        case = Batch.random(batch, width, seed=batch * width, dtype=dtype)
        num_tokens = case.num_tokens + surplus
        expected = pack_rows_reference(*arguments(case), num_tokens)
        assert_equal(pack_rows(*on_device(*arguments(case)), num_tokens), expected)


@pytest.mark.parametrize("batch, width", [(1, 2), (16, 7), (33, 17)])
def test_trees_equal_torch(batch, width):
    """Depths are positions, slots stay with the columns."""
    case, trees = Batch.random(batch, width, seed=width), Trees.random(batch, width, seed=width)
    given, num_tokens = arguments(case), case.num_tokens + 3
    packed = pack_rows(*on_device(*given), num_tokens, depths=trees.depths.to(DEVICE))
    assert_equal(packed, pack_rows_reference(*given, num_tokens, depths=trees.depths))
    chains = pack_rows_reference(*given, num_tokens)
    assert torch.equal(packed.slots.cpu(), chains.slots)
    rows = packed.requests[:-3].cpu(), packed.columns[:-3].cpu()
    assert torch.equal(packed.positions[:-3].cpu(), case.seq_lens[rows[0]] + trees.depths[rows])


def test_tokens_without_a_row_are_left_out():
    case = Batch.random(batch=19, width=5, seed=4)
    assert_equal(
        pack_rows(*on_device(*arguments(case)), case.num_tokens - 3),
        pack_rows_reference(*arguments(case), case.num_tokens - 3),
    )


def test_bad_input_is_named():
    case = Batch.random(batch=3, width=4, seed=0)
    for changes, message in [
        ({"draft_lens": case.draft_lens.long()}, r"draft_lens must be torch.int32 \[3\]"),
        ({"draft_lens": case.draft_lens[:2]}, r"draft_lens must be torch.int32 \[3\]"),
        ({"candidates": case.candidates[0]}, r"candidates \[batch, width\]"),
        ({"candidates": case.candidates.int()}, r"candidates must be torch.int64 \[3, 4\]"),
        ({"seq_lens": case.seq_lens.float()}, r"seq_lens must be torch.int32 or torch.int64 \[3\]"),
        ({"req_to_token": case.req_to_token.t()}, "req_to_token must be contiguous"),
        ({"req_pool_indices": case.req_pool_indices[1:]}, "req_pool_indices must be"),
    ]:
        with pytest.raises(ValueError, match=message):
            pack_rows(*on_device(*arguments(case._replace(**changes))), case.num_tokens)
    with pytest.raises(ValueError, match="a batch of 3 cannot be packed into 2 rows"):
        pack_rows(*on_device(*arguments(case)), 2)
    with pytest.raises(ValueError, match="a batch of 0"):
        pack_rows(*on_device(*arguments(Batch.random(batch=0, width=4, seed=0))), 2)
