"""A draft model's passes: its most likely tokens, and the states that a head's passes hand on."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tetris_sglang.portable_cpu.activate import activate

activate()  # as SGLang does, before its modules are imported
from tetris_sglang.acceptance import RequestNoise, perturb
from tetris_sglang.runtime.drafts.passes import DraftPasses, most_likely
from tetris_sglang.runtime.drafts.spec import DraftSpec
from tetris_sglang.texts import trust


@pytest.mark.parametrize("count", [1, 3])
def test_most_likely_tokens_and_their_probabilities(count):
    logits = torch.randn(7, 100, generator=torch.Generator().manual_seed(0)) * 4
    tokens, probs = most_likely(logits, count)
    expected = torch.softmax(logits, dim=-1).topk(count, dim=-1)
    assert tokens.tolist() == expected.indices.tolist()
    torch.testing.assert_close(probs, expected.values)


def make_passes(num_children: int = 2, hot_token_id=None, draws: bool = True) -> DraftPasses:
    spec = DraftSpec(3, 3 * num_children + 1, reads_hidden_states=True, draws=draws)
    worker = SimpleNamespace(draft_runner=SimpleNamespace(), hot_token_id=hot_token_id)
    return DraftPasses(worker, spec, trust, perturb, texts=None, vocab_size=40)


@pytest.mark.parametrize("hot_token_id", [None, torch.arange(40).flip(0)[:30]])
def test_selection_knows_nothing_of_what_was_drawn(hot_token_id):
    """Else rules for drafts from the draft's own law are biased: the tokens differ from seed to seed, their scores do not."""
    rows = 5
    logits = 2 * torch.randn(rows, 40 if hot_token_id is None else 30, generator=torch.Generator().manual_seed(0))
    scales = torch.tensor([1.0, 0.7, 1.0, 2.0, 0.0])
    passes, drawn = make_passes(hot_token_id=hot_token_id), []
    for seed in range(40):
        tokens, probs, law = passes._choose(
            logits, RequestNoise(torch.arange(rows) + 100 * seed, scales), torch.arange(rows), 2
        )
        drawn.append(tokens)
        expected = torch.softmax(logits / torch.where(scales == 0, 1.0, scales)[:, None], dim=1).topk(2, dim=1).values
        torch.testing.assert_close(probs, expected)
        assert (tokens[:, 0] != tokens[:, 1]).all()
    drawn = torch.stack(drawn)
    assert (drawn[:, :4] != drawn[0, :4]).any(dim=0).all() and (drawn[:, 4] == drawn[0, 4]).all()
    # The law is what the first tokens come from; a greedy request's has one token.
    assert law.shape == (rows, 40) and law[4, drawn[0, 4, 0]] == 1
    torch.testing.assert_close(law.sum(dim=1), torch.ones(rows))
    # And with the noise that the target draws with, the scores say how far ahead of the others a token is.
    scores = [
        make_passes(draws=False)._choose(logits, RequestNoise(torch.arange(rows) + seed, scales), torch.arange(rows), 2)[1]
        for seed in (0, 1)
    ]
    assert hot_token_id is not None or not torch.equal(*scores)
