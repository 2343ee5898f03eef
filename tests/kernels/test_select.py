"""Selection in one launch: the torch functions' own choice, ties and rounding included."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels.batches import DEVICE, on_device
from tetris_sglang.kernels import select
from tetris_sglang.kernels.select import select_drafts
from tetris_sglang.selection import fill_capacity, survival_from_probs

TINY = torch.finfo(torch.float32).tiny
ODD_VALUES = [0.0, -0.0, 1.0, math.nan, math.inf, -1.0, 1.5, TINY, 2.0**-149, 0.5, 0.5]


def expected_lens(survival: Tensor, capacity_tokens: int, weights: Tensor | None = None) -> list[int]:
    return fill_capacity(survival, capacity_tokens, weights).tolist()


def assert_selects_as_torch(probs: Tensor, capacities: list[int], weights: Tensor | None = None) -> None:
    """Chains with these probabilities; the capacity is filled."""
    survival = survival_from_probs(probs)
    (on_it,) = on_device(survival)
    given = None if weights is None else weights.to(DEVICE)
    most = probs.numel() if weights is None else int((weights > 0).sum()) * probs.shape[1]
    for capacity in capacities:
        draft_lens = select_drafts(on_it, capacity, given)
        assert draft_lens.dtype == torch.int32 and draft_lens.device.type == DEVICE.type
        assert draft_lens.tolist() == expected_lens(survival, capacity, weights), f"capacity {capacity}"
        assert int(draft_lens.sum()) == min(capacity, most)


def test_docstring_example():
    (survival,) = on_device(torch.tensor([[0.9, 0.8], [0.5, 0.1]]))
    assert select_drafts(survival, 3).tolist() == [2, 1]


@pytest.mark.parametrize("batch, max_draft", [(1, 1), (1, 9), (7, 2), (33, 6), (257, 3), (64, 10)])
@pytest.mark.parametrize("levels", [2, 5, None])
def test_equals_torch(batch, max_draft, levels):
    """Many ties at few levels (0 and 1 among them); without levels hardly any."""
    generator = torch.Generator().manual_seed(batch * max_draft)
    if levels is None:
        probs = torch.rand(batch, max_draft, generator=generator)
    else:
        probs = torch.randint(0, levels + 1, (batch, max_draft), generator=generator) / levels
    total = batch * max_draft
    assert_selects_as_torch(probs, [0, 1, batch // 2, 2 * batch, total // 2, total + 5])


@pytest.mark.parametrize("batch, max_draft", [(20, 16), (3, 64)])
def test_equals_torch_at_large_depths(batch, max_draft):
    probs = 0.9 + 0.1 * torch.rand(batch, max_draft, generator=torch.Generator().manual_seed(max_draft))
    assert_selects_as_torch(probs, [batch * max_draft // 2])


@settings(max_examples=25)
@given(st.data())
def test_equals_torch_on_odd_values(data):
    batch, max_draft = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 6))
    values = st.sampled_from(ODD_VALUES) | st.floats(width=32)
    chain = st.lists(values, min_size=max_draft, max_size=max_draft)
    probs = torch.tensor(data.draw(st.lists(chain, min_size=batch, max_size=batch)), dtype=torch.float32)
    weight = st.sampled_from([0.0, 1.0, 0.125, 2.0**-18]) | st.floats(0, 1, width=32)
    weights = data.draw(st.none() | st.lists(weight, min_size=batch, max_size=batch))
    if weights is not None:
        weights = torch.tensor(weights, dtype=torch.float32)
    assert_selects_as_torch(probs, [data.draw(st.integers(0, batch * max_draft + 2))], weights)


def test_equals_torch_with_weights():
    """Of every size, zeros among them; rounded as torch rounds them."""
    generator = torch.Generator().manual_seed(3)
    probs, weights = torch.rand(64, 6, generator=generator), torch.rand(64, generator=generator)
    weights[::7] = 0
    assert_selects_as_torch(probs, [0, 1, 50, 100, 300, 324, 325, 384], weights)
    survival = survival_from_probs(probs)
    assert expected_lens(survival, 100, weights) != expected_lens(survival, 100)


def test_an_underflowing_survival_still_fills_the_capacity():
    probs = torch.full((5, 9), 1e-30)
    assert expected_lens(survival_from_probs(probs), 30) == [6] * 5
    assert_selects_as_torch(probs, [4, 11, 30, 43])


def test_a_capacity_beyond_int32_selects_everything():
    assert select_drafts(torch.ones(3, 2, device=DEVICE), 2**40).tolist() == [2, 2, 2]


@pytest.mark.parametrize("shape", [(0, 4), (3, 0)])
def test_empty_batch_or_no_drafts(shape):
    assert select_drafts(torch.ones(shape, device=DEVICE), 5).tolist() == [0] * shape[0]


@pytest.mark.parametrize("batch, max_draft", [(2049, 16), (2, 65), (600, 40)])
def test_what_exceeds_the_registers_goes_through_torch(batch, max_draft, monkeypatch):
    monkeypatch.setattr(select, "select_kernel", None)  # any use raises
    generator = torch.Generator().manual_seed(batch)
    levels = torch.tensor([0.0, 0.25, 0.5, 1.0])
    probs = levels[torch.randint(0, 4, (batch, max_draft), generator=generator)]
    assert_selects_as_torch(probs, [0, batch, batch * max_draft])
    weights = levels[torch.randint(0, 4, (batch,), generator=generator)]
    assert_selects_as_torch(probs, [batch], weights)


@pytest.mark.parametrize("max_draft", [1, 2, 8, 16, 64])
def test_no_launch_holds_more_survivals_per_thread_than_registers(max_draft):
    for power in range(13):
        block, num_warps = select.plan_launch(2**power, max_draft)
        if select.fits_one_launch(2**power, max_draft):
            assert block % (32 * num_warps) == 0
            assert block * max_draft <= 64 * 32 * num_warps


def test_bad_input_is_named():
    probs = torch.ones(2, 3, device=DEVICE)
    for bad, message in [
        (torch.ones(3), r"survival must be \[batch, max_draft\]"),
        (torch.ones(2, 3, dtype=torch.float64), r"survival must be torch.float32 \[2, 3\]"),
        (torch.ones(3, 2).t(), "survival must be contiguous"),
    ]:
        with pytest.raises(ValueError, match=message):
            select_drafts(bad.to(DEVICE), 1)
    with pytest.raises(ValueError, match="capacity_tokens must be >= 0, got -1"):
        select_drafts(probs, -1)
    with pytest.raises(ValueError, match=r"weights must be torch.float32 \[2\]"):
        select_drafts(probs, 1, torch.ones(3, device=DEVICE))
