"""Trees and combs: grown as said, ordered so that selection takes prefixes, masked and accepted as walking by hand would."""

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
    Grid,
    TreeGrower,
    TreeShape,
    ancestor_mask,
    count_nodes,
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


def make_grower(tokens: torch.Tensor, probs: torch.Tensor, num_expanded: int):
    if tokens.shape[1] == 1:
        return ChainGrower(tokens, probs)
    return TreeGrower(tokens, probs, num_expanded=num_expanded)


def grow(seed: int, batch: int, branching: tuple[int, int], depth: int, max_nodes: int, tied: bool):
    """A proposal, and what it was grown from: level by level the children's tokens and probabilities."""
    num_expanded, num_children = branching
    generator = torch.Generator().manual_seed(seed)
    levels = [
        (
            random_tokens(generator, batch, *above, num_children),
            random_probs(generator, batch, *above, num_children, tied=tied),
        )
        for above in [(), *[(num_expanded,)] * (depth - 1)]
    ]
    (tokens, probs), *others = levels
    grower = make_grower(tokens, probs, num_expanded)
    frontiers = []
    for tokens, probs in others:
        frontiers.append((grower.frontier_tokens.clone(), grower.frontier_rows))
        grower.grow(tokens, probs)
    return grower.finish(max_nodes), levels, frontiers


class OnDeviceOnly(TorchDispatchMode):
    """Refuses whatever makes a tensor anywhere but on the meta device: on a GPU it would have to be copied there."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        assert all(x.is_meta for x in tree_leaves(result) if isinstance(x, torch.Tensor)), func
        return result


@pytest.mark.parametrize("num_expanded, num_children", [(1, 1), (1, 2), (3, 3)])
def test_growing_copies_nothing_to_the_device(num_expanded, num_children):
    """Drafts grow inside a captured CUDA graph, where a copy from the host ends the capture."""
    with OnDeviceOnly():
        tokens = torch.empty(2, num_children, dtype=torch.int64, device="meta")
        probs = torch.empty(2, num_children, device="meta")
        grower = make_grower(tokens, probs, num_expanded)
        for _ in range(2):
            grower.grow(
                tokens[:, None].expand(2, num_expanded, num_children),
                probs[:, None].expand(2, num_expanded, num_children),
            )
        grower.finish(3)
        with pytest.raises(AssertionError):  # the check can fail
            torch.tensor([1, 2])


BRANCHINGS = st.sampled_from([(1, 2), (1, 3), (2, 2), (3, 3), (4, 4)])
"""Expanded nodes of a level, and children of each: combs and trees."""
SHAPES = st.tuples(st.integers(0, 10**6), st.integers(1, 4), BRANCHINGS, st.integers(1, 4), st.booleans())


@given(SHAPES)
def test_every_node_is_a_path_of_what_was_drafted(shape):
    """Rebuild each node's tokens and survival from the levels by following the frontier by hand."""
    seed, batch, branching, depth, tied = shape
    proposal, levels, frontiers = grow(seed, batch, branching, depth, 1000, tied)
    assert proposal.tokens.shape[1] == count_nodes(depth, *branching)
    for request in range(batch):
        # Every path that was drafted, with its survival; rows: the paths that stand in the frontier's rows.
        first_tokens, first_probs = (level[request].tolist() for level in levels[0])
        children = [((token,), prob, 0) for token, prob in zip(first_tokens, first_probs, strict=True)]
        drafted = [child[:2] for child in children]
        for (tokens, probs), (frontier_tokens, frontier_rows) in zip(levels[1:], frontiers, strict=True):
            # The frontier's rows name the parents' rows; the tokens say which child of it stands there.
            parent_rows = [0] * len(frontier_tokens[request]) if frontier_rows is None else frontier_rows[request].tolist()
            rows = [
                next(node for node in children if node[0][-1] == token and node[2] == row)[:2]
                for token, row in zip(frontier_tokens[request].tolist(), parent_rows, strict=True)
            ]
            children = [
                ((*path, token), survival * prob, row)
                for row, (path, survival) in enumerate(rows)
                for token, prob in zip(tokens[request, row].tolist(), probs[request, row].tolist(), strict=True)
            ]
            drafted += [child[:2] for child in children]
        nodes = []
        for column in range(1, proposal.tokens.shape[1] + 1):
            path, at = (), column
            while at:
                path = (int(proposal.tokens[request, at - 1]), *path)
                at = int(proposal.shape.parents[request, at])
            assert len(path) == int(proposal.shape.depths[request, column])
            nodes.append((path, float(proposal.survival[request, column - 1])))
        assert sorted(path for path, _ in nodes) == sorted(path for path, _ in drafted)
        expected = dict(drafted)
        for path, survival in nodes:
            assert survival == pytest.approx(expected[path], rel=1e-6, abs=1e-12)


