"""The question every capacity policy answers."""

from typing import Protocol


class CapacityPolicy(Protocol):
    """Decides a step's capacity on the host before the step's draft runs.

    Only what earlier steps have shown may enter. A capacity that depended on this step's draft would need a
    device sync, and with sampled drafts it would change the output distribution.
    """

    def choose(self, batch_size: int) -> int:
        """Return capacity_tokens >= 1, the draft tokens to verify over the whole batch; roots excluded."""
        ...
