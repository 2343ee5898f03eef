"""Which tokens a standalone draft shares with its target, by their tokenizers."""

from __future__ import annotations

import logging

from sglang.srt.utils.hf_transformers_utils import get_tokenizer

from tetris_sglang.drafting.vocabulary import MIN_SHARED, VocabularyMap, describe_share, match_vocabularies

logger = logging.getLogger(__name__)


def find_vocabulary(server_args, target_size: int, draft_size: int) -> VocabularyMap | None:
    """How a standalone draft reads and writes the target's tokens; None where the two have one vocabulary.

    Args:
        target_size, draft_size: rows of the models' vocabularies.
    Raises:
        ValueError: they have too few tokens in common, or no tokenizers to find out.
    """
    path = server_args.speculative_draft_model_path
    try:
        if server_args.skip_tokenizer_init:
            raise ValueError("--skip-tokenizer-init was given")
        target = _load(server_args, server_args.tokenizer_path or server_args.model_path, server_args.revision)
        draft = _load(server_args, path, server_args.speculative_draft_model_revision)
    except Exception as error:  # whatever transformers raises where a folder has none
        reason = f"no tokenizers could be compared ({' '.join(str(error).split())})"
        if target_size == draft_size:
            logger.warning("TETRIS: the draft's tokens are taken to be the target's: %s", reason)
            return None
        raise ValueError(
            f"--speculative-draft-model-path {path}: its vocabulary has {draft_size} tokens, the target's {target_size}, and "
            f"which they share is not known: {reason}. Give both their tokenizers, or choose a draft with the target's."
        ) from error
    vocabulary = match_vocabularies(target, target_size, draft, draft_size)
    if vocabulary is None:
        return None
    share, described = describe_share(vocabulary, draft_size)
    if share < MIN_SHARED:
        raise ValueError(
            f"--speculative-draft-model-path {path}: {described}, fewer than {MIN_SHARED:.0%} of the smaller vocabulary. "
            f"Choose a draft whose tokenizer is closer to the target's."
        )
    logger.info("TETRIS: the draft has a vocabulary of its own; %s", described)
    return vocabulary


def _load(server_args, path: str, revision: str | None):
    return get_tokenizer(path, trust_remote_code=server_args.trust_remote_code, tokenizer_revision=revision)
