"""What one step hands to the next one's draft: the tokens whose draft KV is missing."""

from __future__ import annotations

from typing import NamedTuple

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.speculative.eagle_info import EagleDraftExtendInput, EagleDraftInput
from torch import Tensor


class Window(NamedTuple):
    """The tokens of a step's first pass, aligned to the right: the last `counts` of a row are real."""

    tokens: Tensor
    """[batch, width] int64, the bonus token last."""
    counts: Tensor | None = None
    """[batch] integers, 1..width; None: all are real."""
    hidden_states: Tensor | None = None
    """[batch, width, hidden_size] the target's state that goes with each token; None: the draft reads none."""


def make_draft_input(window: Window, bonus_tokens: Tensor) -> EagleDraftInput:
    """What one step hands to the next one, in the fields that SGLang's relay carries between iterations.

    Args:
        bonus_tokens: [batch] the last tokens of the windows; SGLang reads them.
    """
    batch = window.tokens.shape[0]
    counts = (
        window.tokens.new_full((batch,), window.tokens.shape[1]) if window.counts is None else window.counts
    )
    hidden_states = window.hidden_states
    return EagleDraftInput(
        topk_p=counts.to(torch.float32).unsqueeze(1),
        topk_index=window.tokens,
        hidden_states=None if hidden_states is None else hidden_states.flatten(1),
        bonus_tokens=bonus_tokens,
        num_tokens_per_req=1,
        num_tokens_for_logprob_per_req=1,
        capture_hidden_mode=CaptureHiddenMode.NULL if hidden_states is None else CaptureHiddenMode.LAST,
    )


def read_window(draft_input: EagleDraftInput) -> Window:
    """The inverse of `make_draft_input`."""
    tokens, hidden_states = draft_input.topk_index, draft_input.hidden_states
    return Window(
        tokens,
        draft_input.topk_p[:, 0].to(torch.int64),
        None if hidden_states is None else hidden_states.unflatten(1, (tokens.shape[1], -1)),
    )


def narrow_window(window: Window) -> Window:
    """The last columns, as many as any request needs. Waits for the counts: for the CPU."""
    width = int(window.counts.max())
    states = window.hidden_states
    return Window(window.tokens[:, -width:], window.counts, None if states is None else states[:, -width:])


def align_right(values: Tensor, counts: Tensor) -> Tensor:
    """Shift each row so that its first `counts` entries stand last; what comes before them is arbitrary.

    Args:
        values: [batch, width, ...]. counts: [batch] integers, 1..width.
    Example: [[1, 2, 0, 0]], [2] -> [[.., .., 1, 2]]
    """
    width = values.shape[1]
    index = torch.arange(width, device=values.device) - (width - counts[:, None])
    rows = torch.arange(values.shape[0], device=values.device)[:, None]
    return values[rows, index.clamp_(min=0)]


def make_window_input(window: Window, positions: Tensor) -> EagleDraftExtendInput:
    """The spec input of the window's pass; logits and hidden states are wanted after the bonus token only.

    Args:
        positions: [batch * width], request after request.
    """
    batch, width = window.tokens.shape
    counts = torch.full((batch,), width, dtype=torch.int32, device=positions.device)
    hidden_states = window.hidden_states
    return EagleDraftExtendInput(
        hidden_states=None if hidden_states is None else hidden_states.flatten(0, 1),
        num_tokens_per_req=width,
        num_tokens_for_logprob_per_req=1,
        positions=positions,
        num_correct_drafts=counts,
        num_accept_tokens=counts,
        select_index=torch.arange(width - 1, batch * width, width, device=positions.device),
        capture_hidden_mode=CaptureHiddenMode.NULL if hidden_states is None else CaptureHiddenMode.LAST,
    )


def advance_window(window: Window, tokens: Tensor, hidden_states: Tensor | None) -> Window:
    """The window after a step that emitted one token per request and drafted nothing: its oldest token leaves it.

    Args:
        tokens: [batch]. hidden_states: [batch, hidden_size] the target's that go with them, if the draft reads them.
    """
    width, counts = window.tokens.shape[1], window.counts
    if hidden_states is not None:
        hidden_states = torch.cat((window.hidden_states[:, 1:], hidden_states[:, None]), dim=1)
    return Window(
        torch.cat((window.tokens[:, 1:], tokens.to(torch.int64)[:, None]), dim=1),
        None if counts is None else (counts + 1).clamp(max=width),
        hidden_states,
    )
