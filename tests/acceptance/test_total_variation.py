"""A million samples of every rule of acceptance are the target's but for chance: total variation below 0.005.

Two laws, both known exactly: a Markov chain over five tokens, and the tests' models after a prompt, cut to three tokens a
place. A hundred thousand requests are a batch, whose capacity makes it ragged. Of a million draws from the law itself the
distance is 0.002 on average.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.acceptance.test_exact import DRAFT, TARGET, uniforms
from tests.acceptance.test_rules import drawing, pack
from tests.e2e.conftest import PAIR
from tetris_sglang.acceptance import (
    RequestNoise,
    accept_block,
    accept_chain,
    accept_recursively,
    accept_tree,
    draw,
    perturb,
)
from tetris_sglang.drafting import CombGrower, Grid, make_grid
from tetris_sglang.selection import select_prefixes

pytestmark = pytest.mark.statistics

SAMPLES, BATCH, DEPTH, HORIZON = 1_000_000, 100_000, 2, 2
CAPACITY = BATCH * 3 // 2  # of two drafts a request, or four
MAX_DISTANCE = 0.005


class Laws(NamedTuple):
    """What may follow; a token is a column of its state, and the text begins in state 0."""

    target: torch.Tensor
    """[states, tokens] float64."""
    draft: torch.Tensor
    """[states, tokens] float64."""
    following: torch.Tensor
    """[states, tokens] int64, the state behind each token."""


class Step(NamedTuple):
    """What a rule decides about."""

    grid: Grid
    draft_lens: torch.Tensor
    probs: torch.Tensor
    """[batch, width, tokens], the target's behind each column."""
    levels: torch.Tensor
    """[batch, DEPTH, tokens], the draft's."""
    seeds: torch.Tensor
    positions: torch.Tensor
    """[batch], places of the roots."""
    generator: torch.Generator


# -- rules: a step -> columns [batch, DEPTH + 1] of what is kept, how many, and the bonus tokens ---------------------------


def by_own_draws(step: Step):
    """Coupled: the target's own draws, of the noise that the draft drew with."""
    batch, width, _ = step.probs.shape
    places = step.positions[:, None] + _depths(step.grid)
    tokens = draw(step.probs.flatten(0, 1), step.seeds.repeat_interleave(width), places.flatten()).view(batch, width)
    if step.grid.shape is None:
        kept = accept_chain(step.grid.tokens, tokens, step.draft_lens)
        return _chain_path(step), *kept
    kept = accept_tree(step.grid.tokens, step.grid.shape.parents, tokens, step.draft_lens, DEPTH)
    return kept.path, kept.num_accepted, kept.bonus_tokens


def by_recursion(step: Step):
    """Rejection; of chains, plain rejection sampling."""
    parents = _parents(step.grid)
    children = 1 if step.grid.shape is None else 2
    coins = uniforms(step.generator, len(parents), DEPTH, children)
    probs, starts = pack(step.probs, step.draft_lens)
    kept = accept_recursively(
        step.grid.tokens, parents, step.draft_lens, probs, starts, step.levels, coins, drawing(step.generator)
    )
    return kept.path, kept.num_accepted, kept.bonus_tokens


def by_block(step: Step):
    coins = uniforms(step.generator, len(step.probs), DEPTH)
    probs, starts = pack(step.probs, step.draft_lens)
    kept = accept_block(step.grid.tokens, step.draft_lens, probs, starts, step.levels, coins, drawing(step.generator))
    return _chain_path(step), *kept


def broken(step: Step):
    """Behind a rejected draft the target's own law."""
    path, num_accepted, _ = by_recursion(step)
    last = path.gather(1, num_accepted.long()[:, None])[:, 0]
    return path, num_accepted, drawing(step.generator)(step.probs[torch.arange(len(path)), last])


def _parents(grid: Grid):
    if grid.shape is not None:
        return grid.shape.parents
    return (torch.arange(grid.tokens.shape[1]) - 1).clamp(min=0).expand_as(grid.tokens)


def _depths(grid: Grid):
    return torch.arange(grid.tokens.shape[1]) if grid.shape is None else grid.shape.depths


def _chain_path(step: Step):
    return torch.arange(DEPTH + 1).expand(len(step.probs), -1)


# -- decoding --------------------------------------------------------------------------------------------------------------


