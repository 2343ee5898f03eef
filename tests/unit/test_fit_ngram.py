"""The script that fits n-gram drafting's constants: it steps as serving does, and finds what it should."""

import random
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from fit_ngram import Steps, Text, draw_acceptance, fit, judged, log_loss, replay

from tetris_sglang.drafting import Lookup, Prior, estimate_probs, look_up_reference


def test_steps_are_those_of_real_speculation():
    source = random.Random(0)
    texts = [
        Text("prose", source.choices(range(6), k=source.randint(20, 120)), prompt_len=source.randint(1, 10))
        for _ in range(12)
    ]
    texts += [Text("repetitive", [1, 2, 3] * 8, prompt_len=6), Text("prose", [1, 2, 3, 4], prompt_len=3)]
    kinds, accepted, reached = [], [], []
    for text in texts:
        length = text.prompt_len + 1
        while length + 4 <= len(text.tokens):
            branches = look_up_reference(text.tokens[:length], depth=4, branches=2, max_match=3)
            ahead = text.tokens[length : length + 4]
            right = 0
            while right < 4 and branches[0].tokens[right] == ahead[right]:
                right += 1
            kinds.append(text.kind)
            accepted.append(right)
            reached.append([branch.tokens[0] == ahead[0] for branch in branches])
            length += right + 1
    steps = replay(texts, depth=4, branches=2, max_match=3)
    assert steps.kinds == kinds
    assert steps.accepted.tolist() == accepted
    assert steps.reached.tolist() == reached
    assert {0, 1, 4} <= set(accepted)


def test_only_tokens_behind_accepted_ones_are_judged():
    fields = [torch.tensor([[[1, 2, 3]], [[4, 5, 6]], [[1, 2, 3]]]) for _ in range(4)]
    steps = Steps(["code"] * 3, Lookup(*fields), torch.tensor([0, 3, 1]), torch.zeros(3, 1, dtype=torch.bool))
    probs, hits = judged(steps, Prior(0.1, 0.9, 1.0, 1.0, 1.0))
    assert hits.tolist() == [False, True, True, True, True, False]
    assert len(probs) == 6 and probs[1] < probs[2] < probs[3]


def test_the_fit_finds_the_prior_that_made_the_data():
    generator = torch.Generator().manual_seed(0)
    truth = Prior(unmatched=0.05, miss_scale=0.8, miss_decay=0.7, weight=3.0, branch_decay=1.2)
    shape = (30000, 2, 1)
    match_lens = torch.randint(0, 9, shape, generator=generator)
    known = torch.randint(0, 6, shape, generator=generator) * (match_lens > 0)
    agreeing = (torch.rand(shape, generator=generator) * (known + 1)).long()
    true_probs = estimate_probs(match_lens, agreeing, known, truth)
    bounds = true_probs[:, :, 0].cumsum(dim=1)
    chance = torch.rand(shape[0], 1, generator=generator)
    reached = (chance < bounds) & (chance >= torch.cat((torch.zeros_like(chance), bounds[:, :1]), dim=1))
    evidence = Lookup(torch.zeros_like(known), match_lens, agreeing, known)
    steps = Steps(["prose"] * shape[0], evidence, reached[:, 0].long(), reached)
    fitted = fit(steps)
    assert log_loss(steps, fitted) <= log_loss(steps, truth)
    assert (estimate_probs(match_lens, agreeing, known, fitted) - true_probs).abs().max() < 0.04
    assert fitted.unmatched == pytest.approx(truth.unmatched, abs=0.015)
    assert fitted.branch_decay == pytest.approx(truth.branch_decay, rel=0.1)
    accepted, expected = ([*column.cells][-1] for column in draw_acceptance(steps, fitted).columns[2:])
    assert float(expected) == pytest.approx(float(accepted), abs=0.02)
