"""Acceptance of ragged chains, and the draw of the target's own tokens."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tetris_sglang.acceptance import accept_chain

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
        pytest.param([1, 2, 3], [1, 2, 3, 4], 1, (1, 2), id="unselected drafts do not count, though they match"),
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


def test_no_value_is_read_on_the_host():
    """Meta tensors have no values: whatever waits for the device, or takes its shape from data, raises."""
    tokens = torch.empty(4, 7, dtype=torch.int64, device="meta")
    draft_lens = torch.empty(4, dtype=torch.int32, device="meta")
    accept_chain(tokens, tokens, draft_lens)
    with pytest.raises((RuntimeError, NotImplementedError)):
        draft_lens.max().item()  # the check can fail


def test_bad_shapes_are_named():
    tokens = torch.zeros(2, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match="target_tokens of the same shape"):
        accept_chain(tokens, tokens[:, :2], torch.zeros(2, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"draft_lens \[2\]"):
        accept_chain(tokens, tokens, torch.zeros(3, dtype=torch.int32))
