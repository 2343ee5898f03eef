"""What the GPU path changes in SGLang."""

from __future__ import annotations


def make_capture_input(original, runner, num_tokens: int):
    """Around `DecodeCudaGraphRunner.get_spec_info`: TETRIS's target passes are captured ragged, without a mask."""
    model_runner = runner.model_runner
    if model_runner.spec_algorithm.name != "TETRIS" or model_runner.is_draft_worker or not runner.ragged_verify_mode:
        return original(runner, num_tokens)
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode

    from tetris_sglang.runtime.drafts.kind import HEADS, current_kind
    from tetris_sglang.runtime.verify import make_verify_input

    return make_verify_input(
        width=runner.speculative_num_draft_tokens,
        input_ids=None,
        positions=None,
        layout=runner._capture_ragged_verify_layout(num_tokens),
        hidden_mode=CaptureHiddenMode.FULL if current_kind() in HEADS else CaptureHiddenMode.NULL,
    )


def register_attention_backend() -> None:
    """Let `--attention-backend flashinfer` give the target of a TETRIS server the backend with ragged graphs."""
    from sglang.srt.layers.attention import attention_registry

    upstream = attention_registry.ATTENTION_BACKENDS["flashinfer"]

    @attention_registry.register_attention_backend("flashinfer")
    def create(runner):
        if runner.spec_algorithm.name != "TETRIS" or runner.is_draft_worker or runner.use_mla_backend:
            return upstream(runner)
        from sglang.srt.runtime_context import get_spec

        from tetris_sglang.config import TetrisConfig
        from tetris_sglang.runtime.cuda.attention import TetrisFlashInferBackend

        config = TetrisConfig.from_environment(get_spec().speculative_num_steps)
        return TetrisFlashInferBackend(runner, config, init_new_workspace=runner.init_new_workspace)


def verify_landed() -> None:
    """Raise RuntimeError unless the attention backend above is the one that SGLang will use."""
    from sglang.srt.layers.attention import attention_registry

    if attention_registry.ATTENTION_BACKENDS["flashinfer"].__module__ != __name__:
        raise RuntimeError(
            "TETRIS cannot start: another plugin has replaced the attention backend flashinfer. SGLANG_PLUGINS=tetris "
            "loads this plugin alone; --attention-backend fa3 needs no replacement."
        )
