"""How many rows the target's captured passes have."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tetris_sglang.runtime.cuda.hooks import row_tiers

SGLANGS = [*range(1, 9), *range(10, 33, 2), *range(40, 65, 4), *range(72, 257, 8)]
"""Batch sizes as SGLang captures them."""


@given(st.sets(st.integers(1, 512), min_size=1, max_size=40), st.integers(1, 24))
def test_a_step_without_drafts_has_no_padding_and_no_step_has_much(batch_sizes, width):
    tiers = row_tiers(batch_sizes, width)
    assert tiers == sorted(set(tiers)) and set(batch_sizes) <= set(tiers) and tiers[-1] == max(batch_sizes) * width
    for lower, upper in pairwise(tiers):
        assert upper - lower <= max(8, lower / 8), (lower, upper)


def test_small_steps_are_padded_less_than_upstreams_and_tiers_are_not_many_more():
    """Batches that verify up to three drafts per request: padded rows per step."""
    tiers, upstreams = row_tiers(SGLANGS, 13), [13 * size for size in SGLANGS]
    assert len(tiers) <= len(SGLANGS) + 25

    def padding(tiers: list[int], batch_size: int) -> float:
        rows = range(batch_size, 4 * batch_size)
        return sum(min(tier for tier in tiers if tier >= n) - n for n in rows) / len(rows)

    for batch_size in (1, 4, 16, 64):
        assert padding(tiers, batch_size) < 0.4 * padding(upstreams, batch_size), batch_size


def test_tiers_of_one_row_a_request_are_the_batch_sizes():
    assert row_tiers([4, 1, 2], 1) == [1, 2, 4]


@pytest.mark.parametrize("width, tiers", [(7, [1, 2, 4, 12, 20, 28]), (2, [1, 2, 4, 8])])
def test_gaps_are_filled(width, tiers):
    assert row_tiers([1, 2, 4], width) == tiers
