"""What a draft is trained on, against plain sums and draws."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tetris_sglang.acceptance.noise import exponentials
from tetris_sglang.tools.distill.divergence import DIVERGENCES, agreement_on, disagreement, total_variation


def random_laws(rows: int, tokens: int, seed: int, sharpness: float = 2.0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    p, q = ((sharpness * torch.randn(rows, tokens, generator=generator)).softmax(-1) for _ in range(2))
    return p, q


PLAIN = {
    "forward-kl": lambda p, q: sum(a * math.log(a / b) for a, b in zip(p, q, strict=True)),
    "reverse-kl": lambda p, q: sum(b * math.log(b / a) for a, b in zip(p, q, strict=True)),
    "jensen-shannon": lambda p, q: sum(
        a * math.log(2 * a / (a + b)) / 2 + b * math.log(2 * b / (a + b)) / 2 for a, b in zip(p, q, strict=True)
    ),
    "total-variation": lambda p, q: sum(abs(a - b) for a, b in zip(p, q, strict=True)) / 2,
    "disagreement": lambda p, q: 1 - sum(1 / sum(max(p[s] / p[t], q[s] / q[t]) for s in range(len(p))) for t in range(len(p))),
}


@pytest.mark.parametrize("name", DIVERGENCES)
@given(seed=st.integers(0, 10_000), tokens=st.integers(2, 9))
def test_each_is_its_definition(name, seed, tokens):
    p, q = random_laws(3, tokens, seed)
    found = DIVERGENCES[name](p, q.log())
    expected = torch.tensor([PLAIN[name](a.tolist(), b.tolist()) for a, b in zip(p.double(), q.double(), strict=True)])
    torch.testing.assert_close(found, expected.float(), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_equal_laws_are_at_zero_and_steps_downhill_lead_there(name):
    p, q = random_laws(4, 6, seed=1)
    assert DIVERGENCES[name](p, p.log()).abs().max() < 1e-5
    logits = q.log().clone().requires_grad_()
    optimizer = torch.optim.Adam([logits], lr=0.05)
    before = total_variation(p, q.log()).mean()
    for _ in range(300):
        optimizer.zero_grad()
        DIVERGENCES[name](p, logits.log_softmax(-1)).mean().backward()
        optimizer.step()
    assert total_variation(p, logits.log_softmax(-1)).mean() < 0.2 * before


def test_what_a_draft_cannot_say_counts_as_missed():
    """A law over more tokens than the draft has, of which it has the first four."""
    p, q = random_laws(5, 9, seed=2)
    q = torch.cat((q[:, :4] / q[:, :4].sum(-1, keepdim=True), torch.zeros(5, 5)), dim=1)
    for name in ("jensen-shannon", "total-variation", "disagreement"):
        measure = DIVERGENCES[name]
        torch.testing.assert_close(measure(p[:, :4], q[:, :4].log()), measure(p, q.log().clamp(min=-200)), rtol=1e-3, atol=1e-5)


def test_agreement_is_that_of_draws_with_shared_noise():
    p, q = random_laws(1, 5, seed=3)
    draws = 40_000
    rows = torch.arange(draws)
    arrivals = exponentials(torch.full_like(rows, 7), rows, torch.arange(5))
    target, draft = (p / arrivals).argmax(-1), (q / arrivals).argmax(-1)
    agree = (target == draft).double()
    assert abs(agree.mean() - (1 - disagreement(p, q.log()))) < 4 * 0.5 / draws**0.5
    for token in range(5):
        drawn = target == token
        chance = agreement_on(p, q, torch.tensor([token]))
        assert abs(agree[drawn].mean() - chance) < 4 * 0.5 / int(drawn.sum()) ** 0.5
    whole = sum(p[0, token] * agreement_on(p, q, torch.tensor([token])) for token in range(5))
    torch.testing.assert_close(whole, 1 - disagreement(p, q.log()), rtol=1e-4, atol=1e-5)


def test_a_greedy_law_agrees_or_does_not():
    p, q = torch.eye(3)[[0, 1]], torch.tensor([[0.6, 0.3, 0.1], [0.0, 0.0, 1.0]])
    torch.testing.assert_close(agreement_on(p, q, torch.tensor([0, 1])), torch.tensor([0.6, 0.0]))
