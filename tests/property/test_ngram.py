"""N-gram drafts: equal to their plain definition, for any batch, and blind to what is not the request's text."""

import random
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tetris_sglang.drafting import (
    PRIOR,
    NgramProposal,
    estimate_probs,
    look_up,
    look_up_reference,
    propose_by_lookup,
    propose_by_lookup_reference,
)

settings.register_profile("tetris", deadline=None, max_examples=200)
settings.load_profile("tetris")

# Few distinct tokens: matches of every length, ties, and branches that run out of tokens.
TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=40) | st.builds(
    lambda block, times, end: block * times + end,
    st.lists(st.integers(0, 9), min_size=1, max_size=7),
    st.integers(1, 6),
    st.lists(st.integers(0, 9), max_size=3),
)
SETTINGS = st.fixed_dictionaries(
    {
        "depth": st.integers(1, 7),
        "branches": st.integers(1, 5),
        "max_match": st.integers(1, 9),
        "window": st.none() | st.integers(1, 45),
        "max_matches": st.integers(1, 12) | st.just(32),
    }
)


def make_table(texts: list[list[int]], seed: int = 0, spare: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    """(history, rows, lens): the texts in shuffled rows, and everything else full of tokens that tempt to match."""
    shuffle = random.Random(seed)
    lens = torch.tensor([len(text) for text in texts])
    rows = list(range(len(texts) + spare))
    shuffle.shuffle(rows)
    rows = rows[: len(texts)]
    max_len = int(lens.max()) + shuffle.randrange(6)
    history = torch.empty(len(texts) + spare, max_len, dtype=torch.int32)
    for row in history:
        row.copy_(torch.tensor(shuffle.choices(texts[0], k=max_len)))
    for row, text in zip(rows, texts, strict=True):
        history[row, : len(text)] = torch.tensor(text, dtype=torch.int32)
        for column in range(len(text), max_len):  # an earlier user's text, which seems to go on just so
            history[row, column] = text[(column - len(text)) % len(text)]
    return history, torch.tensor(rows), lens


def propose(text: list[int], **settings) -> NgramProposal:
    return propose_by_lookup(*make_table([text]), **settings)


# --- what is drafted ----------------------------------------------------------------------------------------


def test_docstring_example():
    text = [1, 2, 3, 9, 1, 2, 4, 1, 2]
    assert propose(text, depth=3).tokens.tolist() == [[[4, 1, 2]]]
    assert propose(text, depth=3, branches=2).tokens.tolist() == [[[4, 1, 2], [3, 9, 1]]]
    lookup = look_up(*make_table([text]), depth=3, branches=2)
    assert lookup.match_lens.tolist() == [[[2, 3, 4], [2, 3, 4]]]
    assert lookup.agreeing.tolist() == [[[1, 1, 1], [1, 1, 1]]]
    assert lookup.known.tolist() == [[[2, 1, 1], [1, 1, 1]]]
    assert [branch.tokens for branch in look_up_reference(text, depth=3, branches=2)] == [
        [4, 1, 2],
        [3, 9, 1],
    ]


@given(st.lists(TEXTS, min_size=1, max_size=6), SETTINGS, st.integers(0, 99))
def test_batch_equals_the_definition(texts, kwargs, seed):
    history, rows, lens = make_table(texts, seed)
    lookup = look_up(history, rows, lens, **kwargs)
    proposal = propose_by_lookup(history.long(), rows.int(), lens.int(), **kwargs)
    assert proposal.tokens.dtype == torch.int64 and proposal.probs.dtype == torch.float32
    for request, text in enumerate(texts):
        expected = look_up_reference(text, **kwargs)
        for field in ("tokens", "match_lens", "agreeing", "known"):
            actual = getattr(lookup, field)[request].tolist()
            assert actual == [getattr(branch, field) for branch in expected], field
        tokens, probs = zip(*propose_by_lookup_reference(text, **kwargs), strict=True)
        assert proposal.tokens[request].tolist() == list(tokens)
        for actual, prob in zip(proposal.probs[request].tolist(), probs, strict=True):
            assert actual == pytest.approx(prob, rel=1e-5)


@pytest.mark.parametrize("batch, length, vocabulary", [(1, 600, 2), (17, 500, 30), (64, 150, 8)])
def test_batch_equals_the_definition_at_serving_sizes(batch, length, vocabulary):
    source = random.Random(batch)
    texts = [source.choices(range(vocabulary), k=source.randint(1, length)) for _ in range(batch)]
    history, rows, lens = make_table(texts, seed=batch)
    for window in (None, 100):
        lookup = look_up(history, rows, lens, depth=6, branches=3, window=window)
        for request, text in enumerate(texts):
            expected = look_up_reference(text, depth=6, branches=3, window=window)
            assert lookup.tokens[request].tolist() == [branch.tokens for branch in expected]
            assert lookup.known[request].tolist() == [branch.known for branch in expected]
            assert lookup.agreeing[request].tolist() == [branch.agreeing for branch in expected]


@pytest.mark.parametrize("period", [1, 2, 5, 11])
@pytest.mark.parametrize("repeats", [1.2, 2, 7.5])
def test_periodic_text_goes_on_with_its_period(period, repeats):
    """Also where the match is so near the end that the copy has to read what it has just drafted."""
    length = max(period + 1, round(period * repeats))
    forever = [10 + position % period for position in range(length + 16)]
    proposal = propose(forever[:length], depth=16)
    assert proposal.tokens[0, 0].tolist() == forever[length:]


def test_more_repeats_make_it_surer():
    probs = torch.cat([propose([5, 6, 7] * repeats, depth=4).probs[0] for repeats in (2, 3, 5, 9)])
    assert (probs[1:] > probs[:-1]).all()
    assert (probs[-1] > 0.85).all()


def test_the_longest_match_wins_then_the_most_recent():
    assert propose([7, 8, 1, 9, 8, 2, 5, 8, 3, 7, 8], depth=1).tokens.tolist() == [[[1]]]
    assert propose([8, 1, 9, 8, 2, 5, 8, 3, 4, 8], depth=1).tokens.tolist() == [[[3]]]
    # With one token compared, the longer match is not seen.
    assert propose([7, 8, 1, 9, 8, 2, 5, 8, 3, 7, 8], depth=1, max_match=1).tokens.tolist() == [[[3]]]


def test_branches_follow_the_best_match_of_each_first_token():
    text = [7, 8, 1, 4, 4, 7, 8, 1, 5, 6, 8, 2, 3, 9, 7, 8]
    lookup = look_up(*make_table([text]), depth=3, branches=4)
    #  7 8 -> 1 5 6 (recent, long); 8 -> 2 3 9; nothing matches: the last token again, then the one before it
    assert lookup.tokens.tolist() == [[[1, 5, 6], [2, 3, 9], [8, 8, 8], [7, 8, 7]]]
    assert lookup.match_lens[0, :, 0].tolist() == [2, 1, 0, 0]
    assert lookup.agreeing[0, :2, 0].tolist() == [2, 1]
    assert lookup.agreeing[0, 0].tolist() == [2, 1, 1] and lookup.known[0, 0].tolist() == [2, 2, 1]


def test_one_known_token_is_repeated_and_small_ids_fill_up():
    proposal = propose([1], depth=3, branches=4)
    assert proposal.tokens.tolist() == [[[1, 1, 1], [0, 0, 0], [2, 2, 2], [3, 3, 3]]]
    assert (proposal.probs[0, :, 0] < 0.1).all()
    assert propose([900], depth=2, branches=3).tokens[0, :, 0].tolist() == [900, 0, 1]


def test_without_a_match_the_last_token_comes_with_little_hope():
    proposal = propose([3, 1, 4, 5, 9, 2, 6], depth=4, branches=2)
    assert proposal.tokens.tolist() == [[[6, 6, 6, 6], [2, 6, 2, 6]]]
    matched = propose([3, 1, 4, 5, 9, 2, 3], depth=1)
    assert matched.tokens.item() == 1
    assert matched.probs.item() > 3 * proposal.probs[0, 0, 0].item()


# --- what it must not depend on -----------------------------------------------------------------------------


@given(st.lists(TEXTS, min_size=2, max_size=6), SETTINGS, st.integers(0, 99))
def test_neither_garbage_nor_neighbours_matter(texts, kwargs, seed):
    history, rows, lens = make_table(texts, seed)
    proposal = propose_by_lookup(history, rows, lens, **kwargs)
    other = torch.full_like(history, -1 if seed % 2 else 2**31 - 1)
    for request, text in enumerate(texts):
        other[rows[request], : len(text)] = history[rows[request], : len(text)]
    for actual, expected in zip(propose_by_lookup(other, rows, lens, **kwargs), proposal, strict=True):
        assert torch.equal(actual, expected)
    for request in range(len(texts)):
        alone = propose_by_lookup(history, rows[request : request + 1], lens[request : request + 1], **kwargs)
        assert torch.equal(alone.tokens[0], proposal.tokens[request])
        assert torch.equal(alone.probs[0], proposal.probs[request])


@given(st.lists(TEXTS, min_size=1, max_size=6), SETTINGS, st.randoms(use_true_random=False))
def test_permuted_requests_get_permuted_drafts(texts, kwargs, shuffle):
    history, rows, lens = make_table(texts)
    order = list(range(len(texts)))
    shuffle.shuffle(order)
    proposal = propose_by_lookup(history, rows, lens, **kwargs)
    permuted = propose_by_lookup(history, rows[order], lens[order], **kwargs)
    assert torch.equal(permuted.tokens, proposal.tokens[order])
    assert torch.equal(permuted.probs, proposal.probs[order])


@given(TEXTS, st.integers(1, 45), st.integers(1, 4))
def test_a_window_is_a_text_that_begins_there(text, window, branches):
    windowed = propose(text, depth=5, branches=branches, window=window)
    truncated = propose(text[-window:], depth=5, branches=branches)
    assert torch.equal(windowed.tokens, truncated.tokens)
    assert torch.equal(windowed.probs, truncated.probs)


def test_a_padding_request_of_length_0_harms_nobody():
    texts = [[1, 2, 1, 2, 1], [4, 4, 4]]
    history, rows, lens = make_table(texts)
    padded_rows, padded_lens = (
        torch.cat((rows, rows[:1])),
        torch.cat((lens, torch.zeros(1, dtype=torch.int64))),
    )
    for window in (None, 2):
        padded = propose_by_lookup(history, padded_rows, padded_lens, depth=4, branches=2, window=window)
        proposal = propose_by_lookup(history, rows, lens, depth=4, branches=2, window=window)
        assert torch.equal(padded.tokens[:2], proposal.tokens)
        assert torch.equal(padded.probs[:2], proposal.probs)
        single = propose_by_lookup(history, rows[:1], torch.tensor([1]), depth=4, branches=2, window=window)
        assert torch.equal(padded.tokens[2:], single.tokens)  # 0 counts as 1


def test_the_table_is_left_as_it_was():
    history, rows, lens = make_table([[1, 2, 1, 2, 1], [4, 4, 4]])
    before = history.clone(), rows.clone(), lens.clone()
    propose_by_lookup(history, rows, lens, depth=4, branches=2)
    assert all(torch.equal(a, b) for a, b in zip((history, rows, lens), before, strict=True))


def test_an_empty_batch_drafts_nothing():
    empty = torch.zeros(0, dtype=torch.int64)
    proposal = propose_by_lookup(torch.zeros(3, 9, dtype=torch.int32), empty, empty, depth=4, branches=2)
    assert proposal.tokens.shape == proposal.probs.shape == (0, 2, 4)


# --- branches and probabilities -----------------------------------------------------------------------------


@given(TEXTS, SETTINGS)
def test_first_tokens_differ_and_better_matches_come_first(text, kwargs):
    lookup = look_up(*make_table([text]), **kwargs)
    firsts = lookup.tokens[0, :, 0].tolist()
    assert len(set(firsts)) == kwargs["branches"]
    match_lens = lookup.match_lens[0, :, 0]
    assert (match_lens[1:] <= match_lens[:-1]).all()
    assert (lookup.agreeing <= lookup.known).all()


@given(TEXTS, SETTINGS)
def test_probs_are_probabilities_and_siblings_share_one(text, kwargs):
    probs = propose(text, **kwargs).probs
    assert ((probs > 0) & (probs < 1)).all()
    assert probs[0, :, 0].sum() <= 1 + 1e-3


def test_longer_matches_are_trusted_more():
    """One occurrence, sharing 0, 1, 2, ... tokens with the end of the text."""
    for agreeing, known in [(0, 0), (1, 1), (2, 3), (30, 32)]:
        match_lens = torch.arange(20)[:, None, None]
        probs = estimate_probs(
            match_lens, torch.full_like(match_lens, agreeing), torch.full_like(match_lens, known)
        )
        assert (probs[1:] > probs[:-1]).all()
    probs = [
        propose([*range(100, 108), 5, *range(50, 60), *range(108 - shared, 108)], depth=1).probs.item()
        for shared in range(9)
    ]
    assert all(longer > shorter for shorter, longer in pairwise(probs))


def test_agreement_is_trusted_more():
    known = torch.full((33, 1, 1), 32)
    agreeing = torch.arange(33)[:, None, None]
    match_lens = torch.full_like(known, 3)
    probs = estimate_probs(match_lens, agreeing, known)
    assert (probs[1:] > probs[:-1]).all()
    assert probs[16].item() == pytest.approx(
        0.5, abs=0.05
    )  # half of many occurrences: the prior hardly matters
    unanimous = estimate_probs(match_lens, agreeing, agreeing)
    assert (unanimous[1:] > unanimous[:-1]).all()


def test_a_further_branch_gets_a_share_of_what_better_ones_leave():
    match_lens = torch.tensor([[[3, 4], [3, 4], [1, 2], [0, 1]]])
    agreeing = torch.tensor([[[4, 2], [2, 2], [1, 1], [0, 0]]])
    known = torch.tensor([[[8, 4], [4, 2], [1, 1], [0, 0]]])
    probs = estimate_probs(match_lens, agreeing, known)[0]
    left_over = 1.0
    for branch in range(4):
        alone = estimate_probs(*(field[:, branch, None] for field in (match_lens, agreeing, known)))[0, 0]
        share = (branch + 1) ** -PRIOR.branch_decay if match_lens[0, branch, 0] > 0 else 1.0
        assert probs[branch, 0].item() == pytest.approx(left_over * share * alone[0].item(), rel=1e-5)
        assert probs[branch, 1].item() == pytest.approx(alone[1].item(), rel=1e-5)
        left_over *= 1 - share * alone[0].item()


def test_the_prior_is_a_prior():
    assert 0 < PRIOR.unmatched < 1 - PRIOR.miss_scale < 1
    assert min(PRIOR.miss_decay, PRIOR.weight, PRIOR.branch_decay) > 0


# --- boundaries ---------------------------------------------------------------------------------------------


def test_bad_input_is_named():
    history, rows, lens = make_table([[1, 2, 1], [3]])
    with pytest.raises(
        ValueError, match=r"history must be int32 or int64 \[num_rows, max_len\], got torch.float32"
    ):
        propose_by_lookup(history.float(), rows, lens, depth=2)
    with pytest.raises(ValueError, match="history must be"):
        propose_by_lookup(history[0], rows, lens, depth=2)
    with pytest.raises(ValueError, match=r"rows and lens must be int32 or int64 \[batch\]"):
        propose_by_lookup(history, rows, lens[:1], depth=2)
    with pytest.raises(ValueError, match="rows and lens must be"):
        propose_by_lookup(history, rows, lens.float(), depth=2)
    for max_match in (0, 256):
        with pytest.raises(ValueError, match=f"max_match must be in 1..255, got {max_match}"):
            propose_by_lookup(history, rows, lens, depth=2, max_match=max_match)
    for name in ("depth", "branches", "window", "max_matches"):
        with pytest.raises(ValueError, match=f"{name} must be >= 1, got 0"):
            propose_by_lookup(history, rows, lens, **({"depth": 2} | {name: 0}))
    endless = torch.empty(1, 2**28, dtype=torch.int32, device="meta")
    with pytest.raises(ValueError, match="too long for max_match 8: give window"):
        propose_by_lookup(endless, rows, lens, depth=2)


def test_drafting_never_reads_a_value_on_the_host():
    """Meta tensors have no values: whatever waits for the device, or takes its shape from data, raises."""
    history = torch.empty(9, 300, dtype=torch.int32, device="meta")
    rows = torch.empty(16, dtype=torch.int32, device="meta")
    for window in (None, 128):
        proposal = propose_by_lookup(history, rows, rows, depth=5, branches=3, window=window)
        assert proposal.tokens.shape == proposal.probs.shape == (16, 3, 5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_drafting_runs_in_a_cuda_graph_without_a_sync():
    source = random.Random(0)
    cases = [
        make_table([source.choices(range(5), k=source.randint(1, 60)) for _ in range(8)] + [[0] * 60], seed)
        for seed in range(3)
    ]
    cases = [(history[:, :60].contiguous(), rows, lens) for history, rows, lens in cases]
    static = [part.cuda() for part in cases[0]]
    kwargs = {"depth": 5, "branches": 3, "window": 50}
    propose_by_lookup(*static, **kwargs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.graph(graph):
            proposal = propose_by_lookup(*static, **kwargs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for case in cases:
        for buffer, part in zip(static, case, strict=True):
            buffer.copy_(part)
        graph.replay()
        expected = propose_by_lookup(*case, **kwargs)
        assert torch.equal(proposal.tokens.cpu(), expected.tokens)
        torch.testing.assert_close(proposal.probs.cpu(), expected.probs)
