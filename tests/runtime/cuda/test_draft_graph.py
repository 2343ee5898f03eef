"""Which depths are captured."""

from __future__ import annotations

import pytest

from tetris_sglang.portable_cpu.activate import activate

activate()  # as SGLang does, before its modules are imported


@pytest.mark.parametrize(
    "num_steps, depths",
    [(1, [1]), (2, [1, 2]), (6, [1, 2, 3, 6]), (7, [1, 2, 4, 7]), (64, [1, 2, 4, 8, 16, 32, 64])],
)
def test_depths_of_captured_drafts_halve(num_steps, depths):
    from tetris_sglang.runtime.cuda.draft_graph import captured_depths

    assert captured_depths(num_steps) == depths
