"""What one step hands to the next one's draft: the tokens whose draft KV is missing."""

from __future__ import annotations

from typing import NamedTuple

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.speculative.eagle_info import EagleDraftExtendInput, EagleDraftInput
from torch import Tensor


class Window(NamedTuple):
    """Tokens and what goes with them. A step's first pass takes them aligned to the right: the last `counts` of a row are
    real, the bonus token is the last."""

    tokens: Tensor
    """[batch, width] int64."""
    counts: Tensor | None = None
    """[batch] integers, 0..width; None: all are real."""
    hidden_states: Tensor | None = None
    """[batch, width, hidden_size] the target's state that goes with each token; None: the draft reads none."""


def make_draft_input(window: Window, bonus_tokens: Tensor) -> EagleDraftInput:
    """What one step hands to the next one, without states: they are large, and SGLang would copy them with every change of the
    batch.

    Args:
        bonus_tokens: [batch] the last tokens of the texts; SGLang reads them.
    """
    batch = window.tokens.shape[0]
    counts = window.tokens.new_full((batch,), window.tokens.shape[1]) if window.counts is None else window.counts
    return relay_window(window.tokens, counts.to(torch.float32).unsqueeze(1), bonus_tokens)


def replace_bonus(draft_input: EagleDraftInput, bonus_tokens: Tensor) -> EagleDraftInput:
    """After a step without the draft: the window stays, and `MissedTokens` has what comes behind it."""
    return relay_window(draft_input.topk_index, draft_input.topk_p, bonus_tokens)


def relay_window(tokens: Tensor, counts: Tensor, bonus_tokens: Tensor) -> EagleDraftInput:
    """A window in the fields that SGLang's relay carries between iterations.

    Args:
        counts: [batch, 1] float32.
    """
    return EagleDraftInput(
        topk_p=counts,
        topk_index=tokens,
        hidden_states=None,
        bonus_tokens=bonus_tokens,
        num_tokens_per_req=1,
        num_tokens_for_logprob_per_req=1,
        capture_hidden_mode=CaptureHiddenMode.NULL,
    )


def read_window(draft_input: EagleDraftInput) -> Window:
    """The window of `make_draft_input`, without states."""
    return Window(draft_input.topk_index, draft_input.topk_p[:, 0].to(torch.int64))


def narrow_window(window: Window) -> Window:
    """The last columns, as many as any request needs. Waits for the counts: for the CPU."""
    width = int(window.counts.max())
    states = window.hidden_states
    return Window(window.tokens[:, -width:], window.counts, None if states is None else states[:, -width:])


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


def slide_window(window: Window, emitted: Window) -> tuple[Window, Window]:
    """The window after steps in which the draft did not run: as many tokens leave it as it has no room for.

    Args:
        emitted: what those steps emitted, aligned to the left.
    Returns:
        What has left the window, aligned to the left, as wide as `emitted`; and the window. Both have counts.
    Example: window [[7, 8]], emitted [[9, 4, 0]], counts [2] -> [[7, 8, ..]], counts [2]; [[9, 4]]
    """
    width = window.tokens.shape[1]
    both = Window(
        torch.cat((window.tokens, emitted.tokens), dim=1),
        None,
        None if window.hidden_states is None else torch.cat((window.hidden_states, emitted.hidden_states), dim=1),
    )
    total = emitted.counts + (width if window.counts is None else window.counts)
    columns = torch.arange(both.tokens.shape[1], device=total.device)
    first_real = (width + emitted.counts - total)[:, None]
    left = _take_columns(both, first_real + columns[: emitted.tokens.shape[1]], (total - width).clamp(min=0))
    kept = _take_columns(both, emitted.counts[:, None] + columns[:width], total.clamp(max=width))
    return left, kept


def _take_columns(window: Window, columns: Tensor, counts: Tensor) -> Window:
    """Args: columns: [batch, n] integers; beyond the last one stands for the last one."""
    tokens, states = window.tokens, window.hidden_states
    columns = columns.long().clamp_(max=tokens.shape[1] - 1)
    rows = torch.arange(len(tokens), device=tokens.device)[:, None]
    return Window(tokens.gather(1, columns), counts, None if states is None else states[rows, columns])
