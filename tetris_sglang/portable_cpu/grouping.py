"""Which requests of a pass are padded together.

A layer of attention takes requests that are padded to the same lengths in one call, and gathers as many cached rows for each of
them. So requests of like lengths make a group each, where that saves more than another call costs.
"""

from __future__ import annotations

import numpy as np


def group_requests(
    kv_lens: np.ndarray, q_lens: np.ndarray, *, query_cost: float, group_cost: float
) -> tuple[np.ndarray, list[int]]:
    """Cut the requests, by rising length, into the groups that cost least.

    A group of n requests, padded to kv cached rows and q queries each, costs n * kv * (1 + q * query_cost) + group_cost: in
    gathered rows, of which one costs 1.

    Args:
        kv_lens, q_lens: [n] integers.
        query_cost: of one query on one row. group_cost: of another group.
    Returns:
        order [n] int64 of the requests, group after group, and the groups' sizes; as they are where there is one group.
    Example: kv_lens [9, 500, 8], q_lens [1, 1, 1], query_cost 0, group_cost 50 -> [2, 0, 1], [2, 1]
    """
    n = len(kv_lens)
    padded = n * kv_lens.max() * (1 + q_lens.max() * query_cost)
    if padded - (kv_lens * (1 + q_lens * query_cost)).sum() <= group_cost:
        return np.arange(n), [n]
    order = np.lexsort((q_lens, kv_lens))
    kv_lens, q_lens = kv_lens[order], q_lens[order]
    # The best cut of the first j requests ends with a group that begins at some i.
    least, begins = np.zeros(n + 1), np.zeros(n + 1, np.int64)
    for j in range(1, n + 1):
        longest_q = np.maximum.accumulate(q_lens[:j][::-1])[::-1]
        costs = least[:j] + np.arange(j, 0, -1) * kv_lens[j - 1] * (1 + longest_q * query_cost)
        begins[j] = costs.argmin()
        least[j] = costs[begins[j]] + group_cost
    sizes, end = [], n
    while end:
        sizes.append(end - int(begins[end]))
        end = int(begins[end])
    return (order, sizes[::-1]) if len(sizes) > 1 else (np.arange(n), [n])
