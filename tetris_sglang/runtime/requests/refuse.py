"""Requests that TETRIS refuses with a 400, by name.

Also guards upstream faults that end the scheduler process, with or without speculation: an empty prompt, and token ids
outside the vocabulary, in the prompt or among the stop tokens (patches/README.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tetris_sglang.config import is_tetris
from tetris_sglang.runtime.requests.options import parse

_UNSUPPORTED_FIELDS = {
    "lora_path": "LoRA adapters are not supported",
    "custom_logit_processor": "custom logit processors are not told about drafted tokens",
    "return_hidden_states": "hidden states are not kept in a ragged verify pass",
    "input_embeds": "the draft model has no embeddings of its own for them",
    "positional_embed_overrides": "the draft model has no embeddings of its own for them",
    "image_data": "multimodal inputs are not drafted for",
    "video_data": "multimodal inputs are not drafted for",
    "audio_data": "multimodal inputs are not drafted for",
    "return_sampling_mask": "sampling masks are not kept in a ragged verify pass",
}


def validate_request(
    obj,
    input_ids: Sequence[int] | None,
    vocab_size: int,
    preferred_params: Mapping[str, Any] | None = None,
) -> None:
    """Refuse what is not supported, and options of TETRIS's own that do not parse.

    Args:
        obj: SGLang's GenerateReqInput of one request; sampling_params still a mapping.
        input_ids: the tokenized prompt.
        preferred_params: sampling parameters of requests that do not give them (--preferred-sampling-params).
    Raises:
        ValueError: SGLang answers it with a 400.
    """
    if input_ids is not None:
        # A session's turn may add nothing.
        if len(input_ids) == 0 and getattr(obj, "session_params", None) is None:
            raise ValueError("The prompt is empty: give at least one token.")
        _require_known(input_ids, "input_ids", vocab_size)
    params = getattr(obj, "sampling_params", None)
    if isinstance(params, Mapping):
        params = {**(preferred_params or {}), **params}
        if params.get("beam_width") not in (None, 1):
            raise ValueError(
                f"beam_width={params['beam_width']} is not supported with --speculative-algorithm TETRIS: beam search is not "
                f"speculative. Leave it out, or send the request to a server without speculation."
            )
        # As SGLang reads them later. Also without min_new_tokens: beside a request that has it, SGLang looks at everybody's.
        stop_token_ids = [int(token_id) for token_id in params.get("stop_token_ids") or () if token_id is not None]
        _require_known(stop_token_ids, "stop_token_ids", vocab_size)
        parse(params.get("custom_params"))
    for name, reason in _UNSUPPORTED_FIELDS.items():
        if getattr(obj, name, None):
            raise ValueError(
                f"{name} is not supported with --speculative-algorithm TETRIS: {reason}. Leave it out, or send the request to "
                f"a server without speculation."
            )


def _require_known(token_ids: Sequence[int], name: str, vocab_size: int) -> None:
    outside = next((token_id for token_id in token_ids if not 0 <= token_id < vocab_size), None)
    if outside is not None:
        raise ValueError(f"{name}: token id {outside} is outside the vocabulary (0..{vocab_size - 1}).")


def guard_request(manager, obj, input_ids, *args, **kwargs) -> None:
    """BEFORE hook of TokenizerManager._validate_one_request."""
    if is_tetris(manager.server_args.speculative_algorithm):
        validate_request(obj, input_ids, manager.model_config.vocab_size, manager.preferred_sampling_params)
