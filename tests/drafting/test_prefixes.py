"""The nodes of a block's tree are its most likely prefixes, found one after the other from a heap."""

import heapq
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from tetris_sglang.drafting import propose_block
from tetris_sglang.texts import Match
from tetris_sglang.texts.match import NUM_EVIDENCE

SEEDS = st.integers(0, 10**6)
VOCAB = 12


def random_block(seed: int, batch: int, depth: int, children: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.rand(batch, depth, VOCAB, generator=generator).argsort(dim=-1)[..., :children]
    probs = torch.rand(batch, depth, children, generator=generator).sort(dim=-1, descending=True).values
    return tokens, probs / probs.sum(dim=-1, keepdim=True).clamp_min(1)


def best_prefixes(tokens: list[list[int]], probs: list[list[float]], count: int) -> dict[tuple[int, ...], float]:
    """DDTree's heap: pop the best prefix, push its next sibling and its first child."""
    heap, found, order = [(-probs[0][0], 0, (0,))], {}, itertools.count(1)
    while heap and len(found) < count:
        negative, _, ranks = heapq.heappop(heap)
        level = len(ranks) - 1
        found[tuple(tokens[place][rank] for place, rank in enumerate(ranks))] = -negative
        if ranks[-1] + 1 < len(probs[level]) and probs[level][ranks[-1]] > 0:
            sibling = -negative / probs[level][ranks[-1]] * probs[level][ranks[-1] + 1]
            heapq.heappush(heap, (-sibling, next(order), (*ranks[:-1], ranks[-1] + 1)))
        if level + 1 < len(probs):
            heapq.heappush(heap, (negative * probs[level + 1][0], next(order), (*ranks, 0)))
    return found


def read_prefixes(proposal, request: int) -> dict[tuple[int, ...], float]:
    paths = [()]
    for node, token in enumerate(proposal.tokens[request].tolist()):
        paths.append((*paths[proposal.shape.parents[request, node + 1]], token))
    assert [len(path) for path in paths] == proposal.shape.depths[request].tolist()
    assert len(set(paths)) == len(paths), "nothing is drafted twice"
    return dict(zip(paths[1:], proposal.survival[request].tolist(), strict=True))


@given(SEEDS, st.integers(1, 3), st.integers(1, 5), st.integers(1, 4), st.integers(1, 24))
def test_nodes_are_the_most_likely_prefixes(seed, batch, depth, children, count):
    tokens, probs = random_block(seed, batch, depth, children)
    proposal = propose_block(tokens, probs, count)
    for request in range(batch):
        expected = best_prefixes(tokens[request].tolist(), probs[request].tolist(), count)
        found = read_prefixes(proposal, request)
        assert found.keys() == expected.keys()
        assert list(found.values()) == pytest.approx([expected[path] for path in found], rel=1e-5)
        assert (proposal.survival[request].diff() <= 0).all()
        own = dict(zip(found, proposal.probs[request].tolist(), strict=True))
        places = {path: tokens[request, len(path) - 1].tolist().index(path[-1]) for path in found}
        assert all(own[path] == probs[request, len(path) - 1, places[path]] for path in found)


def test_docstring_example():
    tokens, probs = torch.tensor([[[3, 4], [5, 6]]]), torch.tensor([[[0.6, 0.3], [0.9, 0.1]]])
    found = read_prefixes(propose_block(tokens, probs, 4), 0)
    assert list(found) == [(3,), (3, 5), (4,), (4, 5)]


@given(SEEDS, st.integers(1, 3), st.integers(1, 5), st.integers(1, 4), st.integers(1, 12))
def test_the_match_is_offered_behind_its_own_prefixes_alone(seed, batch, depth, children, count):
    """In the place of the last token there, where none of them is the match's: any of its probabilities is below this one."""

    class Copying:
        def __call__(self, probs, depths, evidence):
            # Also where a request has no match, and what stands in its place happens to be drafted.
            assert evidence.min() >= 0 and evidence.max() < NUM_EVIDENCE, "offsets are looked up by it"
            return probs

        def find_rival(self, depths, copied, contradicted):
            return torch.ones(copied.shape)

    tokens, probs = random_block(seed, batch, depth, children)
    generator = torch.Generator().manual_seed(seed + 1)
    match = Match(torch.randint(VOCAB, (batch, depth), generator=generator), torch.randint(0, 3, (batch,), generator=generator))
    proposal = propose_block(tokens, probs, count, Copying(), match)
    for request in range(batch):
        wanted = match.tokens[request].tolist()
        for path in read_prefixes(proposal, request):
            level = len(path) - 1
            offered = tokens[request, level].tolist()
            if match.match_lens[request] and list(path[:-1]) == wanted[:level] and wanted[level] not in offered:
                offered = [*offered[:-1], wanted[level]]
            assert path[-1] in offered


def test_nothing_waits_for_the_device():
    """Fake tensors have no values: reading one would raise."""
    with FakeTensorMode():
        tokens, probs = torch.zeros(2, 3, 2, dtype=torch.int64), torch.ones(2, 3, 2)
        match = Match(torch.zeros(2, 3, dtype=torch.int64), torch.ones(2, dtype=torch.int64))
        assert propose_block(tokens, probs, 5, match=match).tokens.shape == (2, 5)
