"""What a layer of the `torch_ragged` attention costs against a loop over requests.

    python benchmarks/bench_cpu_attention.py --dtype bfloat16

Timed is one layer's attention over a planned pass (gather keys and values, attend, give back packed rows) and,
apart, the plan, which all layers of a pass share. The references: one request after the other, as
SGLang's `torch_native` does, and all requests padded to the longest. Outputs are compared first. Timed as timing.py says.
"""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from rich.progress import track
from rich.table import Table
from timing import (
    RESULTS,
    Out,
    RoundMs,
    Rounds,
    describe_run,
    draw_ratio,
    make_table,
    open_console,
    summarise_ratio,
    time_in_turn,
    write_results,
)

HEAD_DIM = 64
CACHE_SLOTS = 32768
# Queries of each request in turn: a decode step, verification of chains of 3 and 6, and of ragged chains.
PASSES = {
    "decode": [1],
    "verify 4": [4],
    "verify 7": [7],
    "ragged 1-7": [1, 7, 2, 4],
    "ragged 1-13": [1, 13, 3, 8, 2, 5, 1, 11],
}
NUM_LAYERS = 8
"""Which share a pass's plan."""


class Pass:
    """A planned pass over random requests, for one layer."""

    def __init__(
        self,
        batch: int,
        kv_len: int,
        q_lens: list[int],
        heads: int,
        kv_heads: int,
        dtype: torch.dtype,
        seed: int,
    ):
        from sglang.srt.layers.radix_attention import RadixAttention

        from tetris_sglang.portable_cpu.attention import TorchRaggedBackend

        generator = torch.Generator().manual_seed(seed)
        self.heads, self.group = heads, heads // kv_heads
        self.q_lens = torch.tensor([q_lens[i % len(q_lens)] for i in range(batch)])
        self.kv_lens = torch.randint(kv_len // 2, kv_len + 1, (batch,), generator=generator) + self.q_lens
        self.max_kv, self.max_q, self.tokens = (
            int(self.kv_lens.max()),
            int(self.q_lens.max()),
            int(self.q_lens.sum()),
        )
        shape = CACHE_SLOTS, kv_heads, HEAD_DIM
        self.keys, self.values = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
        self.table = torch.randint(1, CACHE_SLOTS, (batch, self.max_kv), generator=generator, dtype=torch.int32)
        self.indices = torch.arange(batch)
        self.q = torch.randn(self.tokens, heads * HEAD_DIM, generator=generator).to(dtype)
        self.layer = SimpleNamespace(layer_id=0, tp_q_head_num=heads, tp_k_head_num=kv_heads, scaling=HEAD_DIM**-0.5)
        pool = SimpleNamespace(get_key_buffer=lambda _: self.keys, get_value_buffer=lambda _: self.values)
        self.backend = TorchRaggedBackend(
            SimpleNamespace(
                device="cpu",
                dtype=dtype,
                use_mla_backend=False,
                model=torch.nn.ModuleList(
                    RadixAttention(heads, HEAD_DIM, HEAD_DIM**-0.5, kv_heads, i) for i in range(NUM_LAYERS)
                ),
                model_config=SimpleNamespace(context_len=self.max_kv),
                req_to_token_pool=SimpleNamespace(req_to_token=self.table),
                token_to_kv_pool=pool,
            )
        )
        self.planned = self.plan()
        group_cost, self.backend.group_cost = self.backend.group_cost, math.inf
        self.padded_alike = self.plan()
        self.backend.group_cost = group_cost

    def plan(self):
        return self.backend.plan(self.indices, self.kv_lens, self.q_lens, self.max_kv, self.max_q, self.tokens)

    def backend_layer(self):
        return self.backend.attend(self.q, self.layer, self.planned)

    def one_group(self):
        return self.backend.attend(self.q, self.layer, self.padded_alike)

    def loop_over_requests(self):
        outs, start = [], 0
        for b, (kv, n) in enumerate(zip(self.kv_lens.tolist(), self.q_lens.tolist(), strict=True)):
            rows = self.table[b, :kv]
            q = self.q[start : start + n].view(n, self.heads, HEAD_DIM).transpose(0, 1)[None]
            start += n
            keys, values = (cache[rows].transpose(0, 1)[None] for cache in (self.keys, self.values))
            mask = torch.ones(n, kv, dtype=torch.bool).tril(kv - n) if n > 1 else None
            out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=self.group > 1)
            outs.append(out[0].transpose(0, 1).reshape(n, -1))
        return torch.cat(outs)


