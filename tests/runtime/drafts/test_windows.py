"""What one step hands to the next."""

from __future__ import annotations

import torch

from tetris_sglang.portable_cpu.activate import activate

activate()  # as SGLang does, before its modules are imported
from tetris_sglang.packing import align_right
from tetris_sglang.runtime.drafts.windows import Window, make_draft_input, read_window


def test_draft_input_survives_the_scheduler_filtering_and_merging_batches():
    def make(tokens: list[list[int]], counts: list[int]):
        tokens = torch.tensor(tokens)
        return make_draft_input(Window(tokens, torch.tensor(counts)), tokens[:, -1].int())

    first = make([[1, 2, 3], [4, 5, 6], [7, 8, 9]], [3, 1, 2])
    first.filter_batch(torch.tensor([0, 2]))
    first.merge_batch(make([[10, 11, 12]], [1]))
    window = read_window(first)
    assert window.tokens.tolist() == [[1, 2, 3], [7, 8, 9], [10, 11, 12]]
    assert window.counts.tolist() == [3, 2, 1]
    assert first.bonus_tokens.tolist() == [3, 9, 12]


def test_windows_are_aligned_to_their_ends():
    values = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]])
    aligned = align_right(values, torch.tensor([4, 1, 3]))
    assert aligned[0].tolist() == [1, 2, 3, 4]
    assert aligned[1, -1] == 5
    assert aligned[2, 1:].tolist() == [9, 10, 11]
    states = align_right(values[:, :, None].expand(-1, -1, 2), torch.tensor([2, 2, 2]))
    assert states[:, 2:, 1].tolist() == [[1, 2], [5, 6], [9, 10]]