@given(SHAPES)
def test_the_frontier_is_each_levels_most_likely(shape):
    seed, batch, (num_expanded, num_children), depth, tied = shape
    generator = torch.Generator().manual_seed(seed)
    first = random_tokens(generator, batch, num_children), random_probs(generator, batch, num_children, tied=tied)
    grower = make_grower(*first, num_expanded)
    survival = grower._frontier_survival
    for _ in range(depth - 1):
        tokens = random_tokens(generator, batch, num_expanded, num_children)
        probs = random_probs(generator, batch, num_expanded, num_children, tied=tied)
        children = (survival[:, :, None] * probs).flatten(1)
        grower.grow(tokens, probs)
        survival = grower._frontier_survival
        best = children.sort(dim=1, descending=True).values[:, :num_expanded]
        torch.testing.assert_close(survival.sort(dim=1, descending=True).values, best, rtol=0, atol=0)


@given(SHAPES, st.integers(1, 12))
def test_parents_come_first_and_survival_never_rises(shape, max_nodes):
    seed, batch, branching, depth, tied = shape
    proposal, *_ = grow(seed, batch, branching, depth, max_nodes, tied)
    parents, depths = proposal.shape
    columns = torch.arange(parents.shape[1])
    assert (parents[:, 0] == 0).all() and (depths[:, 0] == 0).all()
    assert (parents[:, 1:] < columns[1:]).all()
    assert (depths[:, 1:] == depths.gather(1, parents)[:, 1:] + 1).all()
    assert (proposal.survival.diff(dim=1) <= 0).all()


@given(SHAPES, st.sampled_from([((2, 2), 2), ((1, 2), 3)]), st.integers(0, 9))
def test_selection_takes_parents_first_and_is_optimal(shape, tree, capacity):
    """Against every parent-closed choice of nodes of the whole batch."""
    seed, _, _, _, tied = shape
    branching, depth = tree
    proposal, *_ = grow(seed, 2, branching, depth, 5, tied)
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
    seed, batch, branching, depth, tied = shape
    proposal, *_ = grow(seed, batch, branching, depth, max_nodes, tied)
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
    tree_seed, batch, branching, depth, tied = shape
    proposal, *_ = grow(tree_seed, batch, branching, depth, max_nodes, tied)
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
    tree_seed, batch, branching, depth, tied = shape
    proposal, *_ = grow(tree_seed, batch, branching, depth, max_nodes, tied)
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
    grower = TreeGrower(torch.tensor([[1, 2]]), torch.tensor([[float("nan"), 0.5]]))
    grower.grow(torch.tensor([[[3, 4], [5, 6]]]), torch.tensor([[[0.5, 0.1], [1.5, float("nan")]]]))
    proposal = grower.finish(6)
    # 2 survives with 0.5, its child 5 too (a probability above 1 is rounding); all others never do.
    assert proposal.tokens[0, :2].tolist() == [2, 5]
    assert proposal.survival.tolist() == [[0.5, 0.5, 0.0, 0.0, 0.0, 0.0]]
    assert proposal.shape.parents.tolist() == [[0, 0, 1, 0, 3, 3, 1]]
