"""Acceptance of ragged chains, and the draw of the target's own tokens."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tetris_sglang.acceptance import accept_chain, sample_rows

SMALLEST, LARGEST = 0.0, 1 - 2.0**-53  # of torch.rand(dtype=float64)
ROOT = 99


def accept_one(candidates: list[int], target_tokens: list[int], draft_len: int) -> tuple[int, int]:
    """The rule for one request, read aloud."""
    accepted = 0
    while accepted < draft_len and candidates[accepted + 1] == target_tokens[accepted]:
        accepted += 1
    return accepted, target_tokens[accepted]


@pytest.mark.parametrize(
    "drafts, target_tokens, draft_len, expected",
    [
        pytest.param([1, 2, 3], [1, 2, 3, 4], 3, (3, 4), id="all accepted: bonus after the last draft"),
        pytest.param([1, 2, 3], [1, 9, 3, 4], 3, (1, 9), id="a later match does not count"),
        pytest.param([1, 2, 3], [8, 2, 3, 4], 3, (0, 8), id="first draft rejected"),
        pytest.param(
            [1, 2, 3], [1, 2, 3, 4], 1, (1, 2), id="unselected drafts do not count, though they match"
        ),
        pytest.param([1, 2, 3], [1, 2, 3, 4], 0, (0, 1), id="no drafts selected: the bonus alone"),
        pytest.param([1, 1, 1], [1, 1, 1, 1], 2, (2, 1), id="repeated tokens"),
    ],
)
def test_accept_chain(drafts, target_tokens, draft_len, expected):
    result = accept_chain(
        torch.tensor([[ROOT, *drafts]]),
        torch.tensor([target_tokens]),
        torch.tensor([draft_len], dtype=torch.int32),
    )
    assert (result.num_accepted.tolist(), result.bonus_tokens.tolist()) == ([expected[0]], [expected[1]])
    assert (result.num_accepted.dtype, result.bonus_tokens.dtype) == (torch.int32, torch.int64)


@settings(deadline=None, max_examples=200)
@given(st.integers(0, 2**32 - 1), st.integers(1, 17), st.integers(1, 9), st.integers(1, 3))
def test_batch_equals_one_by_one_and_garbage_never_matters(seed, batch, width, vocab):
    generator = torch.Generator().manual_seed(seed)

    def draw(high, shape):
        return torch.randint(0, high, shape, generator=generator)

    candidates, target_tokens = draw(vocab, (batch, width)), draw(vocab, (batch, width))
    draft_lens = draw(width, (batch,)).to(torch.int32)
    rows = zip(candidates.tolist(), target_tokens.tolist(), draft_lens.tolist(), strict=True)
    expected = [accept_one(*row) for row in rows]

    def observed(candidates, target_tokens):
        result = accept_chain(candidates, target_tokens, draft_lens)
        return list(zip(result.num_accepted.tolist(), result.bonus_tokens.tolist(), strict=True))

    assert observed(candidates, target_tokens) == expected
    # The worst garbage: beyond draft_lens every draft matches, and tokens are outside any vocabulary.
    garbage = torch.arange(width) > draft_lens[:, None]
    candidates, target_tokens = candidates.clone(), target_tokens.clone()
    candidates[garbage] = -(2**40)
    target_tokens[garbage] = -(2**40)
    candidates[:, 0] = -1  # the root is not compared either
    last = draft_lens.long()[:, None]
    if width > 1:  # the first unselected draft matches the target's token before it
        beyond = (last + 1).clamp(max=width - 1)
        matching = target_tokens.gather(1, last)
        unselected = last + 1 < width
        candidates.scatter_(1, beyond, torch.where(unselected, matching, candidates.gather(1, beyond)))
    assert observed(candidates, target_tokens) == expected


def test_sample_rows_inverts_the_cdf():
    probs = torch.tensor([[0.2, 0.0, 0.3, 0.5]]).repeat(6, 1)
    uniforms = torch.tensor([SMALLEST, 0.19, 0.21, 0.49, 0.51, LARGEST], dtype=torch.float64)
    assert sample_rows(probs, uniforms).tolist() == [0, 0, 2, 2, 3, 3]


def test_sample_rows_renormalises_filtered_rows():
    probs = torch.tensor([[0.0, 0.02, 0.0, 0.06], [0.0, 3.0, 0.0, 1.0]])
    assert sample_rows(probs, torch.tensor([0.24, 0.74], dtype=torch.float64)).tolist() == [1, 1]
    assert sample_rows(probs, torch.tensor([0.26, 0.76], dtype=torch.float64)).tolist() == [3, 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("vocab", [5, 999, 50257])
def test_zero_probability_is_never_drawn(dtype, vocab):
    """Also at the ends of the interval and exactly on the steps of the CDF, where rounding decides."""
    generator = torch.Generator().manual_seed(vocab)
    probs = torch.rand(1, vocab, generator=generator, dtype=torch.float64)
    probs *= torch.rand(1, vocab, generator=generator) < 0.3
    probs[0, [0, -1]] = 0.0
    probs[0, 2] = 1.0
    probs = (probs / probs.sum()).to(dtype)
    cdf = probs.double().cumsum(dim=1)[0]
    steps = (cdf / cdf[-1]).clamp(max=LARGEST)
    uniforms = torch.cat([torch.tensor([SMALLEST, 2.0**-53, LARGEST], dtype=torch.float64), steps[:500]])
    tokens = sample_rows(probs.expand(len(uniforms), -1), uniforms)
    assert (probs[0, tokens] > 0).all()
    assert tokens[0] == probs[0].nonzero()[0] and tokens[2] == probs[0].nonzero()[-1]


def test_a_threshold_rounded_up_to_the_total_still_draws_a_possible_token():
    """The total times a uniform next to 1 rounds to the total itself, past every step of the CDF."""
    total = 2.0**-1074
    assert total * LARGEST == total
    probs = torch.tensor([[0.0, total, 0.0]], dtype=torch.float64)
    assert sample_rows(probs, torch.tensor([LARGEST], dtype=torch.float64)).tolist() == [1]


def test_certain_tokens_are_always_accepted_and_impossible_ones_never():
    rows, vocab = 4096, 7
    uniforms = torch.rand(rows, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    certain = torch.zeros(rows, vocab)
    certain[:, 3] = 1.0
    impossible = torch.full((rows, vocab), 1 / 6)
    impossible[:, 3] = 0.0
    candidates = torch.tensor([[ROOT, 3]]).repeat(rows, 1)
    draft_lens = torch.ones(rows, dtype=torch.int32)
    for probs, expected in ((certain, 1), (impossible, 0)):
        tokens = sample_rows(probs, uniforms)
        accepted = accept_chain(candidates, tokens[:, None].repeat(1, 2), draft_lens).num_accepted
        assert (accepted == expected).all()


def test_neither_reads_a_value_on_the_host():
    """Meta tensors have no values: whatever waits for the device, or takes its shape from data, raises."""
    tokens = torch.empty(4, 7, dtype=torch.int64, device="meta")
    draft_lens = torch.empty(4, dtype=torch.int32, device="meta")
    accept_chain(tokens, tokens, draft_lens)
    sample_rows(torch.empty(9, 100, device="meta"), torch.empty(9, dtype=torch.float64, device="meta"))
    with pytest.raises((RuntimeError, NotImplementedError)):
        draft_lens.max().item()  # the check can fail


def test_bad_shapes_are_named():
    tokens = torch.zeros(2, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match="target_tokens of the same shape"):
        accept_chain(tokens, tokens[:, :2], torch.zeros(2, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"draft_lens \[2\]"):
        accept_chain(tokens, tokens, torch.zeros(3, dtype=torch.int32))
    with pytest.raises(ValueError, match="float64 uniforms"):
        sample_rows(torch.ones(2, 3), torch.rand(2))
    with pytest.raises(ValueError, match=r"uniforms \[rows\]"):
        sample_rows(torch.ones(2, 3), torch.rand(3, dtype=torch.float64))
