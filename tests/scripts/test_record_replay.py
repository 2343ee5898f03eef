"""The script that records traces: what it drafts at all positions at once is what drafting at each of them gives."""

import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from record_replay import (
    LARGEST_LOGIT,
    SHARPEN,
    Text,
    count_positions,
    draft_by_model,
    draft_by_ngrams,
    find_matches,
)
from transformers import LlamaConfig, LlamaForCausalLM

DEPTH = 3


@pytest.fixture(scope="module")
def draft() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=5,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        # Far from uniform, or every token is as likely as any other.
        initializer_range=0.6,
    )
    return LlamaForCausalLM(config).eval()


def test_all_positions_at_once_are_each_position_alone(draft):
    text = Text("code", torch.randint(5, (24,), generator=torch.Generator().manual_seed(1)).tolist(), 7)
    # Some of the text is what the draft says, so that some drafts are accepted.
    with torch.inference_mode():
        for at in range(10, 24):
            if at % 4:
                text.tokens[at] = int(draft(torch.tensor([text.tokens[:at]])).logits[0, -1].argmax())
    logits, sharp, evidence, accepted = draft_by_model(draft, text, DEPTH)
    assert len(accepted) == count_positions(text, DEPTH) == 24 - DEPTH - 7
    for position in range(len(accepted)):
        known = text.tokens[: text.prompt_len + 1 + position]
        drafted = []
        for level in range(DEPTH):
            with torch.inference_mode():
                row = draft(torch.tensor([known + drafted])).logits[0, -1]
            token = int(row.argmax())
            assert logits[position, level].sigmoid() == pytest.approx(float(row.softmax(0)[token]), abs=1e-4)
            assert sharp[position, level].sigmoid() == pytest.approx(float((row * SHARPEN).softmax(0)[token]), abs=1e-3)
            drafted.append(token)
        assert accepted[position] == count_equal(drafted, text.tokens[len(known) :])
        match_len, stood = look_up(known)
        agrees = [mine == its for mine, its in zip(drafted, stood, strict=True)]
        for level in range(DEPTH):
            follows = match_len > 0 and all(agrees[:level])
            # An odd kind agrees, an even one contradicts.
            assert (evidence[position, level] > 0) == follows
            assert not follows or (evidence[position, level] % 2 == 1) == agrees[level]
    assert {0, DEPTH} <= set(accepted.tolist())


def test_ngrams_draft_from_what_was_known_then():
    text = Text("code", [1, 2, 3, 4] * 4 + [5, 1, 2, 3, 4, 1], 5)
    ((logits, accepted),) = draft_by_ngrams([text, Text("code", [1, 2, 3], 2)], DEPTH)
    for position in range(len(accepted)):
        known = text.tokens[: text.prompt_len + 1 + position]
        match_len, stood = look_up(known)
        assert accepted[position] == count_equal(stood, text.tokens[len(known) :])
        assert (logits[position] > -LARGEST_LOGIT).tolist() == [match_len > 0] * DEPTH
    assert logits.shape == (len(accepted), DEPTH)


def look_up(known: list[int]) -> tuple[int, list[int]]:
    """Of a text that is known so far: tokens that the match shares with its end, and what followed there."""
    found = find_matches(Text("code", known + [0] * DEPTH, len(known) - 1), DEPTH)
    return int(found.match_lens), found.tokens[0].tolist()


def count_equal(drafted: list[int], ahead: list[int]) -> int:
    count = 0
    while count < len(drafted) and drafted[count] == ahead[count]:
        count += 1
    return count
