"""Capturing what a step launches one by one, once for every batch size."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from sglang.srt.model_executor.runner_utils.pool import get_or_create_global_graph_memory_pool


def capture_sizes(run: Callable[[int], None], sizes: Iterable[int]) -> dict[int, torch.cuda.CUDAGraph]:
    """A graph of `run(size)` for each size.

    Args:
        run: reads and writes memory that stays; never waits. What it allocates shares SGLang's pool, which the target's graphs
            overwrite.
    """
    pool = get_or_create_global_graph_memory_pool(torch.cuda)
    graphs = {}
    for size in sorted(sizes, reverse=True):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run(size)  # whatever is compiled or allocated once
        torch.cuda.current_stream().wait_stream(stream)
        graphs[size] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[size], pool=pool):
            run(size)
    return graphs
