"""TETRIS as SGLang's registry of speculative algorithms sees it."""

from __future__ import annotations

from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo, get_spec

from tetris_sglang.runtime.arguments import resolve_server_args, validate_server_args

NAME = "TETRIS"


class TetrisAlgorithm(CustomSpecAlgo):
    """Answers SGLang's questions as STANDALONE does, since the draft is a standalone model.

    `need_topk`, `carries_draft_hidden_states` and `create_future_map` are missing from CustomSpecAlgo in 0.5.23 although
    the scheduler calls them (patches/README.md).
    """

    def is_standalone(self) -> bool:
        return True

    def need_topk(self) -> bool:
        return True

    def carries_draft_hidden_states(self) -> bool:
        return False

    def supports_grammar_overlap(self) -> bool:
        return True

    def supports_ragged_verify(self) -> bool:
        return True

    def create_future_map(self, *args, **kwargs):
        return SpeculativeAlgorithm.create_future_map(self, *args, **kwargs)

    def handle_server_args(self, server_args) -> None:
        resolve_server_args(server_args)


def register_algorithm() -> None:
    """Register TETRIS; a second call does nothing."""
    if get_spec(NAME) is not None:
        return

    @SpeculativeAlgorithm.register(
        NAME, supports_overlap=True, validate_server_args=validate_server_args, spec_class=TetrisAlgorithm
    )
    def _worker_class(server_args):
        from tetris_sglang.runtime.worker import TetrisWorker

        return TetrisWorker
