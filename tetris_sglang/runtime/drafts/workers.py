"""SGLang's draft workers, bare: they own the model, its KV pool (slots shared with the target) and its attention backends."""

from __future__ import annotations

import logging

from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker
from sglang.srt.speculative.standalone_worker_v2 import StandaloneDraftWorker
from sglang.srt.utils.hf_transformers_utils import get_tokenizer

from tetris_sglang.drafting.vocabulary import MIN_SHARED, VocabularyMap, describe_share, match_vocabularies

logger = logging.getLogger(__name__)


class _BareWorker:
    """Without what SGLang drafts with."""

    def init_attention_backend(self) -> None:
        super().init_attention_backend()
        backend = self.draft_runner.attn_backend
        if hasattr(backend, "use_paged"):
            # FlashInfer would read a pass's own keys from its rows, those that are not real included, instead of the cache.
            backend.use_paged = True

    def _rebuild_topk1_chain_buffers(self) -> None:
        """What SGLang builds its own chains from, and why it wants no more than num_steps + 1 tokens in one."""

    def _capture_cuda_graphs(self) -> None:
        """One graph for all passes of a step (runtime/cuda/draft_graph.py) takes the place of SGLang's two."""
        self.cuda_graph_runner = self.cuda_graph_runner_for_draft_extend = None


class StandaloneModelWorker(_BareWorker, StandaloneDraftWorker):
    """A language model of its own."""


class HeadWorker(_BareWorker, EagleDraftWorker):
    """EAGLE, EAGLE3 and multi-token prediction: embedding (and output layer) of the target, and its hidden states."""


def find_vocabulary(server_args, target_tokenizer, target_size: int, draft_size: int) -> VocabularyMap | None:
    """How a standalone draft reads and writes the target's tokens; None where the two have one vocabulary.

    Args:
        target_tokenizer: None: not loaded. target_size, draft_size: rows of the models' vocabularies.
    Raises:
        ValueError: they have too few tokens in common, or no tokenizers to find out.
    """
    path = server_args.speculative_draft_model_path
    try:
        tokenizer = get_tokenizer(
            path,
            trust_remote_code=server_args.trust_remote_code,
            tokenizer_revision=server_args.speculative_draft_model_revision,
        )
    except Exception as error:  # whatever transformers raises where a folder has none
        tokenizer, reason = None, f"no tokenizer could be loaded ({error})"
    if target_tokenizer is None:
        tokenizer, reason = None, "--skip-tokenizer-init was given"
    if tokenizer is None:
        if target_size == draft_size:
            logger.warning("TETRIS: the draft's tokens are taken to be the target's: %s", reason)
            return None
        raise ValueError(
            f"--speculative-draft-model-path {path}: its vocabulary has {draft_size} tokens, the target's {target_size}, and "
            f"which they share is not known: {reason}. Give both their tokenizers, or choose a draft with the target's."
        )
    vocabulary = match_vocabularies(target_tokenizer, target_size, tokenizer, draft_size)
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
