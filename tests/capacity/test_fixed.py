"""The fixed capacity: its two forms, its arithmetic, and what it refuses."""

import math
from dataclasses import FrozenInstanceError

import pytest

from tetris_sglang.capacity import FixedCapacity


@pytest.mark.parametrize(
    "per_request, batch_size, expected",
    [
        (1, 7, 7),
        (2.5, 3, 7),
        (2.5, 4, 10),
        (0.29, 100, 29),  # 28.999999999999996 in binary
        (1.1, 10, 11),
        (0.7, 10, 7),
        (1.999, 10, 19),
        (0.25, 3, 1),  # never 0: a step that drafts verifies something
    ],
)
def test_per_request_is_the_paper_k(per_request, batch_size, expected):
    capacity_tokens = FixedCapacity(per_request=per_request).count_tokens(batch_size)
    assert capacity_tokens == expected and type(capacity_tokens) is int


@pytest.mark.parametrize("batch_size", [1, 5, 1000])
def test_absolute_ignores_the_batch(batch_size):
    assert FixedCapacity(absolute=24).count_tokens(batch_size) == 24


@pytest.mark.parametrize("value", [0, -1, 0.0, -0.5, math.nan, math.inf, -math.inf, "two", "2", True, [2]])
def test_per_request_refuses(value):
    with pytest.raises(ValueError, match="per_request must be a finite number above 0, got "):
        FixedCapacity(per_request=value)


@pytest.mark.parametrize("value", [0, -3, 2.0, math.nan, "many", True])
def test_absolute_refuses(value):
    with pytest.raises(ValueError, match="absolute must be an integer of at least 1, got "):
        FixedCapacity(absolute=value)


def test_exactly_one_form():
    with pytest.raises(ValueError, match="exactly one of per_request and absolute, got per_request=None"):
        FixedCapacity()
    with pytest.raises(ValueError, match="exactly one of per_request and absolute, got per_request=2 and absolute=8"):
        FixedCapacity(per_request=2, absolute=8)


def test_an_empty_batch_has_no_capacity():
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        FixedCapacity(per_request=2).count_tokens(0)


def test_it_is_frozen():
    with pytest.raises(FrozenInstanceError):
        FixedCapacity(absolute=2).absolute = 0
