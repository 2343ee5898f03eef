"""Combs: grown as said, ordered so that selection takes prefixes, masked and accepted as walking by hand would."""

import math
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tetris_sglang.acceptance import accept_chain, accept_tree
from tetris_sglang.drafting import (
    ChainGrower,
    CombGrower,
    Grid,
    TreeShape,
    ancestor_mask,
    drop_leaves,
    make_grid,
)
from tetris_sglang.selection import select_prefixes

VOCAB = 7


def random_probs(generator: torch.Generator, *shape: int, tied: bool) -> torch.Tensor:
    probs = torch.rand(*shape, generator=generator)
    return (probs * 4).round() / 4 if tied else probs


def random_tokens(generator: torch.Generator, *shape: int) -> torch.Tensor:
    """Tokens that differ along the last dimension."""
    return torch.rand(*shape[:-1], VOCAB, generator=generator).argsort(dim=-1)[..., : shape[-1]]


def make_grower(tokens: torch.Tensor, probs: torch.Tensor):
    return (ChainGrower if tokens.shape[1] == 1 else CombGrower)(tokens, probs)


def grow(seed: int, batch: int, num_children: int, depth: int, max_nodes: int, tied: bool):
    """A proposal, and what it was grown from: level by level the children's tokens and probabilities, and what was expanded."""
    generator = torch.Generator().manual_seed(seed)
    levels = [
        (random_tokens(generator, batch, num_children), random_probs(generator, batch, num_children, tied=tied))
        for _ in range(depth)
    ]
    grower, expanded = make_grower(*levels[0]), []
    for tokens, probs in levels[1:]:
        expanded.append(grower.frontier_tokens.clone())
        grower.grow(tokens, probs)
    return grower.finish(max_nodes), levels, expanded


class OnDeviceOnly(TorchDispatchMode):
    """Refuses whatever makes a tensor anywhere but on the meta device: on a GPU it would have to be copied there."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        assert all(x.is_meta for x in tree_leaves(result) if isinstance(x, torch.Tensor)), func
        return result


@pytest.mark.parametrize("num_children", [1, 2])
def test_growing_copies_nothing_to_the_device(num_children):
    """Drafts grow inside a captured CUDA graph, where a copy from the host ends the capture."""
    with OnDeviceOnly():
        tokens = torch.empty(2, num_children, dtype=torch.int64, device="meta")
        probs = torch.empty(2, num_children, device="meta")
        grower = make_grower(tokens, probs)
        for _ in range(2):
            grower.grow(tokens, probs)
        grower.finish(3)
        with pytest.raises(AssertionError):  # the check can fail
            torch.tensor([1, 2])


SHAPES = st.tuples(st.integers(0, 10**6), st.integers(1, 4), st.integers(2, 4), st.integers(1, 4), st.booleans())


@given(SHAPES)
def test_every_node_is_a_path_of_what_was_drafted(shape):
    """Rebuild each node's tokens and survival from the levels by following by hand what was expanded."""
    seed, batch, num_children, depth, tied = shape
    proposal, levels, expanded = grow(seed, batch, num_children, depth, 1000, tied)
    assert proposal.tokens.shape[1] == depth * num_children
    for request in range(batch):
        chain, survival, drafted = (), 1.0, {}
        for level, (tokens, probs) in enumerate(levels):
            children = {
                (*chain, token): survival * prob
                for token, prob in zip(tokens[request].tolist(), probs[request].tolist(), strict=True)
            }
            drafted |= children
            if level < depth - 1:
                chain = (*chain, int(expanded[level][request]))
                survival = children[chain]
                assert survival == pytest.approx(max(children.values()))
        nodes = {}
        for column in range(1, proposal.tokens.shape[1] + 1):
            path, at = (), column
            while at:
                path = (int(proposal.tokens[request, at - 1]), *path)
                at = int(proposal.shape.parents[request, at])
            assert len(path) == int(proposal.shape.depths[request, column])
            nodes[path] = float(proposal.survival[request, column - 1])
        assert nodes == pytest.approx(drafted, rel=1e-6, abs=1e-12)


