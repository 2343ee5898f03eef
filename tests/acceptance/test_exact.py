"""The output distribution is exactly the target's, whatever is drafted and selected.

Target and draft are Markov chains over five tokens, so the joint probability of the next three tokens is
known exactly. Thousands of requests, of five different last tokens, form one batch under a small capacity;
decode steps run until each has emitted three tokens, which are compared with the exact law by chi-square.
Seeds are fixed: a run's outcome does not vary. Broken rules show that the test would notice a difference.
"""

import pytest
import torch
from scipy.stats import chisquare

from tetris_sglang.acceptance import RequestNoise, accept_chain, accept_tree, draw, perturb
from tetris_sglang.drafting import CombGrower, make_grid
from tetris_sglang.selection import select_prefixes, select_uniform, survival_from_probs

VOCAB, MAX_DRAFT, HORIZON, REQUESTS = 5, 3, 3, 40_000
CAPACITY = REQUESTS  # a third of what is drafted: some chains get no draft, some get three
ROOTS = torch.arange(REQUESTS) % VOCAB
SEEDS = torch.arange(REQUESTS)
HOLDS, REJECTED = 1e-4, 1e-6  # p-values

TARGET = torch.tensor(
    [
        [0.40, 0.20, 0.15, 0.15, 0.10],
        [0.10, 0.45, 0.25, 0.00, 0.20],  # token 3 never follows token 1
        [0.30, 0.10, 0.40, 0.10, 0.10],
        [0.10, 0.15, 0.20, 0.30, 0.25],
        [0.25, 0.25, 0.25, 0.15, 0.10],
    ],
    dtype=torch.float64,
)
# Its most probable token differs from the target's after tokens 0, 2 and 4, and is impossible after token 1.
DRAFT = torch.tensor(
    [
        [0.20, 0.55, 0.10, 0.10, 0.05],
        [0.05, 0.15, 0.05, 0.70, 0.05],
        [0.60, 0.10, 0.10, 0.10, 0.10],
        [0.10, 0.10, 0.10, 0.45, 0.25],
        [0.10, 0.20, 0.10, 0.25, 0.35],
    ],
    dtype=torch.float64,
)


def uniforms(generator, *shape):
    return torch.rand(*shape, dtype=torch.float64, generator=generator)


# --- drafts: (contexts [batch], generator, positions of these [batch]) -> drafts [batch, max_draft], draft_probs of each


def draft_argmax(contexts, generator, positions):
    drafts, probs = [], []
    for _ in range(MAX_DRAFT):
        best = DRAFT[contexts].max(dim=1)
        contexts = best.indices
        drafts.append(contexts)
        probs.append(best.values)
    return torch.stack(drafts, 1), torch.stack(probs, 1)


def sample_rows(probs, uniforms):
    """One token per row of probs [rows, vocab], by inverse CDF."""
    cdf = probs.double().cumsum(dim=1)
    return torch.searchsorted(cdf, uniforms[:, None] * cdf[:, -1:], right=True).squeeze(1)


def draft_sampled(contexts, generator, positions):
    drafts, probs = [], []
    for _ in range(MAX_DRAFT):
        q = DRAFT[contexts]
        contexts = sample_rows(q, uniforms(generator, len(q)))
        drafts.append(contexts)
        probs.append(q.gather(1, contexts[:, None])[:, 0])
    return torch.stack(drafts, 1), torch.stack(probs, 1)


def draft_with_shared_noise(contexts, generator, positions):
    drafts, probs = [], []
    noise = RequestNoise(SEEDS, torch.ones(REQUESTS))
    for level in range(MAX_DRAFT):
        perturbed = perturb(DRAFT[contexts].log(), noise, positions + level)
        best = perturbed.softmax(dim=1).max(dim=1)
        contexts = best.indices
        drafts.append(contexts)
        probs.append(best.values)
    return torch.stack(drafts, 1), torch.stack(probs, 1)


# --- acceptance: (candidates [batch, width], target_probs [batch, width, vocab], draft_lens, generator, positions)


def accept_target_only(candidates, target_probs, draft_lens, generator, positions):
    """What is tested: packed rows, each with the target's own draw, scattered back to strided numbering."""
    width = candidates.shape[1]
    verified = torch.arange(width) <= draft_lens[:, None]
    packed_probs = target_probs[verified]  # [sum(verify_lens), vocab]
    target_tokens = torch.full_like(candidates, -1)
    target_tokens[verified] = sample_rows(packed_probs, uniforms(generator, len(packed_probs)))
    return accept_chain(candidates, target_tokens, draft_lens)


