"""Calibration: identity until it has seen something, monotone, counts what was reached and nothing else, and finds the
truth."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tetris_sglang.acceptance import accept_tree
from tetris_sglang.drafting import CombGrower, make_grid
from tetris_sglang.estimates.calibration import (
    Calibration,
    _make_monotone,
    chain_outcomes,
    tree_outcomes,
)
from tetris_sglang.selection import select_prefixes, survival_from_probs

DEPTH = 4
DEPTHS = torch.arange(1, DEPTH + 1)
SEEDS = st.integers(0, 10**6)


def random_probs(generator: torch.Generator, *shape: int) -> torch.Tensor:
    """Of every size: log-odds beyond all bins, exact 0 and 1."""
    probs = (6 * torch.randn(*shape, generator=generator)).sigmoid()
    kind = torch.randint(12, shape, generator=generator)
    return probs.where(kind > 0, 0.0).where(kind != 1, 1.0)


def random_pass(generator: torch.Generator, batch: int):
    """(probs, reached, accepted) of chains, with luck that has nothing to do with the probabilities."""
    probs = random_probs(generator, batch, DEPTH)
    draft_lens = torch.randint(DEPTH + 1, (batch,), generator=generator)
    num_accepted = torch.minimum(torch.randint(DEPTH + 1, (batch,), generator=generator), draft_lens)
    return probs, *chain_outcomes(num_accepted, draft_lens, DEPTH)


def taught(seed: int, passes: int = 12, **kwargs) -> Calibration:
    generator = torch.Generator().manual_seed(seed)
    calibration = Calibration(DEPTH, **kwargs)
    for _ in range(passes):
        calibration.observe(*in_order(random_pass(generator, 16)))
    calibration.refresh()
    return calibration


def in_order(one_pass):
    probs, reached, accepted = one_pass
    return probs, DEPTHS, reached, accepted


@given(SEEDS)
def test_before_any_observation_probabilities_stay(seed):
    probs = random_probs(torch.Generator().manual_seed(seed), 5, DEPTH)
    calibration = Calibration(DEPTH)
    for _ in range(2):
        assert torch.allclose(calibration.apply(probs, DEPTHS), probs, rtol=1e-5, atol=2e-7)
        calibration.observe(probs, DEPTHS, torch.zeros(5, DEPTH) > 0, torch.zeros(5, DEPTH) > 0)
        calibration.refresh()
    assert calibration.reliability().bins == []


@given(SEEDS, st.floats(0.1, 100), st.floats(0.9, 1))
def test_calibrated_probabilities_rise_with_the_drafts_own(seed, prior_strength, decay):
    calibration = taught(seed, prior_strength=prior_strength, decay=decay)
    probs = torch.linspace(-18, 18, 997).sigmoid().unique()
    for depth in DEPTHS.tolist():
        calibrated = calibration.apply(probs, depth)
        assert calibrated.min() >= 0 and calibrated.max() <= 1
        assert (calibrated.diff() >= -2e-5).all()


@given(SEEDS)
def test_one_depth_and_all_depths_agree(seed):
    calibration = taught(seed)
    probs = random_probs(torch.Generator().manual_seed(seed), 3, 2, DEPTH)
    calibrated = calibration.apply(probs, DEPTHS)
    for depth in DEPTHS.tolist():
        # Equal but for the last bits: some CPUs' vectorised logarithm differs from the one for what is left over.
        last_bits = {"rtol": 3e-7, "atol": 0}
        torch.testing.assert_close(calibrated[..., depth - 1], calibration.apply(probs[..., depth - 1], depth), **last_bits)
    torch.testing.assert_close(calibrated[0], calibration.apply(probs[0], DEPTHS.expand(2, -1)), **last_bits)


def test_what_is_no_number_is_never_expected():
    probs = torch.tensor([math.nan, math.inf, -math.inf, 1.5, -0.5])
    for calibration in (Calibration(DEPTH), taught(0)):
        calibrated = calibration.apply(probs, 1)
        limits = calibration.apply(torch.tensor([0.0, 1.0]), 1)
        assert calibrated.tolist() == [0.0, limits[1], limits[0], limits[1], limits[0]]


@given(SEEDS)
def test_what_was_not_reached_does_not_matter(seed):
    generator = torch.Generator().manual_seed(seed)
    one, other = Calibration(DEPTH), Calibration(DEPTH)
    for _ in range(8):
        probs, reached, accepted = random_pass(generator, 6)
        one.observe(probs, DEPTHS, reached, accepted)
        noise = random_probs(generator, 6, DEPTH).where(torch.rand(6, DEPTH, generator=generator) < 0.8, math.nan)
        other.observe(probs.where(reached, noise), DEPTHS, reached, accepted)
    one.refresh()
    other.refresh()
    probe = random_probs(generator, 50, DEPTH)
    assert torch.equal(one.apply(probe, DEPTHS), other.apply(probe, DEPTHS))
    assert one.reliability() == other.reliability()


@given(SEEDS)
def test_order_within_a_pass_does_not_matter(seed):
    generator = torch.Generator().manual_seed(seed)
    one, other = Calibration(DEPTH, decay=0.99), Calibration(DEPTH, decay=0.99)
    for _ in range(8):
        one_pass = random_pass(generator, 6)
        one.observe(*in_order(one_pass))
        order = torch.randperm(6 * DEPTH, generator=generator)
        probs, reached, accepted = (t.flatten()[order][None] for t in one_pass)
        other.observe(probs, DEPTHS.repeat(6)[order], reached, accepted)
    one.refresh()
    other.refresh()
    probe = random_probs(generator, 50, DEPTH)
    assert torch.allclose(one.apply(probe, DEPTHS), other.apply(probe, DEPTHS), atol=1e-5)


@given(SEEDS)
def test_without_decay_passes_add_up(seed):
    generator = torch.Generator().manual_seed(seed)
    passes = [random_pass(generator, 5) for _ in range(8)]
    one, other = Calibration(DEPTH, decay=1.0), Calibration(DEPTH, decay=1.0)
    for one_pass in passes:
        one.observe(*in_order(one_pass))
    one.refresh()
    together = (torch.cat(parts) for parts in zip(*passes, strict=True))
    other.observe(*in_order(together))
    other.refresh()
    probe = random_probs(generator, 50, DEPTH)
    assert torch.allclose(one.apply(probe, DEPTHS), other.apply(probe, DEPTHS), atol=1e-5)
    # Expected acceptance may differ: one had learned on the way.
    counted = [[(b.depth, b.centre, b.count, b.observed) for b in c.reliability().bins] for c in (one, other)]
    assert counted[0] == counted[1]


def test_memory_is_measured_in_reached_drafts():
    calibration = Calibration(1, decay=0.9)
    yes, no = torch.tensor([[True]]), torch.tensor([[False]])
    half = torch.tensor([[0.5]])
    depth = torch.tensor([1])
    calibration.observe(half, depth, yes, yes)
    for _ in range(5):
        calibration.observe(half, depth, no, no)
    (cell,) = calibration.reliability().bins
    assert (cell.count, cell.observed, cell.raw) == (1, 1, 0.5)
    # Seven observations elsewhere age it as seven of its own would.
    calibration.observe(torch.full((7, 1), 0.99), depth, yes.expand(7, 1), no.expand(7, 1))
    cell, _ = calibration.reliability().bins
    assert cell.count == pytest.approx(0.9**7, rel=1e-5)


# -- which drafts are judged ------------------------------------------------------------------------------------------


@given(SEEDS, st.integers(1, 6), st.integers(0, 5))
def test_outcomes_of_a_chain_are_those_of_walking_it(seed, batch, max_draft):
    generator = torch.Generator().manual_seed(seed)
    draft_lens = torch.randint(max_draft + 1, (batch,), generator=generator, dtype=torch.int32)
    right = torch.rand(batch, max_draft, generator=generator) < 0.7
    num_accepted = torch.zeros(batch, dtype=torch.int32)
    reached, accepted = torch.zeros_like(right), torch.zeros_like(right)
    for request in range(batch):
        for column in range(int(draft_lens[request])):
            reached[request, column] = True
            if not right[request, column]:
                break
            accepted[request, column] = True
            num_accepted[request] += 1
    outcomes = chain_outcomes(num_accepted, draft_lens, max_draft)
    assert torch.equal(outcomes.reached, reached)
    assert torch.equal(outcomes.accepted, accepted)


COMBS = st.tuples(SEEDS, st.integers(1, 3), st.integers(2, 3), st.integers(1, DEPTH), st.integers(1, 20))


def grow(seed: int, batch: int, num_children: int, depth: int, max_nodes: int, calibration: Calibration | None):
    """A proposal of random tokens, its probabilities calibrated on the way as serving does."""
    generator = torch.Generator().manual_seed(seed)

    def draw(level: int):
        tokens = torch.rand(batch, 7, generator=generator).argsort(dim=-1)[..., :num_children]
        probs = torch.rand(batch, num_children, generator=generator)
        return tokens, probs if calibration is None else calibration.apply(probs, level)

    grower = CombGrower(*draw(1))
    for level in range(2, depth + 1):
        grower.grow(*draw(level))
    return grower.finish(max_nodes)


@given(COMBS, SEEDS)
def test_outcomes_of_a_tree_are_those_of_walking_it(tree, seed):
    _, batch, _, depth, _ = tree
    proposal = grow(*tree, None)
    nodes = proposal.tokens.shape[1]
    generator = torch.Generator().manual_seed(seed)
    # Sometimes unused columns stand behind the nodes, sometimes the last column is a node.
    grid = make_grid(torch.zeros(batch), proposal, depth, nodes + 1 + 2 * (seed % 2))
    parents = grid.shape.parents
    draws = torch.randint(7, grid.tokens.shape, generator=generator)
    children = (parents[:, None, :] == torch.arange(parents.shape[1])[:, None]).float()
    children[:, 0, 0] = 0
    children[:, 0, nodes + 1 :] = 0
    some_child = torch.multinomial(children.flatten(0, 1) + 1e-6, 1, generator=generator).view_as(draws)
    lucky = torch.rand(draws.shape, generator=generator) < 0.8
    draws = torch.where(lucky, grid.tokens.gather(1, some_child), draws)
    draft_lens = torch.randint(nodes + 1, (batch,), generator=generator, dtype=torch.int32)
    result = accept_tree(grid.tokens, parents, draws, draft_lens, depth)
    outcomes = tree_outcomes(result.path, result.num_accepted, draft_lens, parents)
    for request in range(batch):
        is_accepted = {0: True}
        for column in range(1, parents.shape[1]):
            parent = int(parents[request, column])
            verified = column <= int(draft_lens[request])
            reached = verified and is_accepted[parent]
            right = int(grid.tokens[request, column]) == int(draws[request, parent])
            is_accepted[column] = reached and right
            assert bool(outcomes.reached[request, column - 1]) == reached
            assert bool(outcomes.accepted[request, column - 1]) == is_accepted[column]


@given(SEEDS, st.integers(1, 5), st.integers(1, DEPTH))
def test_a_chain_has_the_outcomes_of_the_tree_with_one_branch(seed, batch, depth):
    generator = torch.Generator().manual_seed(seed)
    draft_lens = torch.randint(depth + 1, (batch,), generator=generator)
    num_accepted = torch.minimum(torch.randint(depth + 1, (batch,), generator=generator), draft_lens)
    columns = torch.arange(depth + 1)
    path = columns.where(columns <= num_accepted[:, None], depth)
    tree = tree_outcomes(path, num_accepted, draft_lens, (columns - 1).clamp(min=0).expand(batch, -1))
    chain = chain_outcomes(num_accepted, draft_lens, depth)
    assert torch.equal(tree.reached, chain.reached) and torch.equal(tree.accepted, chain.accepted)


def test_docstring_examples():
    chain = chain_outcomes(torch.tensor([1]), torch.tensor([3]), 4)
    assert chain.reached.tolist() == [[True, True, False, False]]
    assert chain.accepted.tolist() == [[True, False, False, False]]
    tree = tree_outcomes(torch.tensor([[0, 1, 3]]), torch.tensor([1]), torch.tensor([2]), torch.tensor([[0, 0, 1, 0]]))
    assert tree.reached.tolist() == [[True, True, False]]
    assert tree.accepted.tolist() == [[True, False, False]]


# -- selection stays prefix-closed ------------------------------------------------------------------------------------


@given(COMBS)
def test_calibrated_trees_keep_parents_before_children(tree):
    seed, batch, *_ = tree
    proposal = grow(*tree, taught(seed, prior_strength=1.0))
    survival = torch.nn.functional.pad(proposal.survival, (1, 0), value=1.0)
    columns = torch.arange(1, survival.shape[1])
    parents = proposal.shape.parents[:, 1:]
    assert (parents < columns).all()
    assert (proposal.survival <= survival.gather(1, parents)).all()
    assert (proposal.survival.diff(dim=1) <= 0).all()
    draft_lens = select_prefixes(proposal.survival, batch * 3)
    for request in range(batch):
        chosen = set(range(int(draft_lens[request]) + 1))
        assert all(int(parents[request, column - 1]) in chosen for column in chosen - {0})


@given(SEEDS, st.integers(0, 20))
def test_selection_over_calibrated_chains_takes_the_most_likely_prefixes(seed, capacity):
    generator = torch.Generator().manual_seed(seed)
    probs = random_probs(generator, 5, DEPTH)
    survival = survival_from_probs(taught(seed, prior_strength=1.0).apply(probs, DEPTHS))
    assert (survival.diff(dim=1) <= 0).all()
    draft_lens = select_prefixes(survival, capacity)
    is_chosen = torch.arange(DEPTH) < draft_lens[:, None]
    best = survival.flatten().sort(descending=True).values[: int(draft_lens.sum())]
    assert survival[is_chosen].sort(descending=True).values.tolist() == best.tolist()
    if int(draft_lens.sum()) < min(capacity, 5 * DEPTH):
        assert not (survival[~is_chosen] > 0).any()


# -- it finds the truth -----------------------------------------------------------------------------------------------


def distort(probs: torch.Tensor) -> torch.Tensor:
    """A draft that is too sure of its first token and not sure enough of the others."""
    return torch.cat((probs[:, :1] ** 2, probs[:, 1:] ** 0.5), dim=1)


def run_distorted(passes: int, count_unreached: bool = False, seed: int = 0) -> Calibration:
    generator = torch.Generator().manual_seed(seed)
    calibration = Calibration(DEPTH, decay=1.0)
    for _ in range(passes):
        probs = torch.rand(64, DEPTH, generator=generator)
        right = torch.rand(64, DEPTH, generator=generator) < distort(probs)
        num_accepted = right.int().cumprod(dim=1).sum(dim=1)
        draft_lens = torch.randint(DEPTH + 1, (64,), generator=generator)
        reached, accepted = chain_outcomes(torch.minimum(num_accepted, draft_lens), draft_lens, DEPTH)
        if count_unreached:
            reached = draft_lens[:, None] >= DEPTHS
        calibration.observe(probs, DEPTHS, reached, accepted)
    return calibration


def test_a_distorted_draft_is_set_right():
    calibration = run_distorted(2000)
    probe = torch.tensor([0.1, 0.3, 0.5, 0.7, 0.9])[:, None].expand(-1, DEPTH)
    truth = distort(probe)
    off = (calibration.apply(probe, DEPTHS) - truth).abs()
    raw_off = (probe - truth).abs()
    assert off.max() < 0.06 and off.mean() < raw_off.mean() / 4
    reliability = calibration.reliability()
    assert reliability.raw_error > 0.12
    assert reliability.error < reliability.raw_error / 5


def test_counting_what_was_not_reached_would_be_wrong():
    """Verified tokens behind a rejected one look rejected. Counting them makes every deep token seem hopeless."""
    probe = torch.tensor([[0.5] * DEPTH])
    truth = distort(probe)
    right = run_distorted(500).apply(probe, DEPTHS)
    wrong = run_distorted(500, count_unreached=True).apply(probe, DEPTHS)
    assert (right - truth).abs().max() < 0.06
    assert (wrong - truth)[0, 2:].max() < -0.2


def test_deep_levels_learn_from_shallow_ones():
    """Ten times too sure wherever it was seen: a level hardly ever reached is not believed either."""
    calibration = Calibration(DEPTH)
    generator = torch.Generator().manual_seed(0)
    for _ in range(40):
        probs = torch.full((64, 1), 0.8)
        accepted = torch.rand(64, 1, generator=generator) < 0.08
        calibration.observe(probs, DEPTHS[:1], torch.ones(64, 1) > 0, accepted)
    assert calibration.apply(torch.tensor(0.8), DEPTH).item() == pytest.approx(0.08, abs=0.03)


def test_scores_never_selected_learn_from_their_neighbours():
    """Else a draft that is not sure enough would never be verified, and never found out."""
    calibration = Calibration(DEPTH)
    probs = torch.full((1000, 1), 0.5)
    accepted = torch.arange(1000)[:, None] < 900
    calibration.observe(probs, DEPTHS[:1], torch.ones(1000, 1) > 0, accepted)
    calibration.refresh()
    assert calibration.apply(torch.tensor(0.5), 1).item() == pytest.approx(0.9, abs=0.02)
    assert calibration.apply(torch.tensor(0.27), DEPTH).item() > 0.6
    # Far away nothing is known.
    assert calibration.apply(torch.tensor(0.99995), DEPTH).item() == pytest.approx(0.99995, abs=1e-4)


@given(SEEDS)
def test_monotone_levels_are_the_nearest(seed):
    """Against pooling adjacent violators one after the other."""
    generator = torch.Generator().manual_seed(seed)
    levels = torch.randn(3, 9, generator=generator).cumsum(dim=1).double()
    weights = torch.rand(3, 9, generator=generator) * 10 ** torch.randint(4, (3, 9), generator=generator) + 0.1
    for row, weight, found in zip(levels, weights, _make_monotone(levels, weights.double()), strict=True):
        blocks: list[tuple[float, float, int]] = []
        for value, mass in zip(row.double().tolist(), weight.double().tolist(), strict=True):
            blocks.append((value, mass, 1))
            while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
                (v1, w1, n1), (v2, w2, n2) = blocks[-2:]
                blocks[-2:] = [((v1 * w1 + v2 * w2) / (w1 + w2), w1 + w2, n1 + n2)]
        expected = [value for value, _, length in blocks for _ in range(length)]
        assert found.tolist() == pytest.approx(expected, abs=1e-9)


def test_it_follows_a_change():
    calibration = Calibration(1, decay=0.995)
    generator = torch.Generator().manual_seed(0)
    probs, depth = torch.full((16, 1), 0.5), torch.tensor([1])
    for rate in (0.9, 0.2):
        for _ in range(200):
            accepted = torch.rand(16, 1, generator=generator) < rate
            calibration.observe(probs, depth, torch.ones(16, 1) > 0, accepted)
        assert calibration.apply(torch.tensor(0.5), 1).item() == pytest.approx(rate, abs=0.08)


def test_settings_out_of_range_are_refused():
    for wrong in (
        {"max_depth": 0},
        {"prior_strength": 0.0},
        {"decay": 0.0},
        {"decay": 1.1},
        {"refresh_every": 0},
    ):
        with pytest.raises(ValueError, match="must be"):
            Calibration(**{"max_depth": DEPTH} | wrong)
    for depth in (0, DEPTH + 1):
        with pytest.raises(ValueError, match="depth must be in"):
            Calibration(DEPTH).apply(torch.zeros(1), depth)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_captured_apply_sees_what_was_learned_since():
    calibration = Calibration(DEPTH, device="cuda")
    probs = torch.full((16, DEPTH), 0.5, device="cuda")
    depths = DEPTHS.cuda()
    yes = torch.ones(16, DEPTH, device="cuda") > 0
    calibration.apply(probs, depths)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        calibrated = calibration.apply(probs, depths)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(16):
            calibration.observe(probs, depths, yes, ~yes)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph.replay()
    assert torch.equal(calibrated, calibration.apply(probs, depths))
    assert calibrated.max() < 0.2


def test_nothing_reads_values_on_the_host():
    """Fake tensors have no values: whatever looked at one would raise."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        calibration = Calibration(DEPTH, refresh_every=1)
        depths = torch.arange(1, DEPTH + 1)
        lens = torch.ones(3, dtype=torch.int32)
        outcomes = chain_outcomes(lens, lens, DEPTH)
        probs = torch.rand(3, DEPTH)
        calibration.observe(probs, depths, *outcomes)
        assert calibration.apply(probs, depths).shape == (3, DEPTH)
        tree_outcomes(torch.zeros(3, 3).long(), lens, lens, torch.zeros(3, DEPTH + 1).long())
