"""Whether a standalone draft can read and write the target's tokens."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from tests.other_vocabulary import NUM_MISSING, PADDING, make_other_vocabulary
from tetris_sglang.portable_cpu.activate import activate

activate()  # as SGLang does, before its modules are imported
from tetris_sglang.runtime.drafts.tokenizers import find_vocabulary

DRAFT = Path(__file__).parents[2] / "pair" / "draft"
SIZE = 2048


def arguments(path: Path, skip_tokenizer_init: bool = False) -> SimpleNamespace:
    """As far as this reads SGLang's."""
    return SimpleNamespace(
        model_path=str(DRAFT),
        tokenizer_path=None,
        revision=None,
        speculative_draft_model_path=str(path),
        speculative_draft_model_revision=None,
        skip_tokenizer_init=skip_tokenizer_init,
        trust_remote_code=False,
    )


def test_its_own_vocabulary_is_mapped(tmp_path):
    other = make_other_vocabulary(DRAFT, tmp_path / "other")
    assert find_vocabulary(arguments(DRAFT), SIZE, SIZE) is None
    found = find_vocabulary(arguments(other), SIZE, SIZE + PADDING)
    assert len(found.target_tokens) == SIZE - NUM_MISSING


def test_too_little_in_common(tmp_path):
    words = {f"word{i}": i for i in range(300)}
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, "word0"))).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=rf"{tmp_path}: 0 of the target's 2048 tokens.*25%.*Choose a draft"):
        find_vocabulary(arguments(tmp_path), SIZE, 300)


@pytest.mark.parametrize("skipped", [False, True])
def test_without_tokenizers_only_equal_sizes_are_taken_for_equal(tmp_path, skipped, caplog):
    path = DRAFT if skipped else tmp_path
    reason = "--skip-tokenizer-init" if skipped else "no tokenizers could be compared"
    assert find_vocabulary(arguments(path, skipped), SIZE, SIZE) is None
    assert reason in caplog.text
    with pytest.raises(ValueError, match=rf"{path}: its vocabulary has 2100 tokens, the target's 2048.*{reason}"):
        find_vocabulary(arguments(path, skipped), SIZE, 2100)
