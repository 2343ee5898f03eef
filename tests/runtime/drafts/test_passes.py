"""A draft's most likely tokens."""

from __future__ import annotations

import pytest
import torch

from tetris_sglang.portable_cpu.activate import activate

activate()  # as SGLang does, before its modules are imported
from tetris_sglang.runtime.drafts.passes import most_likely


@pytest.mark.parametrize("count", [1, 3])
def test_most_likely_tokens_and_their_probabilities(count):
    logits = torch.randn(7, 100, generator=torch.Generator().manual_seed(0)) * 4
    tokens, probs = most_likely(logits, count)
    expected = torch.softmax(logits, dim=-1).topk(count, dim=-1)
    assert tokens.tolist() == expected.indices.tolist()
    torch.testing.assert_close(probs, expected.values)