def main(
    out: Out = RESULTS / "cpu_attention.json",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16")] = "float32",
    heads: Annotated[str, typer.Option(help="query/key-value heads, comma-separated")] = "8/2,12/4,4/4",
    batches: Annotated[str, typer.Option(help="requests in a pass")] = "1,4,16",
    kv_lens: Annotated[str, typer.Option(help="longest cache; requests lie between half of it and all")] = "50,300,700",
    rounds: Rounds = 9,
    round_ms: RoundMs = 3.0,
    seed: int = 0,
) -> None:
    """Time one layer's attention per kind of pass, batch, cache length and heads."""
    console = open_console()
    candidates = ("loop_over_requests", "one_group")
    cells = [
        (kind, pair, int(batch), int(kv))
        for pair in heads.split(",")
        for kind in PASSES
        for batch in batches.split(",")
        for kv in kv_lens.split(",")
    ]
    results = []
    with torch.inference_mode():
        for kind, pair, batch, kv in track(cells, description="attention", console=console):
            q_heads, kv_heads = map(int, pair.split("/"))
            work = Pass(batch, kv, PASSES[kind], q_heads, kv_heads, getattr(torch, dtype), seed)
            cell = {"pass": kind, "heads": pair, "batch": batch, "kv": kv}
            results.append(cell | measure(work, candidates, rounds, round_ms))
    for name in candidates:
        console.print(draw(results, name))
    console.print(draw(results, "plan"))
    provenance = describe_run(seed=seed, dtype=dtype)
    write_results(out, console, provenance=provenance, results=results)


def measure(work: Pass, candidates: tuple[str, ...], rounds: int, round_ms: float) -> dict:
    """{candidate: backend's time over its} and the plan's time over a layer's, each over the rounds."""
    calls: dict[str, Callable] = {name: getattr(work, name) for name in ("backend_layer", "plan", *candidates)}
    expected = work.backend_layer()
    for name in candidates:
        tolerance = 1e-4 if expected.dtype == torch.float32 else 5e-2
        torch.testing.assert_close(calls[name](), expected, atol=tolerance, rtol=tolerance)
    elapsed_us = time_in_turn(calls, rounds, round_ms, "cpu")
    layer_us = elapsed_us["backend_layer"]
    ratios = {name: summarise_ratio(layer_us, elapsed_us[name]) for name in candidates}
    return ratios | {"plan": summarise_ratio(elapsed_us["plan"], layer_us)}


def draw(results: list[dict], name: str) -> Table:
    titles = {
        "plan": "the plan, made once per pass, in layers",
        "loop_over_requests": "a layer, over a loop over requests",
        "one_group": "a layer, over one with all requests padded alike",
    }
    columns = list(dict.fromkeys((cell["batch"], cell["kv"]) for cell in results))
    title = titles.get(name, f"a layer, over {name.replace('_', ' ')}")
    table = make_table("heads", "pass", *(f"{b} x {kv}" for b, kv in columns), title=title)
    for pair, kind in dict.fromkeys((cell["heads"], cell["pass"]) for cell in results):
        row = [cell for cell in results if (cell["heads"], cell["pass"]) == (pair, kind)]
        table.add_row(pair, kind, *(draw_ratio(cell[name]) for cell in row))
    return table


if __name__ == "__main__":
    typer.run(main)
