"""Fairness: who has been slow counts more, and nothing else changes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tetris_sglang.selection import LARGEST_PACE_WEIGHT, RequestPace, select_prefixes


def steps(pace: RequestPace, rows: list[int], emitted: list[int], count: int = 1) -> None:
    for _ in range(count):
        pace.observe(torch.tensor(rows), torch.tensor(emitted))


@given(
    st.lists(st.lists(st.integers(1, 13), min_size=4, max_size=4), max_size=12),
    st.floats(0.1, 4),
)
def test_weights_are_the_slope_of_the_utility(history, fairness):
    """Against the definition in plain Python: tokens per step so far, the mean before there were any, to the power -a."""
    pace = RequestPace(6, fairness)
    rows = [1, 2, 4, 5]
    sums, everybody = [[0.0, 0.0] for _ in rows], [1.0, 1.0]
    for emitted in history:
        steps(pace, rows, emitted)
        everybody = [0.98 * everybody[0] + sum(emitted), 0.98 * everybody[1] + len(emitted)]
        for one, tokens in zip(sums, emitted, strict=True):
            one[:] = one[0] * (1 - 1 / 256) + tokens, one[1] * (1 - 1 / 256) + 1
    mean = everybody[0] / everybody[1]
    expected = [((tokens + 4 * mean) / (n + 4) / mean) ** -fairness for tokens, n in sums]
    bounded = [min(max(weight, 1 / LARGEST_PACE_WEIGHT), LARGEST_PACE_WEIGHT) for weight in expected]
    assert pace.weights(torch.tensor(rows)).tolist() == pytest.approx(bounded, rel=1e-4)


def test_a_slow_request_gets_drafts_that_a_fast_one_had():
    """One has been emitting 6 tokens a step, the other 1."""
    survival = torch.tensor([[0.9, 0.8, 0.7, 0.6], [0.5, 0.3, 0.2, 0.1]])
    pace = RequestPace(2, fairness=1.0)
    rows = torch.tensor([0, 1])
    assert select_prefixes(survival * pace.weights(rows)[:, None] / 8, 4).tolist() == [4, 0]
    steps(pace, [0, 1], [6, 1], count=50)
    weights = pace.weights(rows)
    assert 0.5 < weights[0] < 0.7 and 2.5 < weights[1] < 3.5
    assert select_prefixes(survival * weights[:, None] / 8, 4).tolist() == [1, 3]


def test_more_fairness_differs_more():
    shares = []
    for fairness in (0.5, 1.0, 2.0):
        pace = RequestPace(2, fairness)
        steps(pace, [0, 1], [6, 1], count=50)
        slow, fast = pace.weights(torch.tensor([1, 0])).tolist()
        shares.append(slow / fast)
    assert shares[0] < shares[1] < shares[2]
    assert shares[1] == pytest.approx(shares[0] ** 2, rel=1e-3)


def test_a_new_request_in_a_slot_begins_at_the_mean():
    pace = RequestPace(3, fairness=2.0)
    steps(pace, [0, 1, 2], [9, 1, 1], count=20)
    pace.forget(torch.tensor([1]))
    fast, new, slow = pace.weights(torch.tensor([0, 1, 2])).tolist()
    assert new == pytest.approx(1, rel=1e-5) and fast < 0.5 and slow > 2


def test_requests_that_do_not_run_keep_their_pace():
    pace = RequestPace(2, fairness=1.0)
    steps(pace, [0, 1], [4, 1], count=10)
    before = pace.weights(torch.tensor([0, 1]))
    steps(pace, [1], [1], count=200)
    ratio = pace.weights(torch.tensor([0, 1]))
    # The mean has moved to the one that runs: the other is faster than it by as much as before.
    assert ratio[0] < before[0] and ratio[1] == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize("num_slots, fairness", [(0, 1.0), (2, 0.0), (2, -1.0), (2, float("nan"))])
def test_bad_settings_are_named(num_slots, fairness):
    with pytest.raises(ValueError, match=f"must be above 0, got {num_slots} and {fairness}"):
        RequestPace(num_slots, fairness)
