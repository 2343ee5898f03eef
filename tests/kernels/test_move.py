"""Key-value rows of accepted nodes, on their way to where a chain would have them."""

import pytest
import torch

from tests.kernels.batches import DEVICE, on_device
from tetris_sglang.kernels.move import LARGEST_DEPTH, move_paths, plan_move


def make_buffers(row_bytes: list[int], num_rows: int, generator: torch.Generator) -> list[torch.Tensor]:
    return [torch.randint(256, (num_rows, width), dtype=torch.uint8, generator=generator).to(DEVICE) for width in row_bytes]


def move(buffers, slots, qo_indptr, path, num_accepted) -> None:
    widths = [buffer.shape[1] for buffer in buffers]
    move_paths(
        torch.tensor([buffer.data_ptr() for buffer in buffers], dtype=torch.uint64, device=DEVICE),
        torch.tensor(widths, device=DEVICE),
        max(widths),
        *on_device(slots, torch.tensor(qo_indptr, dtype=torch.int32), path, torch.tensor(num_accepted, dtype=torch.int32)),
    )


@pytest.mark.parametrize("batch, width", [(1, 2), (3, 7), (2, 40), (1, 300)])
def test_accepted_rows_move_to_their_depths(batch, width):
    """All of a request's are read before any is written: paths climb over slots that they leave."""
    generator = torch.Generator().manual_seed(width)
    pool = batch * width + 3
    # A pool's keys and values may differ in width, and the last block of bytes is not full.
    buffers = make_buffers([24, 1400, 8], pool, generator)
    slots = 1 + torch.randperm(pool - 1, generator=generator)[: batch * width]
    max_depth = max(1, width // 2)
    path = torch.full((batch, max_depth + 1), width - 1)
    num_accepted = torch.randint(1, max_depth + 1, (batch,), generator=generator).tolist()
    expected, has_moved = [buffer.clone() for buffer in buffers], width == 2
    for request, length in enumerate(num_accepted):
        nodes = 1 + torch.randperm(width - 1, generator=generator)[:length].sort().values
        path[request, 0], path[request, 1 : length + 1] = 0, nodes
        own = slots[request * width : (request + 1) * width].to(DEVICE)
        for before, buffer in zip(buffers, expected, strict=True):
            buffer[own[1 : length + 1]] = before[own[nodes.to(DEVICE)]]
        has_moved |= nodes.tolist() != list(range(1, length + 1))
    move(buffers, slots, [width * request for request in range(batch + 1)], path, num_accepted)
    assert all(torch.equal(*pair) for pair in zip(buffers, expected, strict=True))
    assert has_moved


def test_docstring_example():
    values = torch.tensor([[10], [11], [12], [13]], dtype=torch.int64, device=DEVICE)
    move([values.view(torch.uint8)], torch.arange(4), [0, 4], torch.tensor([[0, 2, 3]]), [2])
    assert values.flatten().tolist() == [10, 12, 13, 13]


def test_what_was_not_accepted_stays():
    buffers = make_buffers([8], 4, torch.Generator())
    before = buffers[0].clone()
    move(buffers, torch.arange(4), [0, 4], torch.tensor([[0, 3, 3]]), [0])
    assert torch.equal(buffers[0], before)


def test_a_program_keeps_no_more_whatever_the_rows():
    for num_rows in (1, 2, 33, 64, LARGEST_DEPTH + 1):
        rows, block = plan_move(num_rows)
        assert num_rows <= rows < 2 * num_rows and 2 <= block <= 64 and rows * block <= 2**11


@pytest.mark.parametrize(
    "slots, path, name",
    [
        (torch.zeros(3, dtype=torch.int32), torch.zeros((1, 3), dtype=torch.int64), "slots"),
        (torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64), "path"),
        (torch.zeros(3, dtype=torch.int64), torch.zeros((1, 3), dtype=torch.int32), "path"),
        (torch.zeros(3, dtype=torch.int64), torch.zeros((2, 3), dtype=torch.int64), "qo_indptr"),
        (torch.zeros(3, dtype=torch.int64), torch.zeros((1, 1025), dtype=torch.int64), "1024"),
    ],
)
def test_bad_arguments_are_named(slots, path, name):
    with pytest.raises(ValueError, match=name):
        move(make_buffers([8], 3, torch.Generator()), slots, [0, 3], path, [1])
