"""What follows from the flags and the kind of a draft model: how wide its windows are, how many tokens it drafts."""

from __future__ import annotations

from dataclasses import dataclass

from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode


def count_children(num_steps: int, num_draft_tokens: int) -> int:
    """Tokens of each level, of SGLang's two flags.

    Example: 6, 7 -> 1; 6, 8 -> 2; 6, 13 -> 2
    """
    return -(-(num_draft_tokens - 1) // num_steps)


@dataclass(frozen=True)
class DraftSpec:
    """A draft model's settings.

    num_steps, num_draft_tokens: SGLang's flags; the latter counts the root.
    reads_hidden_states: a head, which reads the target's state with each token.
    draws: drafts of sampled requests come from the draft's own law, which acceptance will want.
    """

    num_steps: int
    num_draft_tokens: int
    reads_hidden_states: bool
    draws: bool = False

    @property
    def shift(self) -> int:
        """Positions by which the draft's KV entry of a token lies before the token's own: a head's entry p belongs to the
        target's state at p and the token at p + 1."""
        return int(self.reads_hidden_states)

    @property
    def num_children(self) -> int:
        """Tokens that are offered after each of a chain: as many as it takes to have all nodes; 1: chains."""
        return count_children(self.num_steps, self.num_draft_tokens)

    @property
    def keeps_kv(self) -> bool:
        """Whether drafting leaves the KV of accepted tokens in place, but for the last one's (an accepted leaf is the last
        one): heads miss the target's states."""
        return not self.reads_hidden_states

    @property
    def window_width(self) -> int:
        """Columns of a step's window; where drafting keeps the KV, all of them are real."""
        return 2 if self.keeps_kv else 1 + self.num_steps

    @property
    def hidden_mode(self) -> CaptureHiddenMode:
        """What the draft's own passes keep for the next ones."""
        return CaptureHiddenMode.LAST if self.reads_hidden_states else CaptureHiddenMode.NULL

    @property
    def target_hidden_mode(self) -> CaptureHiddenMode:
        """What the target's passes keep for the draft."""
        return CaptureHiddenMode.FULL if self.reads_hidden_states else CaptureHiddenMode.NULL

    def count_nodes(self, depth: int) -> int:
        """Tokens that a request drafts with `depth` passes."""
        return min(self.num_draft_tokens - 1, depth * self.num_children)
