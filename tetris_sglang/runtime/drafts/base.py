"""What a step asks of whatever drafts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.speculative.eagle_info import EagleDraftInput
from torch import Tensor

from tetris_sglang.drafting import Proposal
from tetris_sglang.observers import StepRecord


class Draft(Protocol):
    """A model with its passes (`ModelDraft`), or the requests' texts alone (`NgramDraft`)."""

    target_hidden_mode: CaptureHiddenMode
    """The target's states that the draft reads."""

    @property
    def depths(self) -> Sequence[int]:
        """To which it can draft, ascending, num_steps among them."""

    def count_nodes(self, depth: int) -> int:
        """Tokens that a request drafts with `depth` passes."""

    def capture(self, batch_sizes: Sequence[int], shares: Sequence[float] | None) -> None:
        """Capture what is drafted with as CUDA graphs; when the attention backends are there.

        Args:
            batch_sizes: that the target's graphs have; none: there are no graphs.
            shares: capacities per request that the planner wants curves for (`measure_curves`); None: it wants none.
        """

    def prefill(
        self, batch, input_ids: Tensor, hidden_states: Tensor | None, next_token_ids: Tensor, kv_loc_plan
    ) -> EagleDraftInput:
        """Take in what the target has just prefilled.

        Args:
            batch: the extend ScheduleBatch.
            input_ids: [num_tokens] those of the target's pass.
            hidden_states: [num_tokens, hidden_size] the target's, if the draft reads them.
            next_token_ids: [batch] the target's next tokens.
            kv_loc_plan: the target pass's plan; the draft writes the same slots.
        Returns:
            What the first step's draft starts from.
        """

    def propose(self, batch, depth: int) -> Proposal:
        """Draft every request to `depth`.

        Args:
            batch: the decode ScheduleBatch inside SGLang's forward isolation, which undoes what is set here; batch.spec_info
                as `prefill` or `hand_over` returned it, batch.seq_lens [batch] = tokens with target KV.
            depth: 1..num_steps.
        """

    def hand_over(self, record: StepRecord, draft_input: EagleDraftInput, hidden_states: Tensor | None) -> EagleDraftInput:
        """What the next step's draft starts from.

        Args:
            draft_input: the step's own.
            hidden_states: [num_tokens, hidden_size] the target's, in packed rows, if the draft reads them.
        """
