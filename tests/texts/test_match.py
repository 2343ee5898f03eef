"""Matches: what the text says of each draft is what reading the text says, and what that is worth is learnt."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from tetris_sglang.drafting import ChainGrower, CombGrower, Proposal, propose_matches
from tetris_sglang.estimates import Calibration, EvidenceOffsets
from tetris_sglang.estimates.estimator import AcceptanceEstimator
from tetris_sglang.selection import survival_from_probs
from tetris_sglang.texts import (
    FIRST_COPIED,
    FIRST_TEXT_ONLY,
    INITIAL_OFFSETS,
    NO_DRAFT,
    NUM_EVIDENCE,
    Match,
    Matcher,
    is_copied,
    trust,
    trust_match_lens,
)
from tetris_sglang.texts.match import COPIED_PROB, FIRST_RUNNER_UP, MAX_MATCH

SEEDS = st.integers(0, 10**6)
VOCAB = 6
KINDS = FIRST_RUNNER_UP // 2
"""Of evidence from the request's own text; as many from others'."""


def length_class(match_len: int) -> int:
    return next(i for i, most in enumerate((1, 3, 7, 10**9), start=1) if match_len <= most)


def read_evidence(match: list[int], match_len: int, path: list[int]) -> int:
    """Of the last token of `path`, which the draft drafted."""
    level = len(path) - 1
    if not match_len or path[:-1] != match[:level]:
        return 0
    return 2 * length_class(match_len + level) - (path[-1] == match[level])


class Copying:
    """No calibration, but copied tokens are worth this probability."""

    def __init__(self, copied_score: float) -> None:
        self.copied_score = copied_score

    def __call__(self, probs, depths, evidence):
        return torch.where(is_copied(evidence), self.copied_score, probs)

    def find_rival(self, depths, copied, contradicted):
        assert (copied % KINDS >= FIRST_COPIED - 1).all() and (contradicted % KINDS < FIRST_COPIED).all()
        assert depths.tolist() == list(range(1, copied.shape[1] + 1))
        return torch.full(copied.shape, self.copied_score)


NEVER, SOMETIMES, ALWAYS = Copying(0.0), Copying(0.6), Copying(1.0)


def random_match(generator: torch.Generator, batch: int, depth: int) -> Match:
    match_lens = torch.randint(MAX_MATCH + 1, (batch,), generator=generator)
    is_others = (torch.rand(batch, generator=generator) < 0.5) & (match_lens > 0)
    return Match(
        torch.randint(VOCAB, (batch, depth), generator=generator),
        match_lens,
        is_others if torch.rand((), generator=generator) < 0.8 else None,
    )


def read_kinds(proposal: Proposal, match: Match) -> list[list[int]]:
    """The evidence as if all matches stood in the requests' own texts; that of others must have said so."""
    evidence = proposal.evidence % FIRST_RUNNER_UP
    if match.is_others is None:
        return evidence.tolist()
    says_something = (evidence != 0) & (evidence != NO_DRAFT)
    assert torch.equal(evidence >= KINDS, match.is_others[:, None] & says_something)
    return (evidence % KINDS).tolist()


def make_grower(tokens, probs, calibrate, match):
    return (ChainGrower if tokens.shape[1] == 1 else CombGrower)(tokens, probs, calibrate, match)


def grow(seed: int, batch: int, num_children: int, depth: int, calibrate):
    """(proposal, match) of random drafts, every other one of which follows the match."""
    generator = torch.Generator().manual_seed(seed)
    match = random_match(generator, batch, depth)

    def draw(level: int):
        tokens = torch.rand(batch, VOCAB, generator=generator).argsort(dim=-1)[..., :num_children]
        copied = match.tokens[:, level, None]
        lucky = torch.rand(batch, 1, generator=generator) < 0.5
        new = lucky & ~(tokens == copied).any(dim=-1, keepdim=True)
        tokens[..., :1] = torch.where(new, copied, tokens[..., :1])
        return tokens, torch.rand(*tokens.shape, generator=generator).clamp(0.01, 0.99)

    grower = make_grower(*draw(0), calibrate, match)
    for level in range(1, depth):
        grower.grow(*draw(level))
    return grower.finish(1000), match


def read_paths(proposal) -> list[list[list[int]]]:
    """Per request and node, the tokens down to it."""
    paths = []
    for request, tokens in enumerate(proposal.tokens.tolist()):
        if proposal.shape is None:
            paths.append([tokens[: i + 1] for i in range(len(tokens))])
            continue
        parents = proposal.shape.parents[request].tolist()
        mine: list[list[int]] = [[]]
        for node, token in enumerate(tokens):
            mine.append([*mine[parents[node + 1]], token])
        paths.append(mine[1:])
    return paths


def text_class(match_len: int) -> int:
    return next(i for i, most in enumerate((1, 3, 7, 15, 10**9), start=1) if match_len <= most)