@given(SHAPES, st.integers(1, 12))
def test_parents_come_first_and_survival_never_rises(shape, max_nodes):
    seed, batch, num_children, depth, tied = shape
    proposal, *_ = grow(seed, batch, num_children, depth, max_nodes, tied)
    parents, depths = proposal.shape
    columns = torch.arange(parents.shape[1])
    assert (parents[:, 0] == 0).all() and (depths[:, 0] == 0).all()
    assert (parents[:, 1:] < columns[1:]).all()
    assert (depths[:, 1:] == depths.gather(1, parents)[:, 1:] + 1).all()
    assert (proposal.survival.diff(dim=1) <= 0).all()


@given(SHAPES, st.sampled_from([(2, 3), (3, 2)]), st.integers(0, 9))
def test_selection_takes_parents_first_and_is_optimal(shape, comb, capacity):
    """Against every parent-closed choice of nodes of the whole batch."""
    seed, _, _, _, tied = shape
    num_children, depth = comb
    proposal, *_ = grow(seed, 2, num_children, depth, 5, tied)
    draft_lens = select_prefixes(proposal.survival, capacity).tolist()
    chosen = sum(proposal.survival[request, :length].double().sum().item() for request, length in enumerate(draft_lens))
    best = 0.0
    nodes = [(request, column) for request in range(2) for column in range(1, 6)]
    for subset in product((False, True), repeat=len(nodes)):
        taken = {node for node, is_taken in zip(nodes, subset, strict=True) if is_taken}
        if len(taken) > capacity:
            continue
        parents = {(r, int(proposal.shape.parents[r, c])) for r, c in taken}
        if all(parent in taken or parent[1] == 0 for parent in parents):
            best = max(best, math.fsum(float(proposal.survival[r, c - 1]) for r, c in taken))
    assert chosen == pytest.approx(best, abs=1e-6)


@given(SHAPES, st.integers(1, 30))
def test_mask_is_the_walk_to_the_root(shape, max_nodes):
    seed, batch, num_children, depth, tied = shape
    proposal, *_ = grow(seed, batch, num_children, depth, max_nodes, tied)
    grid = make_grid(torch.zeros(batch), proposal, depth, proposal.tokens.shape[1] + 3)
    mask = ancestor_mask(grid.shape.parents, depth)
    for request in range(batch):
        for column in range(grid.tokens.shape[1]):
            seen, at = {0, column}, column
            while at:
                at = int(grid.shape.parents[request, at])
                seen.add(at)
            assert set(mask[request, column].nonzero().flatten().tolist()) == seen


@given(SHAPES, st.integers(1, 40), st.integers(0, 10**6))
def test_acceptance_is_the_walk_down(shape, max_nodes, seed):
    comb_seed, batch, num_children, depth, tied = shape
    proposal, *_ = grow(comb_seed, batch, num_children, depth, max_nodes, tied)
    generator = torch.Generator().manual_seed(seed)
    grid = make_grid(torch.zeros(batch), proposal, depth, proposal.tokens.shape[1] + 2)
    num_nodes = proposal.tokens.shape[1]
    tokens = grid.tokens
    draws = torch.randint(VOCAB, tokens.shape, generator=generator)
    children = (grid.shape.parents[:, None, :] == torch.arange(tokens.shape[1])[:, None]).float()
    children[:, 0, 0] = 0
    children[:, 0, num_nodes + 1 :] = 0
    # Where a column has children, mostly draw the token of one of them.
    some_child = torch.multinomial(children.flatten(0, 1) + 1e-6, 1, generator=generator).view_as(tokens)
    lucky = torch.rand(tokens.shape, generator=generator) < 0.8
    draws = torch.where(lucky, tokens.gather(1, some_child), draws)
    draft_lens = torch.randint(num_nodes + 1, (batch,), generator=generator)
    accepted = accept_tree(tokens, grid.shape.parents, draws, draft_lens, depth)
    for request in range(batch):
        at, path = 0, [0]
        while True:
            matching = [
                column
                for column in range(1, int(draft_lens[request]) + 1)
                if int(grid.shape.parents[request, column]) == at and int(tokens[request, column]) == int(draws[request, at])
            ]
            if not matching:
                break
            (at,) = matching
            path.append(at)
        assert int(accepted.num_accepted[request]) == len(path) - 1
        assert accepted.path[request, : len(path)].tolist() == path
        assert int(accepted.bonus_tokens[request]) == int(draws[request, at])