def decode(laws: Laws, rule, num_children: int, is_coupled: bool, first_seed: int):
    """The first HORIZON tokens of BATCH requests [BATCH, HORIZON], and how many drafts were kept."""
    generator = torch.Generator().manual_seed(first_seed)
    seeds, rows = first_seed + torch.arange(BATCH), torch.arange(BATCH)
    noise = RequestNoise(seeds, torch.ones(BATCH))
    output = torch.zeros(BATCH, HORIZON + DEPTH + 1, dtype=torch.int64)
    states, emitted, num_kept = (torch.zeros(BATCH, dtype=torch.int64) for _ in range(3))
    while (emitted < HORIZON).any():
        contexts, levels, grower = states, [], None
        for level in range(DEPTH):
            q = laws.draft[contexts]
            if is_coupled:
                race = perturb(q.log(), noise, emitted + level)
                scores, tokens = race.softmax(dim=1).topk(num_children, dim=1)
            else:
                race = q.log() - (-uniforms(generator, *q.shape).log()).log()
                # Selection is told nothing of what was drawn here.
                tokens, scores = race.topk(num_children, dim=1).indices, q.topk(num_children, dim=1).values.float()
            if grower is None:
                grower = CombGrower(tokens, scores)
            else:
                grower.grow(tokens, scores)
            levels.append(q)
            contexts = laws.following[contexts, tokens[:, 0]]
        proposal = grower.finish(num_children * DEPTH)
        if num_children == 1:
            proposal = proposal._replace(shape=None)
        grid = make_grid(torch.zeros_like(states), proposal, DEPTH, num_children * DEPTH + 1)
        behind, parents = [states], _parents(grid)
        for column in range(1, grid.tokens.shape[1]):
            before = torch.stack(behind, dim=1).gather(1, parents[:, column, None])[:, 0]
            behind.append(laws.following[before, grid.tokens[:, column]])
        behind = torch.stack(behind, dim=1)
        draft_lens = select_prefixes(proposal.survival, CAPACITY)
        assert len(draft_lens.unique()) > 1
        step = Step(grid, draft_lens, laws.target[behind], torch.stack(levels, dim=1), seeds, emitted, generator)
        path, num_accepted, bonus_tokens = rule(step)
        num_accepted = num_accepted.long()
        emits = grid.tokens.gather(1, path).roll(-1, dims=1).scatter_(1, num_accepted[:, None], bonus_tokens[:, None])
        is_new = (torch.arange(DEPTH + 1) <= num_accepted[:, None]) & (emitted < HORIZON)[:, None]
        places = emitted[:, None] + torch.arange(DEPTH + 1)
        output[rows[:, None].expand_as(places)[is_new], places[is_new]] = emits[is_new]
        last = behind.gather(1, path.gather(1, num_accepted[:, None]))[:, 0]
        states = torch.where(emitted < HORIZON, laws.following[last, bonus_tokens], states)
        num_kept += num_accepted * (emitted < HORIZON)
        emitted = emitted + is_new.sum(dim=1)
    return output[:, :HORIZON], int(num_kept.sum())


def distance(laws: Laws, rule, num_children: int = 1, is_coupled: bool = False) -> float:
    """Total variation between SAMPLES texts and the target's law of them."""
    size = laws.target.shape[1]
    expected = (laws.target[0][:, None] * laws.target[laws.following[0]]).flatten()
    counts, kept = torch.zeros(size * size), 0
    for first_seed in range(0, SAMPLES, BATCH):
        tokens, num_kept = decode(laws, rule, num_children, is_coupled, first_seed)
        counts += (tokens[:, 0] * size + tokens[:, 1]).bincount(minlength=size * size)
        kept += num_kept
    assert kept > SAMPLES // 10, "next to nothing was accepted: nothing was tested"
    return (counts / SAMPLES - expected).abs().sum().item() / 2


@pytest.fixture(scope="module")
def chain() -> Laws:
    return Laws(TARGET, DRAFT, torch.arange(len(TARGET)).expand_as(TARGET))


@pytest.fixture(scope="module")
def real() -> Laws:
    """The tests' models at temperature 1.4 after a prompt: their three likeliest tokens at each place."""
    prompt = AutoTokenizer.from_pretrained(PAIR / "target").encode("The weather was")
    models = [AutoModelForCausalLM.from_pretrained(PAIR / name, dtype=torch.float32).eval() for name in ("target", "draft")]
    texts: list[list[int]] = [[]]
    laws, following = ([], []), []
    size = 6
    for state in range(1 + size + size * size):
        kept = []
        for model in models:
            with torch.no_grad():
                logits = model(torch.tensor([prompt + texts[state]])).logits[0, -1].double()
            values, tokens = logits.topk(3)
            kept.append(dict(zip(tokens.tolist(), (values / 1.4).softmax(dim=0).tolist(), strict=True)))
        tokens = list(kept[0] | kept[1])
        # Fewer where both agree: the others' are impossible.
        tokens += [tokens[0]] * (size - len(tokens))
        for law, probs in zip(laws, kept, strict=True):
            law.append([probs.get(token, 0.0) if token not in tokens[:i] else 0.0 for i, token in enumerate(tokens)])
        is_last = len(texts[state]) == DEPTH
        following.append([state] * size if is_last else list(range(len(texts), len(texts) + size)))
        if not is_last:
            texts += [[*texts[state], token] for token in tokens]
    return Laws(*(torch.tensor(law, dtype=torch.float64) for law in laws), torch.tensor(following))


RULES = {
    "coupled chains": (by_own_draws, 1, True),
    "coupled combs": (by_own_draws, 2, True),
    "rejection": (by_recursion, 1),
    "recursive rejection": (by_recursion, 2),
    "block": (by_block, 1),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("law", ["chain", "real"])
def test_a_million_samples_are_the_targets(law, rule, request):
    assert distance(request.getfixturevalue(law), *RULES[rule]) < MAX_DISTANCE


@pytest.mark.parametrize("law", ["chain", "real"])
def test_a_broken_rule_is_further_away(law, request):
    assert distance(request.getfixturevalue(law), broken, 2) > 2 * MAX_DISTANCE