@given(SEEDS, st.integers(1, 4), st.integers(1, 12))
def test_a_text_drafts_by_itself_where_there_is_a_match(seed, batch, depth):
    match = random_match(torch.Generator().manual_seed(seed), batch, depth)
    proposal = propose_matches(match, Copying(0.6))
    assert torch.equal(proposal.tokens, match.tokens)
    for request, match_len in enumerate(match.match_lens.tolist()):
        if not match_len:
            assert proposal.evidence[request].tolist() == [NO_DRAFT] * depth
            assert proposal.survival[request].tolist() == proposal.probs[request].tolist() == [0.0] * depth
            continue
        assert read_kinds(proposal, match)[request] == [FIRST_TEXT_ONLY - 1 + text_class(match_len + i) for i in range(depth)]
        assert proposal.survival[request].tolist() == pytest.approx([0.6 ** (i + 1) for i in range(depth)], rel=1e-5)
        assert proposal.probs[request].tolist() == [COPIED_PROB] * depth


def test_without_calibration_a_longer_match_is_believed_more():
    match = Match(torch.tensor([[3, 9], [4, 8], [5, 7]]), torch.tensor([0, 2, 8]))
    probs = trust_match_lens(match.match_lens[:, None] + torch.arange(2))
    proposal = propose_matches(match, trust, probs)
    assert torch.equal(proposal.probs[1:], probs[1:]) and proposal.probs[0].tolist() == [0, 0]
    assert torch.equal(proposal.survival, survival_from_probs(proposal.probs))
    assert probs[1, 0] < probs[1, 1] < probs[2, 0] < probs[2, 1]


SHAPES = st.tuples(SEEDS, st.integers(1, 3), st.integers(1, 3), st.integers(1, 5))


@given(SHAPES)
def test_every_node_carries_what_the_match_says_of_it(shape):
    proposal, match = grow(*shape, NEVER)
    for request, paths in enumerate(read_paths(proposal)):
        copied, match_len = match.tokens[request].tolist(), int(match.match_lens[request])
        expected = [read_evidence(copied, match_len, path) for path in paths]
        assert read_kinds(proposal, match)[request] == expected
        # Of each parent's children one is the model's first choice.
        first = [
            path[:-1] for path, kind in zip(paths, proposal.evidence[request].tolist(), strict=True) if kind < FIRST_RUNNER_UP
        ]
        assert sorted(first) == sorted(map(list, {tuple(path[:-1]) for path in paths}))


@given(SHAPES)
def test_what_is_copied_is_the_match_s_and_stands_once(shape):
    _, _, num_children, depth = shape
    proposal, match = grow(*shape, ALWAYS)
    for request, paths in enumerate(read_paths(proposal)):
        copied, match_len = match.tokens[request].tolist(), int(match.match_lens[request])
        assert len({tuple(path) for path in paths}) == len(paths)  # nothing is drafted twice
        for node, path in enumerate(paths):
            kind = read_kinds(proposal, match)[request][node]
            if kind >= FIRST_COPIED:
                assert path == copied[: len(path)]
                assert kind == FIRST_COPIED - 1 + length_class(match_len + len(path) - 1)
                assert float(proposal.probs[request, node]) == COPIED_PROB
            else:
                assert kind == read_evidence(copied, match_len, path)
        if match_len and num_children == 1:
            assert paths[-1] == copied[:depth]


@given(SHAPES)
def test_a_copied_token_needs_the_better_score(shape):
    seed, batch, num_children, _ = shape
    generator = torch.Generator().manual_seed(seed)
    match = random_match(generator, batch, 1)
    tokens = torch.rand(batch, VOCAB, generator=generator).argsort(dim=-1)[..., :num_children]
    probs = torch.rand(batch, num_children, generator=generator)
    grower = make_grower(tokens, probs, SOMETIMES, match)
    for request in range(batch):
        mine, copied = tokens[request].tolist(), int(match.tokens[request, 0])
        takes = bool(match.match_lens[request]) and copied not in mine and float(probs[request, -1]) < SOMETIMES.copied_score
        offered = [*mine[:-1], copied] if takes else mine
        scores = [*probs[request, :-1].tolist(), SOMETIMES.copied_score if takes else float(probs[request, -1])]
        assert grower.frontier_tokens[request].tolist() == [offered[scores.index(max(scores))]]
    proposal = grower.finish(num_children)
    assert torch.equal(
        proposal.survival.where(~is_copied(proposal.evidence), 0.6),
        SOMETIMES(proposal.probs, 1, proposal.evidence),
    )


def test_docstring_examples():
    found = Match(torch.tensor([[3, 9, 1]]), torch.tensor([2]))
    choice = Matcher(found, NEVER).choose(0, torch.tensor([[3, 4]]), torch.tensor([[0.5, 0.3]]), torch.tensor([[True]]))
    assert choice.agrees.tolist() == [[True, False]]