def draw_with_noise(candidates, target_probs, draft_lens, positions):
    """What is tested with drafts of the same noise."""
    batch, width, _ = target_probs.shape
    places = (positions[:, None] + torch.arange(width)).flatten()
    tokens = draw(target_probs.flatten(0, 1), SEEDS.repeat_interleave(width), places)
    return accept_chain(candidates, tokens.view(batch, width), draft_lens)


def accept_with_shared_noise(candidates, target_probs, draft_lens, generator, positions):
    return draw_with_noise(candidates, target_probs, draft_lens, positions)


def accept_with_stuck_noise(candidates, target_probs, draft_lens, generator, positions):
    """Broken: every step begins with the same noise."""
    return draw_with_noise(candidates, target_probs, draft_lens, torch.zeros_like(positions))


def accept_too_often(candidates, target_probs, draft_lens, generator, positions):
    """Broken: accepts with probability min(1, 1.5 p)."""
    batch, width = candidates.shape
    drafts = candidates[:, 1:]
    p_draft = target_probs[:, :-1].gather(2, drafts[..., None])[..., 0]
    coins = uniforms(generator, batch, width - 1)
    without_draft = target_probs.clone()
    without_draft[:, :-1].scatter_(2, drafts[..., None], 0.0)
    at_last = (torch.arange(width) == draft_lens[:, None])[..., None]
    bonus_probs = torch.where(at_last, target_probs, without_draft)
    tokens = sample_rows(bonus_probs.flatten(0, 1), uniforms(generator, batch * width)).view(batch, width)
    tokens[:, :-1] = torch.where((coins < 1.5 * p_draft) & ~at_last[:, :-1, 0], drafts, tokens[:, :-1])
    return accept_chain(candidates, tokens, draft_lens)


def accept_with_fresh_bonus(candidates, target_probs, draft_lens, generator, positions):
    """Broken: after a rejection the bonus is drawn anew from p, so the rejected token has a second chance."""
    result = accept_target_only(candidates, target_probs, draft_lens, generator, positions)
    bonus_probs = target_probs[torch.arange(len(candidates)), result.num_accepted.long()]
    return result._replace(bonus_tokens=sample_rows(bonus_probs, uniforms(generator, len(candidates))))


def accept_by_rejection(candidates, target_probs, draft_lens, generator, positions):
    """Rejection sampling of sampled drafts: accept with min(1, p / q), else draw from (p - q)+. Not in the
    package yet: here it shows the trap of selecting on the drawn token."""
    batch, width = candidates.shape
    drafts = candidates[:, 1:]
    q, p = DRAFT[candidates], target_probs
    p_draft, q_draft = (probs[:, :-1].gather(2, drafts[..., None])[..., 0] for probs in (p, q))
    at_last = (torch.arange(width) == draft_lens[:, None])[..., None]
    # + tiny: where p equals q the residual is empty, and never drawn from.
    bonus_probs = torch.where(at_last, p, (p - q).clamp(min=0) + 1e-300)
    tokens = sample_rows(bonus_probs.flatten(0, 1), uniforms(generator, batch * width)).view(batch, width)
    accepted = (uniforms(generator, batch, width - 1) * q_draft < p_draft) & ~at_last[:, :-1, 0]
    # A rejected draft may be drawn again only with probability 0: (p - q)+ is 0 where p < q.
    tokens[:, :-1] = torch.where(accepted, drafts, tokens[:, :-1])
    return accept_chain(candidates, tokens, draft_lens)


# --- selection: (contexts, drafts' probabilities) -> draft_lens ---------------------------------------------


def select_on_drawn_probs(candidates, draft_probs):
    return select_prefixes(survival_from_probs(draft_probs), CAPACITY)


def select_on_largest_probs(candidates, draft_probs):
    """Depends, for position j, on the tokens before j only: allowed for sampled drafts too."""
    largest = DRAFT[candidates[:, :-1]].max(dim=2).values
    return select_prefixes(survival_from_probs(largest), CAPACITY)


def select_uniformly(candidates, draft_probs):
    return select_uniform(draft_probs, CAPACITY)


# --- decoding -----------------------------------------------------------------------------------------------


def write_down(emits, num_accepted, output, emitted):
    """Append what a step emits [REQUESTS, deepest + 1] to the requests that are not done; returns the new `emitted`."""
    columns = torch.arange(emits.shape[1])
    new = (columns <= num_accepted[:, None]) & (emitted < HORIZON)[:, None]
    positions = (emitted[:, None] + 1 + columns).clamp(max=output.shape[1] - 1)
    rows = torch.arange(REQUESTS)[:, None].expand_as(positions)
    output[rows[new], positions[new]] = emits[new]
    return emitted + new.sum(dim=1)


