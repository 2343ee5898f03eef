"""Requests that TETRIS refuses with a 400, by name.

Also guards two upstream faults that end the scheduler process, with or without speculation: an empty prompt and token
ids outside the vocabulary (patches/README.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tetris_sglang.config import is_tetris
from tetris_sglang.runtime.request_options import parse

# Sampling parameters that would not give what the server gives without speculation.
_INEXACT: dict[str, tuple[Callable[[Any], bool], str]] = {
    name: (lambda value, neutral=neutral: value is not None and value != neutral, reason)
    for name, neutral, reason in (
        ("frequency_penalty", 0.0, "it depends on the tokens drafted before it"),
        ("presence_penalty", 0.0, "it depends on the tokens drafted before it"),
        ("repetition_penalty", 1.0, "it depends on the tokens drafted before it"),
        ("beam_width", 1, "beam search is not speculative"),
    )
}
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


def is_inexact(name: str, value: Any) -> bool:
    """Whether a sampling parameter of this value would not give what the server gives without speculation."""
    return name in _INEXACT and _INEXACT[name][0](value)


def validate_request(
    obj,
    input_ids: Sequence[int] | None,
    vocab_size: int,
    preferred_params: Mapping[str, Any] | None = None,
) -> None:
    """Refuse what cannot be served exactly, and options of TETRIS's own that do not parse.

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
        outside = next((token for token in input_ids if not 0 <= token < vocab_size), None)
        if outside is not None:
            raise ValueError(
                f"input_ids: token id {outside} is outside the vocabulary (0..{vocab_size - 1})."
            )
    params = getattr(obj, "sampling_params", None)
    if isinstance(params, Mapping):
        params = {**(preferred_params or {}), **params}
        for name, (_, reason) in _INEXACT.items():
            if is_inexact(name, params.get(name)):
                raise ValueError(
                    f"{name}={params[name]} is not supported with --speculative-algorithm TETRIS: {reason}. Leave it "
                    f"out, or send the request to a server without speculation."
                )
        parse(params.get("custom_params"))
    for name, reason in _UNSUPPORTED_FIELDS.items():
        if getattr(obj, name, None):
            raise ValueError(f"{name} is not supported with --speculative-algorithm TETRIS: {reason}.")


def guard_request(manager, obj, input_ids, *args, **kwargs) -> None:
    """BEFORE hook of TokenizerManager._validate_one_request."""
    if is_tetris(manager.server_args.speculative_algorithm):
        validate_request(obj, input_ids, manager.model_config.vocab_size, manager.preferred_sampling_params)
