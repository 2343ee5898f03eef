"""A draft whose vocabulary is not the target's: it reads and offers the tokens that both have.

A draft is kept iff it is the target's own draw, so what the draft cannot offer costs acceptance and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

MIN_SHARED = 0.25
"""Of the smaller vocabulary, below which nearly nothing of a text could be drafted."""
_SPACE = "\u2581"
"""SentencePiece's."""


class VocabularyMap(NamedTuple):
    """Between the tokens of a target and of a draft."""

    read: Tensor
    """[target's vocabulary] int64, what the draft reads in a token's place."""
    target_tokens: Tensor
    """[shared] int64, ascending: the tokens that the draft can offer."""
    draft_tokens: Tensor
    """[shared] int64, the same in the draft's vocabulary."""

    def to(self, device: torch.device | str) -> VocabularyMap:
        return VocabularyMap(*(tensor.to(device) for tensor in self))


def match_vocabularies(target_tokenizer: Any, target_size: int, draft_tokenizer: Any, draft_size: int) -> VocabularyMap | None:
    """Match tokens by the bytes that they stand for, special ones by name; beginning and end of text by role.

    A token that the draft lacks is read as the longest of the draft's that it ends with.

    Args:
        target_tokenizer, draft_tokenizer: transformers' own.
        target_size, draft_size: rows of the models' vocabularies, which may be padded.
    Returns:
        None where the two are one vocabulary.
    """
    if target_tokenizer.get_vocab() == draft_tokenizer.get_vocab():
        if target_size == draft_size:
            return None
        known = torch.arange(min(target_size, draft_size))  # the rest is padding
        return VocabularyMap(torch.arange(target_size).where(torch.arange(target_size) < len(known), 0), known, known)
    target, draft = _token_bytes(target_tokenizer, target_size), _token_bytes(draft_tokenizer, draft_size)
    ids: dict[bytes, int] = {}
    for token_id, text in enumerate(draft):
        if text is not None:
            ids.setdefault(text, token_id)
    shared = {token_id: ids[text] for token_id, text in enumerate(target) if text is not None and text in ids}
    for role in ("bos_token_id", "eos_token_id"):
        theirs, ours = getattr(target_tokenizer, role, None), getattr(draft_tokenizer, role, None)
        if isinstance(theirs, int) and isinstance(ours, int):
            shared[theirs] = ours
    read = []
    for token_id, text in enumerate(target):
        suffixes = [text[start:] for start in range(len(text))] if text else []
        read.append(shared.get(token_id, next((ids[suffix] for suffix in suffixes if suffix in ids), 0)))
    kept = sorted(shared)
    return VocabularyMap(torch.tensor(read), torch.tensor(kept), torch.tensor([shared[token_id] for token_id in kept]))


def describe_share(vocabulary: VocabularyMap, draft_size: int) -> tuple[float, str]:
    """What share of the smaller vocabulary both have, and the same in words."""
    target_size, num_shared = len(vocabulary.read), len(vocabulary.target_tokens)
    share = num_shared / min(target_size, draft_size)
    return share, f"{num_shared} of the target's {target_size} tokens are among the draft's {draft_size}"


def _token_bytes(tokenizer: Any, size: int) -> list[bytes | None]:
    """What each token id below `size` stands for; None for those without a token."""
    from tokenizers.pre_tokenizers import ByteLevel

    found: list[bytes | None] = [None] * size
    is_byte_level = "ByteLevel" in repr(getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None))
    added = {str(token) for token in getattr(tokenizer, "added_tokens_decoder", {}).values()}
    alphabet = _byte_alphabet(ByteLevel.alphabet()) if is_byte_level else {}
    for token, token_id in tokenizer.get_vocab().items():
        if token_id >= size:
            continue
        if isinstance(token, bytes):
            found[token_id] = token
        elif token in added:
            found[token_id] = token.encode()
        elif is_byte_level and all(char in alphabet for char in token):
            found[token_id] = bytes(alphabet[char] for char in token)
        elif len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            found[token_id] = bytes([int(token[3:5], 16)])
        else:
            found[token_id] = token.replace(_SPACE, " ").encode()
    return found


def _byte_alphabet(chars: Sequence[str]) -> dict[str, int]:
    """The byte behind each character of a byte-level vocabulary: printable ones of Latin-1 stand for themselves, those
    beyond it, in order, for the others."""
    themselves = {char: ord(char) for char in chars if ord(char) < 256}
    others = sorted(set(range(256)) - set(themselves.values()))
    return themselves | dict(zip(sorted(char for char in chars if ord(char) >= 256), others, strict=True))
