"""A capacity that the user fixes."""

import math
from dataclasses import dataclass
from numbers import Integral, Real

from tetris_sglang.capacity.policy import DraftLimits, StepPlan


@dataclass(frozen=True, kw_only=True)
class FixedCapacity:
    """A fixed number of draft tokens per step, given in exactly one of two forms.

    Args:
        per_request: average over the running requests, the paper's k; may be fractional. capacity_tokens =
            floor(k * batch_size), but at least 1: a step that drafts and verifies nothing is lost.
        absolute: capacity_tokens itself, whatever the batch.
    Raises:
        ValueError: none or both given; per_request not finite and positive; absolute not a positive integer.
    Example: FixedCapacity(per_request=2.5).count_tokens(3) -> 7
    """

    per_request: float | None = None
    absolute: int | None = None

    def __post_init__(self) -> None:
        k, tokens = self.per_request, self.absolute
        if (k is None) == (tokens is None):
            raise ValueError(f"give exactly one of per_request and absolute, got per_request={k!r} and absolute={tokens!r}")
        if k is not None and not (_is_number(k, Real) and math.isfinite(k) and k > 0):
            raise ValueError(f"per_request must be a finite number above 0, got {k!r}")
        if tokens is not None and not (_is_number(tokens, Integral) and tokens > 0):
            raise ValueError(f"absolute must be an integer of at least 1, got {tokens!r}")

    def choose(self, batch_size: int, limits: DraftLimits, context_tokens: float = 0.0) -> StepPlan:
        """No request can be given more tokens than the whole capacity, so a small one needs no deep drafts."""
        capacity_tokens = self.count_tokens(batch_size)
        depth = next((d for d in limits.depths if d >= capacity_tokens), limits.num_steps)
        return limits.fit(batch_size, depth, capacity_tokens)

    def count_tokens(self, batch_size: int) -> int:
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        if self.absolute is not None:
            return self.absolute
        assert self.per_request is not None
        # A decimal k is rarely a binary fraction: 0.29 * 100 is 28.999..., and 29 was meant.
        return max(1, math.floor(self.per_request * batch_size + 1e-9))


def _is_number(value: object, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)
