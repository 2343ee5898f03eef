"""TETRIS's Algorithm 1 (arXiv:2502.15197) as the paper states it: a max-heap of each request's next token."""

from collections.abc import Sequence
from heapq import heappop, heappush


def select_prefixes_reference(
    survival: Sequence[Sequence[float]], capacity_tokens: int, max_draft_lens: Sequence[int] | None = None
) -> list[int]:
    """Choose the per-request draft prefixes that maximise the expected number of accepted tokens.

    Two additions to the paper. Ties go to the shallower token, then to the lower request. A token of survival
    0 cannot be accepted: verifying it is work for nothing, so it is left out even when capacity remains.

    Args:
        survival: [batch][max_draft], each in [0, 1], non-increasing along a request.
        capacity_tokens: draft tokens over the whole batch; roots excluded.
        max_draft_lens: [batch], the most draft tokens each request may verify; default: no limit.
    Returns:
        draft_lens: [batch], sum <= capacity_tokens.
    Raises:
        ValueError: capacity_tokens < 0.
    Example: [[.9, .8], [.5, .1]], 3 -> [2, 1]
    """
    if capacity_tokens < 0:
        raise ValueError(f"capacity_tokens must be >= 0, got {capacity_tokens}")
    draft_lens = [0] * len(survival)
    heap: list[tuple[float, int, int]] = []

    def push_next_token(request: int) -> None:
        depth, chain = draft_lens[request], survival[request]
        end = len(chain) if max_draft_lens is None else min(len(chain), max_draft_lens[request])
        if depth < end and chain[depth] > 0:
            heappush(heap, (-chain[depth], depth, request))  # negated: heapq pops the smallest

    for request in range(len(survival)):
        push_next_token(request)
    while heap and capacity_tokens > 0:
        _, _, request = heappop(heap)
        draft_lens[request] += 1
        capacity_tokens -= 1
        push_next_token(request)
    return draft_lens
