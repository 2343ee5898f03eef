"""The lengths of a ragged pass against torch."""

import pytest
import torch

from tests.kernels.batches import DEVICE
from tetris_sglang.kernels.row_layout import lay_out_rows, lay_out_rows_reference


def lay_out(verify_lens, prefix_lens, num_rows, requests, has_mask=True):
    indptrs = [torch.full((requests + 1,), -7, dtype=torch.int32, device=DEVICE) for _ in range(3 if has_mask else 2)]
    lay_out_rows(verify_lens.to(DEVICE), prefix_lens.to(DEVICE), num_rows, *indptrs)
    return [indptr.tolist() for indptr in indptrs]


@pytest.mark.parametrize("seed", range(8))
def test_random_lengths(seed):
    generator = torch.Generator().manual_seed(seed)
    batch, spare = (int(torch.randint(1, high, (), generator=generator)) for high in (40, 5))
    verify_lens = torch.randint(1, 9, (batch,), generator=generator, dtype=torch.int32)
    # A draft's window may be longer than its request.
    prefix_lens = torch.randint(-1, 3000, (batch + seed % 2,), generator=generator)
    if seed % 3 == 0:
        prefix_lens = prefix_lens.to(torch.int32)
    num_rows = int(verify_lens.sum()) + seed
    expected = lay_out_rows_reference(verify_lens, prefix_lens, num_rows, batch + spare)
    assert lay_out(verify_lens, prefix_lens, num_rows, batch + spare) == [part.tolist() for part in expected]
    assert lay_out(verify_lens, prefix_lens, num_rows, batch + spare, has_mask=False) == [p.tolist() for p in expected[:2]]


def test_the_example_of_the_docstring():
    verify_lens = torch.tensor([2, 1], dtype=torch.int32)
    assert lay_out(verify_lens, torch.tensor([5, 3]), 4, 3) == [[0, 2, 3, 4], [0, 7, 11, 12], [0, 2, 3, 4]]


def test_what_does_not_fit_is_refused():
    verify_lens = torch.ones(3, dtype=torch.int32)
    with pytest.raises(ValueError, match="3 requests have 2 prefixes"):
        lay_out(verify_lens, torch.ones(2, dtype=torch.int64), 3, 4)
    with pytest.raises(ValueError, match="one must be spare"):
        lay_out(verify_lens, torch.ones(3, dtype=torch.int64), 3, 3)
    with pytest.raises(ValueError, match="verify_lens must be"):
        lay_out(verify_lens.long(), torch.ones(3, dtype=torch.int64), 3, 4)