def decode(draft, select, accept, seed):
    """Emit HORIZON tokens per request; returns [REQUESTS, HORIZON] and the draft_lens of the first step."""
    generator = torch.Generator().manual_seed(seed)
    output = torch.zeros(REQUESTS, HORIZON + MAX_DRAFT + 1, dtype=torch.int64)
    output[:, 0] = ROOTS
    emitted = torch.zeros(REQUESTS, dtype=torch.int64)
    first_draft_lens = None
    while (emitted < HORIZON).any():
        root = output.gather(1, emitted.clamp(max=HORIZON)[:, None])
        drafts, draft_probs = draft(root[:, 0], generator, emitted)
        candidates = torch.cat([root, drafts], dim=1)
        draft_lens = select(candidates, draft_probs)
        first_draft_lens = draft_lens if first_draft_lens is None else first_draft_lens
        num_accepted, bonus_tokens = accept(candidates, TARGET[candidates], draft_lens, generator, emitted)
        emits = torch.cat([drafts, drafts[:, :1]], dim=1)
        emits.scatter_(1, num_accepted.long()[:, None], bonus_tokens[:, None])
        emitted = write_down(emits, num_accepted, output, emitted)
    return output[:, 1 : HORIZON + 1], first_draft_lens


def p_value(draft, select, accept, seed=0):
    """Chi-square of (last token, next three tokens); 0 if a triple occurs that the target cannot emit."""
    tokens, draft_lens = decode(draft, select, accept, seed)
    # Capacity really makes the batch ragged.
    assert len(draft_lens.unique()) > 1 or select is select_uniformly
    return compare_with_target(tokens)


def compare_with_target(tokens):
    per_root = TARGET[:, :, None, None] * TARGET[None, :, :, None] * TARGET[None, None, :, :]
    expected = per_root.flatten() * (REQUESTS / VOCAB)
    cells = torch.cat([ROOTS[:, None], tokens], dim=1) @ torch.tensor([VOCAB**3, VOCAB**2, VOCAB, 1])
    counts = cells.bincount(minlength=VOCAB**4)
    possible = expected > 0
    assert possible.sum() < VOCAB**4 and expected[possible].min() > 5
    if counts[~possible].any():
        return 0.0
    # One constraint per last token: their numbers are given.
    return chisquare(counts[possible].numpy(), expected[possible].numpy(), ddof=VOCAB - 1).pvalue


@pytest.mark.parametrize("select", [select_on_drawn_probs, select_on_largest_probs, select_uniformly])
def test_target_only_acceptance_of_argmax_drafts_is_exact(select):
    assert p_value(draft_argmax, select, accept_target_only) > HOLDS


@pytest.mark.parametrize("select", [select_on_drawn_probs, select_uniformly])
def test_target_only_acceptance_is_exact_for_sampled_drafts_too(select):
    """The target's draws never see the drafts, so even selecting on the drawn token is safe."""
    assert p_value(draft_sampled, select, accept_target_only) > HOLDS


@pytest.mark.parametrize("select", [select_on_drawn_probs, select_on_largest_probs, select_uniformly])
def test_drafts_of_the_targets_noise_are_exact(select):
    """Draft and target draw with the same numbers, and selection looks at what they made of the draft's."""
    assert p_value(draft_with_shared_noise, select, accept_with_shared_noise) > HOLDS


def test_stuck_noise_is_noticed():
    assert p_value(draft_with_shared_noise, select_on_drawn_probs, accept_with_stuck_noise) < REJECTED


@pytest.mark.parametrize("broken", [accept_too_often, accept_with_fresh_bonus])
def test_broken_acceptance_is_noticed(broken):
    assert p_value(draft_argmax, select_on_drawn_probs, broken) < REJECTED


def test_rejection_sampling_with_selection_on_the_drawn_token_is_noticed():
    assert p_value(draft_sampled, select_on_drawn_probs, accept_by_rejection) < REJECTED


@pytest.mark.parametrize("select", [select_on_largest_probs, select_uniformly])
def test_rejection_sampling_with_selection_on_the_context_is_exact(select):
    """The control: rejection sampling itself is right here, so the test above sees the selection rule."""
    assert p_value(draft_sampled, select, accept_by_rejection) > HOLDS


