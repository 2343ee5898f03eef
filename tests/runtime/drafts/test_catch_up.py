"""What drafts missed while steps did without them, against plain Python."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch

from tetris_sglang.runtime.drafts import catch_up
from tetris_sglang.runtime.drafts.catch_up import MissedTokens
from tetris_sglang.runtime.drafts.windows import Window, slide_window


def state_of(tokens: torch.Tensor) -> torch.Tensor:
    return torch.stack((tokens, tokens * 2, -tokens), dim=-1).float()


def batch_of(rows: torch.Tensor) -> SimpleNamespace:
    """Of requests in these slots, as far as this reads a ScheduleBatch."""
    return SimpleNamespace(req_pool_indices=rows, req_pool_indices_cpu=rows)


@pytest.mark.parametrize("width", [2, 4, 7])
@pytest.mark.parametrize("seed", range(5))
def test_missed_and_window_together_hold_every_token_once(width, seed):
    """Requests of random ages: what is taken, and the window after it, are the text's last tokens without a gap."""
    rng = random.Random(seed)
    batch, slots = 5, 12
    rows = torch.tensor(rng.sample(range(slots), batch))
    running = batch_of(rows)
    missed = MissedTokens(slots)
    texts = [list(range(100 * r, 100 * r + rng.randint(1, width))) for r in range(batch)]
    tokens = torch.tensor([[0] * (width - len(text)) + text for text in texts])
    window = Window(tokens, torch.tensor([len(text) for text in texts]), state_of(tokens))
    starts, joined = [len(text) for text in texts], batch - 1
    for step in range(7):
        if step == 3:
            # The last request leaves, and another takes its slot, just prefilled.
            missed.forget(batch_of(rows[joined : joined + 1]))
            texts[joined], starts[joined] = [901], 1
            tokens = window.tokens.clone()
            tokens[joined] = torch.tensor([0] * (width - 1) + [901])
            window = Window(tokens, torch.cat((window.counts[:-1], torch.tensor([1]))), state_of(tokens))
        for text in texts:
            text.append(text[-1] + 1)
        emitted = torch.tensor([text[-1] for text in texts])
        assert missed.has_room
        missed.push(running, emitted, state_of(emitted))
        longest = max(len(text) - start for text, start in zip(texts, starts, strict=True))
        assert missed.num_tokens(running) == longest
    assert missed.max_tokens >= longest
    left, window = slide_window(window, missed.take(running))
    assert left.tokens.shape[1] == longest
    for r, text in enumerate(texts):
        count, kept = int(left.counts[r]), int(window.counts[r])
        assert kept == min(width, len(text)) and count == len(text) - kept
        assert left.tokens[r, :count].tolist() + window.tokens[r, width - kept :].tolist() == text
        states = left.hidden_states[r, :count]
        assert torch.equal(states, state_of(torch.tensor(text[:count], dtype=torch.int64)).view(count, 3))
        assert torch.equal(window.hidden_states[r, width - kept :], state_of(torch.tensor(text[count:])))
    assert missed.num_tokens(running) == 0 and missed.max_tokens >= longest
    assert missed.take(running).tokens.shape[1] == 0


def test_full_windows_lose_one_token_each_step():
    """Standalone chains: every window is full, and no counts are kept."""
    missed = MissedTokens(12)
    running, window = batch_of(torch.tensor([3, 1])), Window(torch.tensor([[7, 8], [70, 80]]))
    for token in (9, 10):
        missed.push(running, torch.tensor([token, 10 * token]))
    left, window = slide_window(window, missed.take(running))
    assert left.tokens.tolist() == [[7, 8], [70, 80]]
    assert left.counts.tolist() == [2, 2]
    assert window.tokens.tolist() == [[9, 10], [90, 100]]


def test_its_memory_is_bounded(monkeypatch):
    monkeypatch.setattr(catch_up, "MEMORY_BYTES", 20 * (8 + 12))
    missed = MissedTokens(12, state_bytes=12)
    running = batch_of(torch.tensor([0]))
    for _ in range(20):
        assert missed.has_room
        missed.push(running, torch.tensor([1]), torch.zeros(1, 3))
    assert not missed.has_room
    # A few steps find room whatever they take.
    monkeypatch.setattr(catch_up, "MEMORY_BYTES", 0)
    missed = MissedTokens(12)
    for _ in range(4):
        assert missed.has_room
        missed.push(running, torch.tensor([1]))
    assert not missed.has_room


def test_who_has_just_been_prefilled_misses_nothing():
    """Nor does what ended requests missed make the next steps wider."""
    missed = MissedTokens(12)
    both, first, second = (batch_of(torch.tensor(rows)) for rows in ([2, 5], [2], [5]))
    for token in range(3):
        missed.push(both, torch.tensor([token, 10 * token]))
    missed.forget(second)
    missed.push(both, torch.tensor([3, 70]))
    assert missed.num_tokens(first) == 4 and missed.num_tokens(second) == 1 and missed.max_tokens == 4
    left = missed.take(both)
    assert left.tokens.tolist() == [[0, 1, 2, 3], [70, 0, 0, 0]] and left.counts.tolist() == [4, 1]
    for token in range(2):
        missed.push(first, torch.tensor([token]))
    # The first request has ended, and its slot was given to nobody.
    missed.forget(second)
    assert missed.num_tokens(second) == 0
    missed.push(second, torch.tensor([71]))
    assert missed.num_tokens(second) == 1
    left = missed.take(second)
    assert left.tokens.tolist() == [[71]] and left.counts.tolist() == [1]
