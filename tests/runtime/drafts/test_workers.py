"""Whether a standalone draft can read and write the target's tokens."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tests.other_vocabulary import NUM_MISSING, PADDING, make_other_vocabulary
from tetris_sglang.portable_cpu.activate import activate

activate()  # as SGLang does, before its modules are imported
from tetris_sglang.runtime.drafts.workers import find_vocabulary

DRAFT = Path(__file__).parents[2] / "pair" / "draft"
SIZE = 2048


@pytest.fixture(scope="module")
def target():
    return AutoTokenizer.from_pretrained(DRAFT)


def arguments(path: Path) -> SimpleNamespace:
    """As far as this reads SGLang's."""
    return SimpleNamespace(
        speculative_draft_model_path=str(path), speculative_draft_model_revision=None, trust_remote_code=False
    )


def test_its_own_vocabulary_is_mapped(target, tmp_path):
    other = make_other_vocabulary(DRAFT, tmp_path / "other")
    assert find_vocabulary(arguments(DRAFT), target, SIZE, SIZE) is None
    found = find_vocabulary(arguments(other), target, SIZE, SIZE + PADDING)
    assert len(found.target_tokens) == SIZE - NUM_MISSING


def test_too_little_in_common(target, tmp_path):
    words = {f"word{i}": i for i in range(300)}
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, "word0"))).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=rf"{tmp_path}: 0 of the target's 2048 tokens.*25%.*Choose a draft"):
        find_vocabulary(arguments(tmp_path), target, SIZE, 300)


@pytest.mark.parametrize("skipped", [False, True])
def test_without_tokenizers_only_equal_sizes_are_taken_for_equal(target, tmp_path, skipped, caplog):
    path, tokenizer = (DRAFT, None) if skipped else (tmp_path, target)
    reason = "--skip-tokenizer-init" if skipped else "no tokenizer could be loaded"
    assert find_vocabulary(arguments(path), tokenizer, SIZE, SIZE) is None
    assert reason in caplog.text
    with pytest.raises(ValueError, match=rf"{path}: its vocabulary has 2100 tokens, the target's 2048.*{reason}"):
        find_vocabulary(arguments(path), tokenizer, SIZE, 2100)
