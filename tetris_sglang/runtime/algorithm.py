"""TETRIS as SGLang's registry of speculative algorithms sees it."""

from __future__ import annotations

from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view
from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo, get_spec

from tetris_sglang.config import ALGORITHM, is_tetris
from tetris_sglang.runtime.arguments import ATTENTION_BACKENDS, resolve_server_args, validate_server_args
from tetris_sglang.runtime.drafts.kind import HEADS, NGRAM, OF_LAYERS, current_kind
from tetris_sglang.runtime.inventory import verify_landed


class TetrisAlgorithm(CustomSpecAlgo):
    """Answers SGLang's questions as the built-in algorithm with the same kind of draft does.

    N-grams count as STANDALONE without a draft model: SGLang's NGRAM is another worker with another relay.

    `need_topk`, `carries_draft_hidden_states` and `create_future_map` are missing from CustomSpecAlgo in 0.5.23 although
    the scheduler calls them (patches/README.md).
    """

    def is_standalone(self) -> bool:
        return not self.is_eagle()

    def is_eagle(self) -> bool:
        return current_kind() in HEADS

    def is_eagle3(self) -> bool:
        return current_kind() in OF_LAYERS

    def has_draft_kv(self) -> bool:
        return current_kind() != NGRAM

    def need_topk(self) -> bool:
        return True

    def carries_draft_hidden_states(self) -> bool:
        return False  # they stay by slot (runtime/drafts/model.py)

    def supports_grammar_overlap(self) -> bool:
        return True

    def supports_ragged_verify(self) -> bool:
        return True

    def create_future_map(self, *args, **kwargs):
        return SpeculativeAlgorithm.create_future_map(self, *args, **kwargs)

    def handle_server_args(self, server_args) -> None:
        # Here for the process that parses arguments and validates requests; the worker checks the scheduler's.
        verify_landed()
        resolve_server_args(server_args)


def register_algorithm() -> None:
    """Register TETRIS; a second call does nothing."""
    if get_spec(ALGORITHM) is not None:
        return
    register_resolution_hook("handle_attention_backend_compatibility")(_choose_attention_backend)
    register_resolution_hook("handle_speculative_decoding")(_validate_first)

    @SpeculativeAlgorithm.register(ALGORITHM, supports_overlap=True, spec_class=TetrisAlgorithm)
    def _worker_class(server_args):
        from tetris_sglang.runtime.worker import TetrisWorker

        return TetrisWorker


def _choose_attention_backend(server_args, previous) -> None:
    """Around SGLang's resolution step, which fills in a backend by model and device; TETRIS has its own preference."""
    arguments = resolving_view(server_args)
    if is_tetris(arguments.speculative_algorithm) and arguments.device == "cuda" and arguments.attention_backend is None:
        declare_resolution(server_args, __name__, attention_backend=ATTENTION_BACKENDS["cuda"][0])
    previous(server_args)


def _validate_first(server_args, previous) -> None:
    """Around SGLang's resolution step: the registry's `validate_server_args` comes after the draft's config is loaded,
    which ends on a wrong path without naming the flag."""
    arguments = resolving_view(server_args)
    if is_tetris(arguments.speculative_algorithm):
        validate_server_args(arguments)
    previous(server_args)