def test_the_trap_in_numbers():
    """q = (.5, .5), p = (.9, .1), verified only when token 0 was drawn: rejection sampling emits token 0 with
    probability .5 * 1 + .5 * .9 = .95; the target's own draw keeps .9."""
    n = 100_000
    generator = torch.Generator().manual_seed(0)
    p = torch.tensor([0.9, 0.1], dtype=torch.float64).expand(n, 2)
    drafts = (uniforms(generator, n) < 0.5).long()
    verified = drafts == 0
    own = sample_rows(p, uniforms(generator, n))
    by_rejection = torch.where(verified, 0, own)  # p(0) / q(0) > 1: always accepted
    candidates = torch.stack([torch.zeros_like(drafts), drafts], dim=1)
    target_tokens = torch.stack([own, own], dim=1)
    accepted = accept_chain(candidates, target_tokens, verified.int())
    by_own_draw = torch.where(accepted.num_accepted == 1, drafts, accepted.bonus_tokens)
    standard_error = (0.9 * 0.1 / n) ** 0.5
    assert abs((by_rejection == 0).double().mean() - 0.95) < 4 * standard_error
    assert abs((by_own_draw == 0).double().mean() - 0.90) < 4 * standard_error


# --- combs --------------------------------------------------------------------------------------------------

CHILDREN, COMB_DEPTH, COMB_NODES = 2, 3, 5


def draft_combs(roots):
    """Three levels of the draft's two most likely tokens."""
    best = DRAFT[roots].topk(CHILDREN, dim=1)
    grower = CombGrower(best.indices, best.values.float())
    for _ in range(COMB_DEPTH - 1):
        best = DRAFT[grower.frontier_tokens[:, 0]].topk(CHILDREN, dim=1)
        grower.grow(best.indices, best.values.float())
    return grower.finish(COMB_NODES)


def accept_own_draws(grid, draft_lens, generator):
    """What is tested: one draw of the target per verified column."""
    tokens = grid.tokens
    verified = torch.arange(tokens.shape[1]) <= draft_lens[:, None]
    draws = torch.full_like(tokens, -1)
    draws[verified] = sample_rows(TARGET[tokens][verified], uniforms(generator, int(verified.sum())))
    return accept_tree(tokens, grid.shape.parents, draws, draft_lens, grid.max_depth), draws


def accept_each_child_by_its_own_coin(grid, draft_lens, generator):
    """Broken: a second child gets a chance of p(x) of its own, not renormalised by the first one's rejection."""
    _, draws = accept_own_draws(grid, draft_lens, generator)
    tokens, parents = grid.tokens, grid.shape.parents
    coins = uniforms(generator, *tokens.shape)
    p = TARGET[tokens.gather(1, parents)].gather(2, tokens[..., None])[..., 0]
    columns = torch.arange(tokens.shape[1])
    # Later siblings overwrite: their own coins decide, whatever was drawn.
    for column in range(1, tokens.shape[1]):
        is_taken = (coins[:, column] < p[:, column]) & (columns[column] <= draft_lens)
        parent = parents[:, column, None]
        current = draws.gather(1, parent)[:, 0]
        draws.scatter_(1, parent, torch.where(is_taken, tokens[:, column], current)[:, None])
    return accept_tree(tokens, parents, draws, draft_lens, grid.max_depth), draws


def decode_combs(accept, capacity, seed):
    generator = torch.Generator().manual_seed(seed)
    output = torch.zeros(REQUESTS, HORIZON + COMB_DEPTH + 1, dtype=torch.int64)
    output[:, 0] = ROOTS
    emitted = torch.zeros(REQUESTS, dtype=torch.int64)
    by_second_child = 0
    while (emitted < HORIZON).any():
        root = output.gather(1, emitted.clamp(max=HORIZON)[:, None])[:, 0]
        proposal = draft_combs(root)
        grid = make_grid(root, proposal, COMB_DEPTH, COMB_NODES + 1)
        draft_lens = select_prefixes(proposal.survival, capacity)
        accepted, draws = accept(grid, draft_lens, generator)
        by_second_child += int(((accepted.path[:, 1] > 1) & (accepted.num_accepted > 0)).sum())
        emits = draws.gather(1, accepted.path)
        emitted = write_down(emits, accepted.num_accepted, output, emitted)
    return output[:, 1 : HORIZON + 1], by_second_child


@pytest.mark.parametrize("capacity", [2 * REQUESTS, 3 * REQUESTS, COMB_NODES * REQUESTS])
def test_combs_are_exact(capacity):
    tokens, by_second_child = decode_combs(accept_own_draws, capacity, seed=1)
    assert by_second_child > REQUESTS // 100  # runners-up matter
    assert compare_with_target(tokens) > HOLDS


def test_broken_acceptance_of_combs_is_noticed():
    tokens, _ = decode_combs(accept_each_child_by_its_own_coin, 2 * REQUESTS, seed=1)
    assert compare_with_target(tokens) < REJECTED
