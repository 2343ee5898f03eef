"""What the GPU path changes in SGLang."""

from __future__ import annotations

from collections.abc import Iterable

from tetris_sglang.config import TetrisConfig, is_tetris


def _captures_target(runner) -> bool:
    """Whether a graph runner captures the target of a TETRIS server; the draft's inherit what is hooked."""
    return is_tetris(runner.model_runner.spec_algorithm.name) and getattr(runner, "ragged_verify_mode", False)


def make_capture_input(original, runner, num_tokens: int):
    """Around `DecodeCudaGraphRunner.get_spec_info`: TETRIS's target passes are captured ragged, without a mask."""
    if not _captures_target(runner):
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


def make_row_tiers(original, runner) -> list[int]:
    """Around `DecodeCudaGraphRunner._build_ragged_verify_token_buckets`: how many rows TETRIS's captured target passes have.

    Upstream has a tier per captured batch size, of whole chains alone.
    """
    if not _captures_target(runner):
        return original(runner)
    return row_tiers(runner.capture_bs, runner.captured_req_width)


def capture_row_tiers(original, runner, *args, **kwargs):
    """Around `DecodeCudaGraphRunner._capture_one_stream`, which captures batch sizes times the rows of a request."""
    if not _captures_target(runner):
        return original(runner, *args, **kwargs)
    for tier in runner.capture_num_tokens:
        runner._capture_ragged_verify_layout(tier)  # kept; it needs the true width
    batch_sizes, width = runner.capture_bs, runner.captured_req_width
    runner.capture_bs, runner.captured_req_width = runner.capture_num_tokens, 1
    try:
        return original(runner, *args, **kwargs)
    finally:
        runner.capture_bs, runner.captured_req_width = batch_sizes, width


def row_tiers(batch_sizes: Iterable[int], width: int) -> list[int]:
    """Ascending: every batch size, for a step that verifies no draft, up to whole chains of the largest, with no wide gaps.

    Args:
        batch_sizes: those captured. width: rows of a request at most, the root's included.
    Example: row_tiers([1, 2, 4], 7) -> [1, 2, 4, 12, 20, 28]
    """
    sizes = {*batch_sizes}
    tiers: list[int] = []
    for rows in sorted(sizes | {max(sizes) * width}):
        # At most an eighth of a pass is padding, or seven rows.
        while tiers and rows > (following := max(tiers[-1] + 8, tiers[-1] * 9 // 64 * 8)):
            tiers.append(following)
        tiers.append(rows)
    return tiers


def register_attention_backend() -> None:
    """Let `--attention-backend flashinfer` give the target of a TETRIS server the backend with ragged graphs."""
    from sglang.srt.layers.attention import attention_registry

    upstream = attention_registry.ATTENTION_BACKENDS["flashinfer"]

    @attention_registry.register_attention_backend("flashinfer")
    def create(runner):
        if not is_tetris(runner.spec_algorithm.name) or runner.is_draft_worker or runner.use_mla_backend:
            return upstream(runner)
        from sglang.srt.runtime_context import get_spec

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
