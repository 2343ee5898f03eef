"""Expected acceptances by depth and capacity."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tetris_sglang.capacity import (
    AcceptCurves,
    capacity_shares,
    measure_curves,
)


def test_curves_are_sums_of_the_best():
    survival = torch.tensor([[0.9, 0.8, 0.1], [0.6, 0.2, 0.19]])
    depths = torch.tensor([1, 2, 3])
    curves = measure_curves(survival, depths, 3, torch.tensor([0.0, 0.5, 1.0, 1.5, 3.0]))
    expected = [
        [0, 0, 0, 0, 0],
        [0, 0.9, 1.5, 1.5, 1.5],
        [0, 0.9, 1.7, 2.3, 2.5],
        [0, 0.9, 1.7, 2.3, 2.79],
    ]
    assert torch.allclose(curves * 2, torch.tensor(expected))


def test_curves_of_trees_count_nodes_by_their_own_depth():
    survival = torch.tensor([[0.7, 0.5, 0.2, 0.1]])
    depths = torch.tensor([[1, 2, 1, 3]])
    curves = measure_curves(survival, depths, 3, torch.tensor([1.0, 2.0, 4.0]))
    assert torch.allclose(curves, torch.tensor([[0, 0, 0], [0.7, 0.9, 0.9], [0.7, 1.2, 1.4], [0.7, 1.2, 1.5]]))


def test_rows_that_only_fill_a_graph_count_for_nothing():
    generator = torch.Generator().manual_seed(0)
    survival, depths = torch.rand(5, 6, generator=generator), torch.randint(1, 4, (5, 6), generator=generator)
    shares = torch.tensor([0.0, 0.25, 1.0, 2.5, 6.0])
    is_real = torch.tensor([True, False, True, True, False])
    expected = measure_curves(survival[is_real], depths[is_real], 3, shares)
    torch.testing.assert_close(measure_curves(survival, depths, 3, shares, is_real), expected)
    assert measure_curves(survival, depths, 3, shares, torch.zeros(5, dtype=torch.bool)).eq(0).all()


def test_a_shallow_step_says_little_about_deep_ones():
    curves = AcceptCurves(4, capacity_shares(4))
    full = np.array([[min(c, d) * 0.5 for c in curves.shares] for d in range(5)])
    for _ in range(200):
        curves.confirm(curves.observe(full, 64, 64), 64 * 0.5)
    gain = curves.accepted(np.array([4]), np.array([4.0])) - curves.accepted(np.array([2]), np.array([4.0]))
    for _ in range(50):
        curves.confirm(curves.observe(full[:3] * 1.5, 64, 64), 64 * 0.75)
    at_two, at_four = (float(curves.accepted(np.array([d]), np.array([4.0]))[0]) for d in (2, 4))
    assert at_two == pytest.approx(1.5, rel=0.01)
    assert at_four - at_two == pytest.approx(float(gain[0]), rel=0.05)