def test_nothing_is_asked_of_the_device_while_drafting():
    """Shapes alone decide what runs, as a captured graph needs it."""
    with FakeTensorMode():
        match = Match(torch.zeros(2, 3, dtype=torch.int64), torch.ones(2, dtype=torch.int64))
        offsets = EvidenceOffsets(INITIAL_OFFSETS)
        matcher = Matcher(match, AcceptanceEstimator(3))
        tokens, probs = torch.zeros(2, 2, dtype=torch.int64), torch.ones(2, 2)
        choice = matcher.choose(0, tokens, probs, matcher.exists)
        choice = matcher.choose(1, tokens, probs, choice.is_followed[:, :1])
        _, scores, evidence = matcher.score(slice(1, 2), 2, choice)
        offsets.observe(evidence, scores, choice.agrees, choice.agrees)
        assert offsets.offsets(evidence).shape == (2, 2)


# -- what evidence is worth ------------------------------------------------------------------------------------


def simulate(offsets: EvidenceOffsets, truth: torch.Tensor, steps: int, seed: int = 0) -> None:
    """Learn from tokens whose log-odds are their score's and the truth of their kind."""
    generator = torch.Generator().manual_seed(seed)
    calibration = Calibration(1)
    for _ in range(steps):
        kinds = torch.randint(len(truth), (8, 6), generator=generator)
        probs = (torch.randn(8, 6, generator=generator)).sigmoid()
        accepted = torch.rand(8, 6, generator=generator) < (probs.logit() + truth[kinds]).sigmoid()
        reached = torch.rand(8, 6, generator=generator) < 0.7
        calibrated = (calibration.log_odds(probs, 1) + offsets.offsets(kinds)).sigmoid()
        offsets.observe(kinds, calibrated, reached, accepted & reached)


def test_offsets_find_the_truth_and_follow_it():
    truth = torch.tensor([0.0, 2.0, -2.5, 1.0])
    offsets = EvidenceOffsets([0.0] * 4, decay=0.999)
    simulate(offsets, truth, 150)
    assert (torch.tensor(offsets.summarise()) - truth).abs().max() < 0.35
    simulate(offsets, -truth, 150, seed=1)
    assert (torch.tensor(offsets.summarise()) + truth).abs().max() < 0.35


def test_what_was_not_reached_and_what_was_not_seen_change_nothing():
    offsets = EvidenceOffsets(INITIAL_OFFSETS)
    assert len(INITIAL_OFFSETS) == NUM_EVIDENCE
    kinds = torch.tensor([[1, 2]])
    probs, nothing = torch.tensor([[0.5, 0.5]]), torch.zeros(1, 2, dtype=torch.bool)
    offsets.observe(kinds, probs, nothing, nothing)
    initial = torch.tensor(INITIAL_OFFSETS).tolist()
    assert offsets.summarise() == initial
    offsets.observe(kinds, probs, torch.tensor([[True, False]]), torch.tensor([[True, False]]))
    after = offsets.summarise()
    # One Newton step: (1 - 0.5) / (1 / deviation^2 + 0.25).
    assert after[1] == pytest.approx(0.5 / 1.25) and after[:1] + after[2:] == initial[:1] + initial[2:]


def test_offsets_stay_where_a_captured_pass_reads_them():
    offsets = EvidenceOffsets([0.0, 0.0])
    before = offsets.offsets(torch.tensor([0, 1])).clone()
    where = offsets._offsets.data_ptr()
    simulate(offsets, torch.tensor([1.0, -1.0]), 3)
    assert offsets._offsets.data_ptr() == where
    assert not torch.equal(offsets.offsets(torch.tensor([0, 1])), before)


@pytest.mark.parametrize("bad", [{"initial": []}, {"decay": 0}, {"decay": 1.5}])
def test_bad_settings_are_named(bad):
    with pytest.raises(ValueError, match=r"there must be kinds, and decay be in \(0, 1\]"):
        EvidenceOffsets(**{"initial": [0.0], **bad})


@given(SEEDS)
def test_a_rival_of_that_probability_is_worth_as_much(seed):
    """So copying where the draft's probability is below it is copying where the copied token scores higher."""
    generator = torch.Generator().manual_seed(seed)
    depth = 3
    calibrate = AcceptanceEstimator(depth)
    calibrate.evidence = EvidenceOffsets((2 * torch.randn(NUM_EVIDENCE, generator=generator)).tolist())
    for _ in range(seed % 4):
        probs = torch.rand(64, depth, generator=generator)
        accepted = torch.rand(64, depth, generator=generator) < probs**2
        calibrate.calibration.observe(probs, torch.arange(1, depth + 1), torch.ones_like(accepted), accepted)
    depths = torch.arange(1, depth + 1)
    whose = KINDS * torch.randint(2, (2, 1), generator=generator)
    contradicted = whose + torch.randint(FIRST_COPIED, (2, depth), generator=generator)
    copied = whose + torch.randint(FIRST_COPIED, KINDS, (2, depth), generator=generator)
    below = calibrate.find_rival(depths, copied, contradicted)
    score = calibrate(torch.rand(2, depth, generator=generator), depths, copied)  # whatever stands for its probability
    torch.testing.assert_close(calibrate(below, depths, contradicted), score, rtol=1e-3, atol=1e-3)
