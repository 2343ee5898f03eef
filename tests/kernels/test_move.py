"""Key-value rows that move within their requests."""

import pytest
import torch

from tests.kernels.batches import DEVICE
from tetris_sglang.kernels.move import LARGEST_NUM_ROWS, move_rows, plan_move


def make_buffers(row_bytes: list[int], num_rows: int, generator: torch.Generator) -> list[torch.Tensor]:
    return [torch.randint(256, (num_rows, width), dtype=torch.uint8, generator=generator).to(DEVICE) for width in row_bytes]


def move(buffers: list[torch.Tensor], target: torch.Tensor, source: torch.Tensor) -> None:
    widths = [buffer.shape[1] for buffer in buffers]
    move_rows(
        torch.tensor([buffer.data_ptr() for buffer in buffers], dtype=torch.uint64, device=DEVICE),
        torch.tensor(widths, device=DEVICE),
        max(widths),
        target.to(DEVICE),
        source.to(DEVICE),
    )


@pytest.mark.parametrize("batch, num_rows", [(1, 1), (3, 7), (2, 40), (1, 300)])
def test_all_of_a_request_is_read_before_any_is_written(batch, num_rows):
    generator = torch.Generator().manual_seed(num_rows)
    pool = batch * num_rows + 3
    # A pool's keys and values may differ in width, and the last block of bytes is not full.
    buffers = make_buffers([24, 1400, 8], pool, generator)
    target = (1 + torch.randperm(pool - 1, generator=generator)[: batch * num_rows]).view(batch, num_rows)
    # Rows change places, stay, and are read by several.
    source = target.gather(1, torch.randint(num_rows, (batch, num_rows), generator=generator))
    expected = [buffer.clone() for buffer in buffers]
    for buffer in expected:
        buffer[target.flatten().to(DEVICE)] = buffer[source.flatten().to(DEVICE)]
    move(buffers, target, source)
    assert all(torch.equal(*pair) for pair in zip(buffers, expected, strict=True))
    if num_rows > 1:
        assert not torch.equal(target, source)


def test_rows_that_follow_each_other():
    values = torch.tensor([[10], [11], [12], [13]], dtype=torch.int64, device=DEVICE)
    move([values.view(torch.uint8)], torch.tensor([[0, 1]]), torch.tensor([[1, 2]]))
    assert values.flatten().tolist() == [11, 12, 12, 13]


def test_nothing_to_move():
    buffers = make_buffers([8], 3, torch.Generator())
    before = buffers[0].clone()
    move(buffers, torch.zeros((2, 0), dtype=torch.int64), torch.zeros((2, 0), dtype=torch.int64))
    assert torch.equal(buffers[0], before)


def test_a_program_keeps_no_more_whatever_the_rows():
    for num_rows in (1, 2, 33, 64, LARGEST_NUM_ROWS):
        rows, block = plan_move(num_rows)
        assert num_rows <= rows < 2 * num_rows and 2 <= block <= 64 and rows * block <= 2**11


@pytest.mark.parametrize(
    "target, source, name",
    [
        (torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64), "target"),
        (torch.zeros((1, 3), dtype=torch.int32), torch.zeros((1, 3), dtype=torch.int64), "target"),
        (torch.zeros((1, 3), dtype=torch.int64), torch.zeros((1, 4), dtype=torch.int64), "source"),
        (torch.zeros((1, 1025), dtype=torch.int64), torch.zeros((1, 1025), dtype=torch.int64), "1024"),
    ],
)
def test_bad_arguments_are_named(target, source, name):
    with pytest.raises(ValueError, match=name):
        move(make_buffers([8], 3, torch.Generator()), target, source)
