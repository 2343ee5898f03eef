"""A draft model's passes: its most likely tokens, and the states that a head's passes hand on."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tetris_sglang.portable_cpu.activate import activate

activate()  # as SGLang does, before its modules are imported
from tetris_sglang.acceptance import perturb
from tetris_sglang.runtime.drafts import passes as passes_module
from tetris_sglang.runtime.drafts.passes import DraftPasses, Places, most_likely
from tetris_sglang.runtime.drafts.spec import DraftSpec
from tetris_sglang.runtime.drafts.windows import Window
from tetris_sglang.texts import trust


@pytest.mark.parametrize("count", [1, 3])
def test_most_likely_tokens_and_their_probabilities(count):
    logits = torch.randn(7, 100, generator=torch.Generator().manual_seed(0)) * 4
    tokens, probs = most_likely(logits, count)
    expected = torch.softmax(logits, dim=-1).topk(count, dim=-1)
    assert tokens.tolist() == expected.indices.tolist()
    torch.testing.assert_close(probs, expected.values)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_every_branch_has_a_state_of_its_own(batch_size, monkeypatch):
    """Layers add to their states in place: branches that shared one would change each other's."""
    monkeypatch.setattr(passes_module, "move_kv", lambda *_: None)
    num_steps, branches, width = 3, 2, 4
    spec = DraftSpec(num_steps, branches, 9, 0, reads_hidden_states=True)
    runner = SimpleNamespace(attn_backend=None, token_to_kv_pool=None)
    worker = SimpleNamespace(
        draft_runner=runner, hot_token_id=None, draft_attn_backend=SimpleNamespace(attn_backends=[None] * num_steps)
    )
    seen = []

    def forward(forward_batch, _backend):
        rows = batch_size if forward_batch.spec_info is None else batch_size * branches
        if forward_batch.spec_info is not None:
            states = forward_batch.spec_info.hidden_states
            seen.append(states.clone())
            states.add_(torch.arange(rows)[:, None])
        return SimpleNamespace(next_token_logits=torch.randn(rows, 11), hidden_states=torch.randn(rows, 5))

    window = Window(torch.zeros(batch_size, width, dtype=torch.int64))
    places = Places(
        torch.zeros(batch_size, width, dtype=torch.int64),
        torch.zeros(batch_size, width, dtype=torch.int64),
        torch.zeros(batch_size, dtype=torch.int64),
        torch.zeros(batch_size, branches, num_steps - 1, dtype=torch.int64),
    )
    first, rest = SimpleNamespace(spec_info=None), SimpleNamespace(spec_info=SimpleNamespace(hidden_states=None))
    passes = DraftPasses(worker, spec, trust, perturb, texts=None, vocab_size=11)
    passes.run(first, rest, window, places, None, None, num_steps, forward)
    assert len(seen) == num_steps - 1
    # The first level's branches begin with one state.
    roots = seen[0].unflatten(0, (batch_size, branches))
    assert torch.equal(roots[:, 0], roots[:, 1])
