"""Perturbed logits: the torch function's own, whatever the rows ask for."""

import pytest
import torch

from tests.kernels.batches import DEVICE
from tetris_sglang.acceptance import noise as reference
from tetris_sglang.acceptance.noise import RequestNoise
from tetris_sglang.kernels.noise import BLOCK, draw, perturb


def make_rows(rows: int, columns: int, dtype: torch.dtype, seed: int = 0):
    """Logits, noise with greedy rows in it, positions."""
    generator = torch.Generator().manual_seed(seed)
    logits = (4 * torch.randn(rows, columns, generator=generator)).to(dtype)
    seeds = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator)
    scales = torch.tensor([1.0, 0.0, 0.3, 2.5]).repeat(rows)[:rows]
    positions = torch.randint(2**17, (rows,), generator=generator)
    return logits, RequestNoise(seeds, scales), positions


def run(logits, noise, positions, token_ids=None):
    noise = RequestNoise(*(part.to(DEVICE) for part in noise))
    ids = None if token_ids is None else token_ids.to(DEVICE)
    return perturb(logits.to(DEVICE), noise, positions.to(DEVICE), ids).cpu()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows, columns", [(1, 7), (5, BLOCK + 3), (2, 40_000)])
def test_equals_torch(rows, columns, dtype):
    arguments = make_rows(rows, columns, dtype, columns)
    actual, expected = run(*arguments), reference.perturb(*arguments)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-4)
    # Greedy rows are the logits, to the bit; the others are far from them.
    greedy = arguments[1].scales == 0
    assert torch.equal(actual[greedy], arguments[0].float()[greedy])
    assert bool(((actual - arguments[0].float()).abs()[~greedy].mean(dim=1) > 0.1).all())


def test_tokens_keep_their_noise_in_another_order():
    """A head's shortened vocabulary."""
    logits, noise, positions = make_rows(3, 2000, torch.float32)
    token_ids = torch.randperm(2000)[:700]
    actual = run(logits[:, token_ids].contiguous(), noise, positions, token_ids)
    torch.testing.assert_close(actual, run(logits, noise, positions)[:, token_ids], rtol=0, atol=0)


def test_rows_may_lie_apart():
    logits, noise, positions = make_rows(4, 300, torch.float32)
    apart = torch.nn.functional.pad(logits, (0, 20))[:, :300]
    assert apart.stride(0) == 320
    assert torch.equal(run(apart, noise, positions), run(logits, noise, positions))


@pytest.mark.parametrize("rows, columns", [(40, 7), (40, BLOCK), (6, 40_000)])
def test_draws_as_torch(rows, columns):
    logits, noise, positions = make_rows(rows, columns, torch.float32, columns)
    weights = logits.softmax(dim=1)
    # As filters leave them, and far apart.
    weights = torch.nn.functional.pad(weights.where(weights >= weights.median(), 0.0), (0, 9))[:, :columns]
    drawn = draw(*(part.to(DEVICE) for part in (weights, noise.seeds, positions))).cpu()
    assert drawn.dtype == torch.int64
    assert drawn.tolist() == reference.draw(weights, noise.seeds, positions).tolist()
    assert len(drawn.unique()) > 2 and bool((weights.gather(1, drawn[:, None]) > 0).all())


def test_weights_must_be_float32():
    rows = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    weights = torch.zeros((2, 3), dtype=torch.bfloat16, device=DEVICE)
    with pytest.raises(ValueError, match=r"weights must be \[rows, n\] of torch.float32"):
        draw(weights, rows, rows)


@pytest.mark.parametrize(
    "change, name",
    [
        ({"logits": torch.zeros((2, 3), dtype=torch.int64)}, "logits"),
        ({"positions": torch.zeros(3, dtype=torch.int64)}, "positions"),
        ({"seeds": torch.zeros(2, dtype=torch.int32)}, "seeds"),
        ({"scales": torch.zeros(2, dtype=torch.float64)}, "scales"),
        ({"token_ids": torch.zeros(2, dtype=torch.int64)}, "token_ids"),
    ],
)
def test_bad_arguments_are_named(change, name):
    good = {
        "logits": torch.zeros((2, 3)),
        "seeds": torch.zeros(2, dtype=torch.int64),
        "scales": torch.zeros(2),
        "positions": torch.zeros(2, dtype=torch.int64),
        "token_ids": None,
    }
    given = good | change
    with pytest.raises(ValueError, match=name):
        run(
            given["logits"],
            RequestNoise(given["seeds"], given["scales"]),
            given["positions"],
            given["token_ids"],
        )
