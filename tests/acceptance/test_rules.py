"""Rules for drafts that are drawn from the draft's own law: exact where selection looks at the context, biased where it looks
at what was drawn; and they accept what their papers say.

The chains, the capacity and the test of `test_exact.py`.
"""

from __future__ import annotations

import pytest
import torch

from tests.acceptance.test_exact import (
    DRAFT,
    HOLDS,
    HORIZON,
    MAX_DRAFT,
    REJECTED,
    REQUESTS,
    ROOTS,
    TARGET,
    compare_with_target,
    draft_sampled,
    p_value,
    sample_rows,
    select_on_drawn_probs,
    select_on_largest_probs,
    select_uniformly,
    uniforms,
    write_down,
)
from tetris_sglang.acceptance import AcceptResult
from tetris_sglang.acceptance.block import accept_block
from tetris_sglang.acceptance.recursive import accept_recursively
from tetris_sglang.drafting import CombGrower, make_grid
from tetris_sglang.selection import select_prefixes


def pack(target_probs, draft_lens):
    """The rows that are computed, and where each request's begin."""
    columns = torch.arange(target_probs.shape[1])
    starts = torch.nn.functional.pad((draft_lens + 1).cumsum(0), (1, 0))[:-1]
    return target_probs[columns <= draft_lens[:, None]], starts


def drawing(generator):
    return lambda weights: sample_rows(weights, uniforms(generator, len(weights)))


def by_block(candidates, target_probs, draft_lens, generator, positions):
    coins = uniforms(generator, len(candidates), MAX_DRAFT)
    q = DRAFT[candidates[:, :-1]]
    p, starts = pack(target_probs, draft_lens)
    return accept_block(candidates, draft_lens, p, starts, q, coins, drawing(generator))


def by_rejection(candidates, target_probs, draft_lens, generator, positions):
    """Recursion with one draft a position."""
    parents = (torch.arange(MAX_DRAFT + 1) - 1).clamp(min=0).expand(len(candidates), -1)
    coins = uniforms(generator, len(candidates), MAX_DRAFT, 1)
    q = DRAFT[candidates[:, :-1]]
    p, starts = pack(target_probs, draft_lens)
    return AcceptResult(*accept_recursively(candidates, parents, draft_lens, p, starts, q, coins, drawing(generator))[:2])


def block_without_raggedness(candidates, target_probs, draft_lens, generator, positions):
    """Broken: the block is judged as if all that was drafted had been verified, and cut afterwards."""
    coins = uniforms(generator, len(candidates), MAX_DRAFT)
    q = DRAFT[candidates[:, :-1]]
    full = torch.full_like(draft_lens, MAX_DRAFT)
    p, starts = pack(target_probs, full)
    result = accept_block(candidates, full, p, starts, q, coins, drawing(generator))
    num_accepted = torch.minimum(result.num_accepted, draft_lens)
    own = target_probs[torch.arange(len(candidates)), num_accepted.long()]
    cut = num_accepted < result.num_accepted
    return result._replace(
        num_accepted=num_accepted, bonus_tokens=torch.where(cut, drawing(generator)(own), result.bonus_tokens)
    )


def rejection_without_residual(candidates, target_probs, draft_lens, generator, positions):
    """Broken: behind a rejected draft the target's own law."""
    result = by_rejection(candidates, target_probs, draft_lens, generator, positions)
    own = target_probs[torch.arange(len(candidates)), result.num_accepted.long()]
    return result._replace(bonus_tokens=drawing(generator)(own))


@pytest.mark.parametrize("rule", [by_rejection, by_block])
@pytest.mark.parametrize("select", [select_on_largest_probs, select_uniformly])
def test_rules_are_exact_where_selection_looks_at_the_context(rule, select):
    assert p_value(draft_sampled, select, rule) > HOLDS


@pytest.mark.parametrize("rule", [by_rejection, by_block])
def test_selection_on_the_drawn_token_is_noticed(rule):
    assert p_value(draft_sampled, select_on_drawn_probs, rule) < REJECTED


@pytest.mark.parametrize("broken", [block_without_raggedness, rejection_without_residual])
def test_broken_rules_are_noticed(broken):
    assert p_value(draft_sampled, select_on_largest_probs, broken) < REJECTED


# -- combs -----------------------------------------------------------------------------------------------------------


