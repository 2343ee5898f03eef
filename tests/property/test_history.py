"""Requests' histories: an offset is what its definition says, finds the truth, and is worth nothing where there is none to find."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from tetris_sglang.selection import AcceptanceHistory, Calibration, chain_outcomes

settings.register_profile("tetris", deadline=None, max_examples=100)
settings.load_profile("tetris")

SEEDS = st.integers(0, 10**6)
DEPTH = 4


def random_steps(seed: int, num_slots: int, steps: int):
    """(rows, probs, reached, accepted) of some of the slots in each step."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        rows = torch.randperm(num_slots, generator=generator)[: num_slots - 1]
        probs = (2 * torch.randn(len(rows), DEPTH, generator=generator)).sigmoid()
        draft_lens = torch.randint(DEPTH + 1, (len(rows),), generator=generator)
        accept_lens = torch.minimum(torch.randint(DEPTH + 1, (len(rows),), generator=generator), draft_lens)
        yield rows, probs, *chain_outcomes(accept_lens, draft_lens, DEPTH)


@given(SEEDS, st.floats(0.2, 2), st.floats(0.5, 1))
def test_offsets_are_those_of_the_definition(seed, deviation, step_decay):
    history = AcceptanceHistory(5, deviation=deviation, step_decay=step_decay, gain_decay=1.0, gain_prior=3.0)
    seen = [[] for _ in range(5)]  # per slot: (surprise, information) of each step
    over, under = 3.0, 3.0

    def intercept(slot: int) -> float:
        ages = range(len(seen[slot]) - 1, -1, -1)
        surprise, information = (
            sum(step_decay**age * step[part] for age, step in zip(ages, seen[slot], strict=True))
            for part in range(2)
        )
        return surprise / (information + deviation**-2)

    for rows, probs, reached, accepted in random_steps(seed, 5, 6):
        for slot, p, was_reached, was_accepted in zip(
            rows.tolist(), probs.double().tolist(), reached.tolist(), accepted.tolist(), strict=True
        ):
            judged = [(a, x) for x, r, a in zip(p, was_reached, was_accepted, strict=True) if r]
            surprise, information = sum(a - x for a, x in judged), sum(x * (1 - x) for _, x in judged)
            over += intercept(slot) * surprise
            under += intercept(slot) ** 2 * information
            seen[slot].append((surprise, information))
        history.observe(rows, probs, reached, accepted)
    gain = min(max(over / under, 0), 1.5)
    expected = [gain * intercept(slot) for slot in range(5)]
    torch.testing.assert_close(history.offsets(torch.arange(5)).tolist(), expected, rtol=1e-4, atol=1e-5)


def test_a_new_request_begins_with_none():
    history = AcceptanceHistory(5)
    for step in random_steps(0, 5, 4):
        history.observe(*step)
    before = history.offsets(torch.arange(5))
    assert (before != 0).all()
    history.forget(torch.tensor([1, 3]))
    after = history.offsets(torch.arange(5))
    assert (after == before.where(torch.tensor([True, False, True, False, True]), 0)).all()
    # Nor does it inherit the evidence: both slots now learn the same as a slot that is really new.
    fresh = AcceptanceHistory(5)
    fresh._gain_sums.copy_(history._gain_sums)
    step = (
        torch.tensor([1]),
        torch.tensor([[0.3, 0.6]]),
        *chain_outcomes(torch.tensor([1]), torch.tensor([2]), 2),
    )
    history.observe(*step)
    fresh.observe(*step)
    assert history.offsets(torch.tensor([1])) == fresh.offsets(torch.tensor([1])) != 0


@given(SEEDS)
def test_what_was_not_reached_does_not_matter(seed):
    steps = list(random_steps(seed, 4, 3))
    ours, other = AcceptanceHistory(4), AcceptanceHistory(4)
    for rows, probs, reached, accepted in steps:
        ours.observe(rows, probs, reached, accepted)
        other.observe(rows, probs.where(reached, 0.123), reached, accepted)
    assert (ours.offsets(torch.arange(4)) == other.offsets(torch.arange(4))).all()


def serve(deviation: float, steps: int = 150, slots: int = 32) -> tuple[AcceptanceHistory, float]:
    """Requests whose tokens' log-odds are off by an intercept of their own; returns what log-loss offsets save per draft."""
    generator = torch.Generator().manual_seed(1)
    history, rows = AcceptanceHistory(slots), torch.arange(slots)
    saved = judged = 0.0
    intercepts = torch.zeros(slots)
    for step in range(steps):
        new = (rows + step) % 30 == 0
        intercepts = torch.where(new, deviation * torch.randn(slots, generator=generator), intercepts)
        history.forget(rows[new])
        log_odds = 1 + torch.randn(slots, DEPTH, generator=generator)
        lucky = torch.rand(slots, DEPTH, generator=generator) < (log_odds + intercepts[:, None]).sigmoid()
        reached, accepted = chain_outcomes(
            lucky.long().cumprod(dim=1).sum(dim=1), torch.full((slots,), DEPTH), DEPTH
        )
        with_offsets = log_odds + history.offsets(rows)[:, None]
        losses = [
            torch.nn.functional.binary_cross_entropy_with_logits(
                values[reached], accepted[reached].float(), reduction="sum"
            )
            for values in (log_odds, with_offsets)
        ]
        saved += float(losses[0] - losses[1])
        judged += int(reached.sum())
        history.observe(rows, log_odds.sigmoid(), reached, accepted)
    return history, saved / judged


def test_requests_that_differ_are_told_apart():
    history, saved = serve(deviation=1.2)
    assert history.gain > 0.8
    assert saved > 0.03


def test_requests_that_do_not_differ_cost_next_to_nothing():
    """The gain notices that there is nothing to know."""
    history, saved = serve(deviation=0.0)
    assert history.gain < 0.25
    assert saved > -0.005


def test_offsets_shift_log_odds_of_their_own_request():
    calibration = Calibration(DEPTH)
    probs = torch.tensor([[0.5, 0.9], [0.5, 0.9]])
    shifted = calibration.apply(probs, torch.tensor([1, 2]), torch.tensor([[0.0], [1.0]]))
    torch.testing.assert_close(shifted[0], probs[0])
    torch.testing.assert_close(shifted[1], (probs[1].logit() + 1).sigmoid())
    # Branches of a tree share their request's.
    tree = calibration.apply(probs[:, :, None].expand(2, 2, 2), 2, torch.tensor([[[0.0]], [[1.0]]]))
    torch.testing.assert_close(tree, shifted[:, :, None].expand(2, 2, 2))


@pytest.mark.parametrize(
    "setting",
    [
        {"num_slots": 0},
        {"deviation": 0.0},
        {"deviation": float("nan")},
        {"gain_prior": 0.0},
        {"step_decay": 0.0},
        {"step_decay": 1.1},
        {"gain_decay": 0.0},
    ],
)
def test_settings_out_of_range_are_refused(setting):
    with pytest.raises(ValueError, match="got"):
        AcceptanceHistory(**{"num_slots": 4} | setting)


def test_nothing_reads_values_on_the_host():
    """Fake tensors have none to read."""
    with FakeTensorMode():
        history = AcceptanceHistory(4)
        rows = torch.empty(3, dtype=torch.int64)
        probs, reached = torch.empty(3, DEPTH), torch.empty(3, DEPTH, dtype=torch.bool)
        history.forget(rows)
        history.observe(rows, probs, reached, reached)
        assert history.offsets(rows).shape == (3,)
