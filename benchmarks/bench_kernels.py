"""What selection, packing and acceptance cost on a GPU: Triton against torch, and against a plain copy.

    python benchmarks/bench_kernels.py > benchmarks/results/kernels/kernels.json

Every way is timed twice, both by CUDA events: `graph` replays a CUDA graph of many calls, the time on the
device; `eager` launches the same calls one by one from Python, the time until the device has done them. The
copy is a plain `copy_` of the operation's largest input: no kernel can be faster. Ways are timed in turn
within each round; figures are medians and quartiles over the rounds, in microseconds per call, with the
inputs in the L2 cache, as a step finds them. Prints one JSON document. Without a CUDA device there is nothing
to time: exits 2 and says why.
"""

import json
import os
import sys
from collections.abc import Callable
from typing import Annotated

import torch
import triton
import typer
from bench_selection import BATCHES
from rich.console import Console
from rich.progress import track
from timing import describe_run, summarise, summarise_ratio

from tetris_sglang.kernels.accept import accept_rows
from tetris_sglang.kernels.pack import pack_rows
from tetris_sglang.kernels.select import fits_one_launch, select_drafts
from tetris_sglang.packing import accept_rows_reference, pack_rows_reference
from tetris_sglang.selection import fill_capacity, survival_from_probs

DEPTHS = [2, 4, 6, 8, 16]
CONTEXT = 4096

Way = Callable[[], object]


def main(
    tokens_per_request: Annotated[
        float, typer.Option(help="capacity: draft tokens verified per request, at most the depth")
    ] = 2.0,
    rounds: Annotated[int, typer.Option(min=3, help="timing rounds per cell")] = 15,
    calls: Annotated[int, typer.Option(min=1, help="calls per round and way")] = 20,
    batches: Annotated[str, typer.Option(help="comma-separated")] = ",".join(map(str, BATCHES)),
    depths: Annotated[str, typer.Option(help="tokens drafted per request, comma-separated")] = ",".join(map(str, DEPTHS)),
    seed: int = 0,
) -> None:
    """Time the kernels for batch 1..4096 and depth 2..16."""
    if reason := why_not():
        print(f"bench_kernels: {reason}", file=sys.stderr)
        raise typer.Exit(2)
    cells = [(int(batch), int(depth)) for depth in depths.split(",") for batch in batches.split(",")]
    results = []
    with torch.inference_mode():
        for batch, depth in track(cells, description="kernels", console=Console(stderr=True)):
            for operation, ways in make_operations(batch, depth, tokens_per_request, seed).items():
                results.append(
                    {"operation": operation, "batch": batch, "max_draft": depth}
                    | {"one_launch": operation != "select" or fits_one_launch(batch, depth)}
                    | time_ways(ways, rounds, calls)
                )
    provenance = describe_run(
        "cuda",
        seed=seed,
        clock="CUDA events",
        triton=triton.__version__,
        tokens_per_request=tokens_per_request,
        rounds=rounds,
        calls=calls,
    )
    print(json.dumps({"provenance": provenance, "results": results}, indent=1))


def why_not() -> str | None:
    """Why nothing can be timed here, or None."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "TRITON_INTERPRET=1 is set: the kernels would be interpreted, not run on a device"
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA, and the kernels need a CUDA device"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no CUDA device, and the kernels need one"
    return None


def make_operations(batch: int, depth: int, tokens_per_request: float, seed: int) -> dict[str, dict[str, Way]]:
    """The ways to do each operation; those that compute are checked against each other first."""
    generator = torch.Generator().manual_seed(seed)
    host_probs = 0.3 + 0.7 * torch.rand(batch, depth, generator=generator)
    capacity_tokens = max(1, int(min(tokens_per_request, depth) * batch))
    # As automatic capacity selects by default: slow requests count more.
    host_weights = 0.2 + 0.8 * torch.rand(batch, generator=generator)
    host_survival = survival_from_probs(host_probs)
    host_lens = fill_capacity(host_survival, capacity_tokens, host_weights)
    num_tokens = batch + capacity_tokens

    survival, weights, draft_lens = host_survival.cuda(), host_weights.cuda(), host_lens.cuda()
    candidates = torch.randint(0, 2, (batch, depth + 1), generator=generator).cuda()
    seq_lens = torch.randint(1, CONTEXT - depth, (batch,), generator=generator).cuda()
    req_to_token = torch.randint(0, 2**20, (batch, CONTEXT), generator=generator, dtype=torch.int32).cuda()
    pool_rows = torch.randperm(batch, generator=generator).cuda()
    to_pack = (draft_lens, candidates, seq_lens, req_to_token, pool_rows, num_tokens)
    target_tokens = torch.randint(0, 2, (num_tokens,), generator=generator).cuda()
    to_accept = (target_tokens, pack_rows_reference(*to_pack).qo_indptr, candidates, seq_lens)
    survival_copy, candidates_copy = torch.empty_like(survival), torch.empty_like(candidates)

    assert torch.equal(select_drafts(survival, capacity_tokens, weights).cpu(), host_lens)
    for kernel, reference, arguments in (
        (pack_rows, pack_rows_reference, to_pack),
        (accept_rows, accept_rows_reference, to_accept),
    ):
        # What a batch of chains has no need of is None.
        pairs = zip(kernel(*arguments), reference(*arguments), strict=True)
        assert all(computed is expected or torch.equal(computed, expected) for computed, expected in pairs)
    return {
        "select": {
            "triton": lambda: select_drafts(survival, capacity_tokens, weights),
            "torch": lambda: fill_capacity(survival, capacity_tokens, weights),
            "copy": lambda: survival_copy.copy_(survival),
        },
        "pack": {
            "triton": lambda: pack_rows(*to_pack),
            "torch": lambda: pack_rows_reference(*to_pack),
            "copy": lambda: candidates_copy.copy_(candidates),
        },
        "accept": {
            "triton": lambda: accept_rows(*to_accept),
            "torch": lambda: accept_rows_reference(*to_accept),
            "copy": lambda: candidates_copy.copy_(candidates),
        },
    }


def time_ways(ways: dict[str, Way], rounds: int, calls: int) -> dict[str, object]:
    def repeat(way: Way) -> Way:
        return lambda: [way() for _ in range(calls)]

    runs = {}
    for name, way in ways.items():
        way()  # whatever has to be compiled or loaded is, before capture
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            repeat(way)()
        runs[name, "graph"], runs[name, "eager"] = graph.replay, repeat(way)
    elapsed_us: dict[tuple[str, str], list[float]] = {key: [] for key in runs}
    for run in runs.values():
        time_us(run)  # warms up
    for _ in range(rounds):
        for key, run in runs.items():
            elapsed_us[key].append(time_us(run) / calls)

    def ratio(mine: str, theirs: str) -> dict[str, float]:
        return summarise_ratio(elapsed_us[mine, "graph"], elapsed_us[theirs, "graph"])

    figures: dict[str, object] = {f"{name}_{mode}_us": summarise(samples) for (name, mode), samples in elapsed_us.items()}
    return figures | {
        "torch_over_triton": ratio("torch", "triton"),
        "triton_over_copy": ratio("triton", "copy"),
    }


def time_us(run: Way) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1000


if __name__ == "__main__":
    typer.run(main)
