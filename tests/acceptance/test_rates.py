"""Known rates of acceptance against brute force."""

from __future__ import annotations

from itertools import combinations, product

import pytest
import torch

from tetris_sglang.acceptance import rates
from tetris_sglang.acceptance.block import accept_block
from tetris_sglang.acceptance.recursive import accept_recursively

VOCAB = 4


def random_laws(seed: int, n: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    p, q = (torch.softmax(2 * torch.randn(n, VOCAB, generator=generator, dtype=torch.float64), dim=1) for _ in range(2))
    q[0] = p[0]
    return p, q


def all_inside(q: list[float], subset: tuple[int, ...], num_drafts: int, with_replacement: bool) -> float:
    total = 0.0
    for drafts in product(subset, repeat=num_drafts):
        chance, left = 1.0, 1.0
        for i, token in enumerate(drafts):
            if not with_replacement and token in drafts[:i]:
                chance = 0.0
                break
            chance *= q[token] / left
            left -= 0 if with_replacement else q[token]
        total += chance
    return total


@pytest.mark.parametrize("num_drafts, with_replacement", [(1, True), (2, True), (3, True), (2, False)])
def test_the_most_possible_is_the_smallest_cut(num_drafts, with_replacement):
    """Over every set of tokens, not only those with the largest q / p."""
    p, q = random_laws(0)
    found = rates.best(p, q, num_drafts, with_replacement=with_replacement).tolist()
    subsets = [s for size in range(VOCAB + 1) for s in combinations(range(VOCAB), size)]
    for row, (own, drafted) in enumerate(zip(p.tolist(), q.tolist(), strict=True)):
        cuts = [sum(own[t] for t in s) + 1 - all_inside(drafted, s, num_drafts, with_replacement) for s in subsets]
        assert found[row] == pytest.approx(min(1.0, *cuts), abs=1e-12)
    with pytest.raises(ValueError, match="two drafts"):
        rates.best(p, q, 3, with_replacement=False)


def test_one_draft_can_be_accepted_as_often_as_laws_overlap():
    p, q = random_laws(1)
    torch.testing.assert_close(rates.best(p, q, 1, with_replacement=True), rates.rejection(p, q))


def test_recursion_stays_below_the_most_possible_and_above_one_draft():
    p, q = random_laws(2)
    two, most = rates.recursion(p, q), rates.best(p, q, 2, with_replacement=False)
    assert (two <= most + 1e-12).all() and (two[1:] > rates.rejection(p, q)[1:]).all()
    assert two[0] == pytest.approx(1)


@pytest.mark.statistics
def test_the_coupled_race_has_its_closed_form():
    p, q = random_laws(3)
    ratios = torch.maximum(p[:, None] / p[:, :, None], q[:, None] / q[:, :, None])
    expected = (1 / ratios.sum(dim=2)).sum(dim=1)
    torch.testing.assert_close(rates.coupled(p, q, 1, num_draws=20_000), expected, atol=0.012, rtol=0)
    assert (rates.coupled(p, q, 2, num_draws=2000) > expected - 0.03).all()


def test_the_rules_accept_at_these_rates():
    p, q = random_laws(4, n=3)
    n = 60_000
    generator = torch.Generator().manual_seed(0)
    for own, drafted in zip(p, q, strict=True):
        race = drafted.log() - (-torch.rand(n, VOCAB, generator=generator, dtype=torch.float64).log()).log()
        tokens = torch.nn.functional.pad(race.topk(2, dim=1).indices, (1, 0))
        laws = {"target_probs": own.expand(3 * n, VOCAB), "first_rows": 3 * torch.arange(n)}
        coins = torch.rand(n, 1, 2, generator=generator, dtype=torch.float64)

        def draw(weights):
            return weights.argmax(dim=1)

        kept = accept_recursively(
            tokens, torch.zeros_like(tokens), torch.full((n,), 2), draft_probs=drafted.expand(n, 1, VOCAB), uniforms=coins,
            draw=draw, **laws,
        ).num_accepted  # fmt: skip
        assert kept.double().mean() == pytest.approx(float(rates.recursion(own[None], drafted[None])), abs=0.01)
        one = torch.ones(n, dtype=torch.int64)
        kept = accept_block(
            tokens[:, :2], one, draft_probs=drafted.expand(n, 1, VOCAB), uniforms=coins[:, :, 0], draw=draw, **laws
        ).num_accepted
        assert kept.double().mean() == pytest.approx(float(rates.rejection(own[None], drafted[None])), abs=0.01)