def draft_combs(roots, generator, score_drawn_tokens=False):
    """A chain drawn from the draft, a second draw without replacement beside each; and the laws that drew them."""
    contexts, levels, grower = roots, [], None
    for _ in range(MAX_DRAFT):
        q = DRAFT[contexts]
        race = q.log() - (-uniforms(generator, *q.shape).log()).log()
        drawn = race.topk(2, dim=1).indices
        scores = (q.gather(1, drawn) if score_drawn_tokens else q.topk(2, dim=1).values).float()
        if grower is None:
            grower = CombGrower(drawn, scores)
        else:
            grower.grow(drawn, scores)
        contexts = grower.frontier_tokens[:, 0]
        levels.append(q)
    return grower.finish(2 * MAX_DRAFT), torch.stack(levels, dim=1)


def by_recursion(grid, draft_lens, q, generator):
    coins = uniforms(generator, REQUESTS, MAX_DRAFT, 2)
    p, starts = pack(TARGET[grid.tokens], draft_lens)
    return accept_recursively(grid.tokens, grid.shape.parents, draft_lens, p, starts, q, coins, drawing(generator))


def recursion_with_a_fresh_bonus(grid, draft_lens, q, generator):
    """Broken: behind rejected drafts the target's own law."""
    result = by_recursion(grid, draft_lens, q, generator)
    last = result.path.gather(1, result.num_accepted.long()[:, None])
    own = TARGET[grid.tokens.gather(1, last)[:, 0]]
    return result._replace(bonus_tokens=drawing(generator)(own))


def decode_combs(accept, capacity, seed, score_drawn_tokens=False):
    generator = torch.Generator().manual_seed(seed)
    output = torch.zeros(REQUESTS, HORIZON + MAX_DRAFT + 1, dtype=torch.int64)
    output[:, 0] = ROOTS
    emitted = torch.zeros(REQUESTS, dtype=torch.int64)
    by_runner_up = 0
    while (emitted < HORIZON).any():
        root = output.gather(1, emitted.clamp(max=HORIZON)[:, None])[:, 0]
        proposal, q = draft_combs(root, generator, score_drawn_tokens)
        grid = make_grid(root, proposal, MAX_DRAFT, 2 * MAX_DRAFT + 1)
        draft_lens = select_prefixes(proposal.survival, capacity)
        accepted = accept(grid, draft_lens, q, generator)
        last = accepted.path.gather(1, accepted.num_accepted.long()[:, None])
        is_sibling = (grid.shape.parents == grid.shape.parents.gather(1, last)) & (torch.arange(grid.tokens.shape[1]) < last)
        by_runner_up += int((is_sibling[:, 1:].any(dim=1) & (accepted.num_accepted > 0)).sum())
        emits = grid.tokens.gather(1, accepted.path).roll(-1, dims=1)
        emits.scatter_(1, accepted.num_accepted.long()[:, None], accepted.bonus_tokens[:, None])
        emitted = write_down(emits, accepted.num_accepted, output, emitted)
    return output[:, 1 : HORIZON + 1], by_runner_up


@pytest.mark.parametrize("capacity", [2 * REQUESTS, 3 * REQUESTS, 2 * MAX_DRAFT * REQUESTS])
def test_recursion_over_combs_is_exact(capacity):
    tokens, by_runner_up = decode_combs(by_recursion, capacity, seed=2)
    assert by_runner_up > REQUESTS // 100  # siblings matter
    assert compare_with_target(tokens) > HOLDS


def test_a_broken_recursion_is_noticed():
    tokens, _ = decode_combs(recursion_with_a_fresh_bonus, 3 * REQUESTS, seed=2)
    assert compare_with_target(tokens) < REJECTED


def test_combs_chosen_by_the_drawn_tokens_are_noticed():
    tokens, _ = decode_combs(by_recursion, REQUESTS, seed=2, score_drawn_tokens=True)
    assert compare_with_target(tokens) < REJECTED


# -- how much they accept --------------------------------------------------------------------------------------------


def first_steps(rule, seed=3):
    """Mean accepted of MAX_DRAFT drafts, all verified."""
    generator = torch.Generator().manual_seed(seed)
    drafts, _ = draft_sampled(ROOTS, generator, torch.zeros_like(ROOTS))
    candidates = torch.cat((ROOTS[:, None], drafts), dim=1)
    draft_lens = torch.full((REQUESTS,), MAX_DRAFT)
    return rule(candidates, TARGET[candidates], draft_lens, generator, None).num_accepted.double().mean().item()


def test_rejection_accepts_what_overlaps_and_blocks_more():
    overlap = torch.minimum(TARGET, DRAFT)
    reached, expected = torch.full((5,), 0.2, dtype=torch.float64), 0.0
    for _ in range(MAX_DRAFT):
        # The law of an accepted draft after each context is what overlaps there.
        reached = reached @ overlap
        expected += reached.sum().item()
    by_tokens = first_steps(by_rejection)
    assert by_tokens == pytest.approx(expected, abs=0.015)
    assert first_steps(by_block) > by_tokens + 0.03