@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(1, 6))
def test_a_chain_is_the_tree_with_one_branch(seed, batch, depth):
    generator = torch.Generator().manual_seed(seed)
    candidates = torch.randint(2, (batch, depth + 1), generator=generator)
    draws = torch.randint(2, (batch, depth + 1), generator=generator)
    draft_lens = torch.randint(depth + 1, (batch,), generator=generator)
    parents = (torch.arange(depth + 1) - 1).clamp(min=0).expand(batch, -1)
    as_tree = accept_tree(candidates, parents, draws, draft_lens, depth)
    as_chain = accept_chain(candidates, draws, draft_lens)
    assert as_tree.num_accepted.tolist() == as_chain.num_accepted.tolist()
    assert as_tree.bonus_tokens.tolist() == as_chain.bonus_tokens.tolist()


@given(SHAPES, st.integers(1, 12), st.integers(0, 10**6))
def test_only_what_is_verified_as_chains_becomes_chains(shape, max_nodes, seed):
    comb_seed, batch, num_children, depth, tied = shape
    proposal, *_ = grow(comb_seed, batch, num_children, depth, max_nodes, tied)
    grid = make_grid(torch.zeros(batch), proposal, depth, proposal.tokens.shape[1] + 1)
    generator = torch.Generator().manual_seed(seed)
    draft_lens = torch.randint(proposal.tokens.shape[1] + 1, (batch,), generator=generator)
    parents = grid.shape.parents.tolist()
    are_chains = all(parents[i][c] == c - 1 for i, n in enumerate(draft_lens.tolist()) for c in range(1, n + 1))
    found = drop_leaves(grid, draft_lens)
    assert (found.shape is None) == are_chains
    assert torch.equal(found.tokens, grid.tokens) and found.max_depth == grid.max_depth


def test_docstring_examples():
    grid = Grid(torch.zeros(1, 4), 2, TreeShape(torch.tensor([[0, 0, 0, 1]]), torch.tensor([[0, 1, 1, 2]])))
    assert drop_leaves(grid, torch.tensor([1])).shape is None
    assert drop_leaves(grid, torch.tensor([2])) is grid
    accepted = accept_tree(
        torch.tensor([[7, 1, 2, 5]]),
        torch.tensor([[0, 0, 1, 0]]),
        torch.tensor([[1, 2, 9, 4]]),
        torch.tensor([3]),
        2,
    )
    assert (accepted.num_accepted.tolist(), accepted.bonus_tokens.tolist()) == ([2], [9])
    assert accepted.path.tolist() == [[0, 1, 2]]
    with pytest.raises(ValueError, match="need parents"):
        accept_tree(torch.zeros(1, 3), torch.zeros(1, 2), torch.zeros(1, 3), torch.zeros(1), 2)


def test_a_draft_that_knows_nothing_is_ordered_all_the_same():
    grower = CombGrower(torch.tensor([[1, 2]]), torch.tensor([[float("nan"), 0.5]]))
    grower.grow(torch.tensor([[3, 4]]), torch.tensor([[1.5, float("nan")]]))
    proposal = grower.finish(4)
    # 2 survives with 0.5, its child 3 too (a probability above 1 is rounding); all others never do.
    assert proposal.tokens[0, :2].tolist() == [2, 3]
    assert proposal.survival.tolist() == [[0.5, 0.5, 0.0, 0.0]]
    assert proposal.shape.parents.tolist() == [[0, 0, 1, 0, 1]]


def test_rounding_does_not_turn_around_what_was_drawn():
    """Two choices that are as likely: a calibration that lifts the second by its last bit would have it expanded."""

    def lift(probs, depths, evidence):
        return probs * torch.tensor([1.0, 1 + 2**-22])

    grower = CombGrower(torch.tensor([[3, 4]]), torch.full((1, 2), 0.4), lift)
    assert grower.frontier_tokens.tolist() == [[3]]
    grower.grow(torch.tensor([[5, 6]]), torch.tensor([[0.5, 0.2]]))
    proposal = grower.finish(4)
    assert proposal.tokens[0, :2].tolist() == [3, 4] and proposal.survival[0, 0] == proposal.survival[0, 1]
