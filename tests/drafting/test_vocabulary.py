"""Which tokens two vocabularies share, whatever they look like in either."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tests.other_vocabulary import NUM_MISSING, PADDING, make_other_vocabulary
from tetris_sglang.drafting.vocabulary import describe_share, match_vocabularies

DRAFT = Path(__file__).parents[1] / "pair" / "draft"


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(DRAFT)


def test_one_vocabulary_needs_no_map(tokenizer):
    size = len(tokenizer)
    assert match_vocabularies(tokenizer, size, tokenizer, size) is None


@pytest.mark.parametrize("target_size, draft_size", [(2048, 2112), (2112, 2048)])
def test_padded_rows_are_nobodys(tokenizer, target_size, draft_size):
    found = match_vocabularies(tokenizer, target_size, tokenizer, draft_size)
    assert found.target_tokens.tolist() == found.draft_tokens.tolist() == list(range(2048))
    assert found.read.tolist() == list(range(2048)) + [0] * (target_size - 2048)


def test_tokens_are_matched_by_what_they_stand_for(tokenizer, tmp_path):
    other = AutoTokenizer.from_pretrained(make_other_vocabulary(DRAFT, tmp_path / "other"))
    size = len(tokenizer)
    found = match_vocabularies(tokenizer, size, other, size + PADDING)
    shared = found.target_tokens.tolist()
    assert shared == sorted(set(shared)) and len(shared) == size - NUM_MISSING
    assert tokenizer.convert_ids_to_tokens(shared) == other.convert_ids_to_tokens(found.draft_tokens.tolist())
    torch.testing.assert_close(found.read[found.target_tokens], found.draft_tokens)
    for token_id in set(range(size)) - set(shared):
        unit = tokenizer.convert_ids_to_tokens(token_id)
        read = other.convert_ids_to_tokens(int(found.read[token_id]))
        known = [unit[start:] for start in range(1, len(unit)) if unit[start:] in other.get_vocab()]
        assert read == known[0]
    assert describe_share(found, size + PADDING)[0] == len(shared) / size


def test_spaces_and_bytes_of_unlike_families():
    """SentencePiece's and byte-level vocabularies write them in their own ways."""
    pieces = ["<s>", "</s>", "<0x0A>", "\u2581the", "the", "\u00e9", "\u2581caf\u00e9", "\u2581ins"]
    units = ["<|end|>", "\u010a", "\u0120the", "the", "\u00c3\u00a9", "\u0120caf\u00c3\u00a9", "\u00c3", "\u0120in", "s"]
    target = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[]))
    target.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    draft = Tokenizer(models.BPE(vocab={unit: i for i, unit in enumerate(units)}, merges=[]))
    draft.decoder = decoders.ByteLevel()
    found = match_vocabularies(
        PreTrainedTokenizerFast(tokenizer_object=target, bos_token="<s>", eos_token="</s>"),
        len(pieces),
        PreTrainedTokenizerFast(tokenizer_object=draft, eos_token="<|end|>"),
        len(units),
    )
    pairs = {pieces[t]: units[d] for t, d in zip(found.target_tokens.tolist(), found.draft_tokens.tolist(), strict=True)}
    assert pairs == {
        "</s>": "<|end|>",
        "<0x0A>": "\u010a",
        "\u2581the": "\u0120the",
        "the": "the",
        "\u00e9": "\u00c3\u00a9",
        "\u2581caf\u00e9": "\u0120caf\u00c3\u00a9",
    }
