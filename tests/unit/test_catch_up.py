"""What drafts miss in plain steps, against bookkeeping by hand; and the clock that times steps."""

from __future__ import annotations

import random

import pytest
import torch

from tetris_sglang.capacity import StepShape
from tetris_sglang.runtime import catch_up, step_clock
from tetris_sglang.runtime.catch_up import MissedTokens
from tetris_sglang.runtime.step_clock import StepClock, TimedStep
from tetris_sglang.runtime.windows import Window, advance_window


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("seed", range(5))
def test_missed_and_window_together_hold_every_token_once(width, seed):
    """Requests of random ages: what is taken, and the window after it, are the text's last tokens without a gap."""
    rng = random.Random(seed)
    batch, slots = 5, 12
    rows = torch.tensor(rng.sample(range(slots), batch))
    missed = MissedTokens(slots, hidden_size=3, dtype=torch.float32, device="cpu")
    texts = [list(range(100 * r, 100 * r + rng.randint(1, width))) for r in range(batch)]
    counts = [len(text) for text in texts]

    def state_of(tokens: torch.Tensor) -> torch.Tensor:
        return torch.stack((tokens, tokens * 2, -tokens), dim=-1).float()

    tokens = torch.tensor([[0] * (width - len(text)) + text for text in texts])
    window = Window(tokens, torch.tensor(counts), state_of(tokens))
    joined = batch - 1
    for step in range(7):
        if step == 3:
            # The last request leaves, and another takes its slot, just prefilled.
            missed.forget_rows(rows[joined : joined + 1])
            texts[joined] = [901]
            tokens = window.tokens.clone()
            tokens[joined] = torch.tensor([0] * (width - 1) + [901])
            window = Window(tokens, torch.cat((window.counts[:-1], torch.tensor([1]))), state_of(tokens))
        missed.push(rows, window)
        emitted = torch.tensor([text[-1] + 1 for text in texts])
        for text, token in zip(texts, emitted.tolist(), strict=True):
            text.append(token)
        window = advance_window(window, emitted, state_of(emitted))
    assert missed.num_steps == missed.most_steps == 7
    taken = missed.take(rows)
    for r, text in enumerate(texts):
        count, kept = int(taken.counts[r]), int(window.counts[r])
        assert kept == min(width, len(text)) and count == len(text) - kept
        together = (
            taken.tokens[r, taken.tokens.shape[1] - count :].tolist()
            + window.tokens[r, width - kept :].tolist()
        )
        assert together == text
        states = taken.hidden_states[r, taken.tokens.shape[1] - count :]
        assert torch.equal(states, state_of(torch.tensor(text[:count], dtype=torch.int64)).view(count, 3))
    assert missed.num_steps == 0 and not missed.is_full
    assert missed.take(rows).tokens.shape[1] == 0


def test_full_windows_lose_one_token_each_step():
    """Standalone chains: every window is full, and no counts are kept."""
    missed = MissedTokens(4, hidden_size=None, dtype=torch.float32, device="cpu")
    rows, window = torch.tensor([3, 1]), Window(torch.tensor([[7, 8], [70, 80]]))
    for token in (9, 10):
        missed.push(rows, window)
        window = advance_window(window, torch.tensor([token, 10 * token]), None)
    taken = missed.take(rows)
    assert taken.tokens.tolist() == [[7, 8], [70, 80]]
    assert taken.counts.tolist() == [2, 2]
    assert window.tokens.tolist() == [[9, 10], [90, 100]]


def test_its_memory_is_bounded(monkeypatch):
    monkeypatch.setattr(catch_up, "MEMORY_BYTES", 64 * 20 * (4 + 8 * 4))
    missed = MissedTokens(64, hidden_size=8, dtype=torch.float32, device="cpu")
    rows, window = torch.tensor([0]), Window(torch.tensor([[1, 2]]), None, torch.zeros(1, 2, 8))
    for _ in range(20):
        assert not missed.is_full
        missed.push(rows, window)
    assert missed.is_full


def test_only_steps_between_steps_are_timed(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(step_clock.time, "perf_counter", lambda: now[0])
    clock, shapes = StepClock(on_cuda=False), [StepShape(1, 0, rows) for rows in range(1, 8)]

    def step(shape: StepShape, seconds: float) -> list[TimedStep]:
        finished = clock.begin()
        clock.describe(shape)
        now[0] += seconds
        return finished

    assert step(shapes[0], 1.0) == []
    # The first one after something else is not counted.
    assert step(shapes[1], 2.0) == []
    assert step(shapes[2], 3.0) == [TimedStep(shapes[1], 2.0)]
    clock.interrupt()
    now[0] += 50.0
    assert step(shapes[3], 4.0) == []
    assert step(shapes[4], 5.0) == []
    assert step(shapes[5], 6.0) == [TimedStep(shapes[4], 5.0)]
