"""Stages a to c of check.py: what is there, the kernels, and ragged attention against float64."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import random
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from ragged import (
    KINDS,
    HeadShape,
    RaggedBatch,
    random_batch,
    random_lens,
    reference_attention,
    relative_error,
)
from stage_report import ON_HOST_CUDA, REPOSITORY, Report, log, recorded, run_child, version
from torch import Tensor

# Relative to the length of a row of the result, for a row of any batch.
TOLERANCES = {torch.bfloat16: 2e-2, torch.float16: 3e-3}
WORKSPACE_BYTES = 512 << 20  # FlashInfer's, for partial results

# -- a: what is there ----------------------------------------------------------------------------------------

PACKAGES = (
    *("torch", "triton", "transformers", "sglang", "sglang-kernel", "flashinfer-python", "apache-tvm-ffi"),
    *("xgrammar", "tetris-sglang"),
)
MODULES = ("sgl_kernel", "flashinfer", "tvm_ffi", "xgrammar", "sglang.srt.entrypoints.engine")


def check_environment(report: Report) -> None:
    report.expect("torch sees a CUDA device", torch.cuda.is_available())
    properties = torch.cuda.get_device_properties(0)
    report.record("device", {"name": properties.name, "memory_bytes": properties.total_memory})
    capability = f"{properties.major}.{properties.minor}"
    report.expect("compute capability 9.0", capability == "9.0", capability)
    report.record("versions", {name: version(name) for name in PACKAGES})
    for module in MODULES:
        with recorded(report, f"import {module}"):
            __import__(module)

    from tetris_sglang.tools.check import find

    for finding in find():
        report.expect(finding.subject, finding.status != "problem", finding.detail)
    if not ON_HOST_CUDA:
        report.record("ceilings", _measure_ceilings())
    started_at = time.monotonic()
    batch = random_batch([3, 1], [40, 7], HeadShape(4, 2, 64), dtype=torch.bfloat16, device="cuda", seed=0)
    error = relative_error(EagerPass(batch.shape, torch.bfloat16).run(batch), reference_attention(batch))
    report.expect("one FlashInfer plan and run", error < TOLERANCES[torch.bfloat16], f"relative error {error:.2e}")
    # Minutes if nvcc had to compile it, rather than the bundle having brought it.
    report.record("first_flashinfer_run_s", round(time.monotonic() - started_at, 1))


def _measure_ceilings() -> dict[str, float]:
    """What this device multiplies and copies at most, to read other figures by."""
    from triton.testing import do_bench

    matrix = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    product_ms = do_bench(lambda: matrix @ matrix, return_mode="median")
    source, target = (torch.empty(2**32, dtype=torch.uint8, device="cuda") for _ in range(2))
    copy_ms = do_bench(lambda: target.copy_(source), return_mode="median")
    return {"bf16_tflops": 2 * 8192**3 / product_ms / 1e9, "copy_tb_per_s": 2**33 / copy_ms / 1e9}


# -- b: kernels ----------------------------------------------------------------------------------------------


def check_kernels(report: Report) -> None:
    tests = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-rfE",
        "--tb=short",
        # Registers are counted with the Triton that is pinned, and no GPU.
        "--ignore=tests/kernels/test_compile.py",
        "tests/kernels",
    ]
    report.expect("tests/kernels on the device", run_child(tests, cwd=REPOSITORY).returncode == 0)
    log("bench_kernels.py")
    command = [
        sys.executable,
        "benchmarks/bench_kernels.py",
        "--batches",
        "1,16,64,256,1024",
        "--depths",
        "4,8",
    ]
    finished = run_child(command, cwd=REPOSITORY, stdout=-1, text=True)
    if not report.expect("bench_kernels.py", finished.returncode == 0):
        return
    (report.path.parent / "kernels.json").write_text(finished.stdout)
    kernels = json.loads(finished.stdout)
    report.record("bench_kernels", kernels)
    for result in kernels["results"]:
        if (result["operation"], result["batch"], result["max_draft"]) == ("select", 256, 8):
            us = result["triton_graph_us"]["median"]
            report.expect("selection below 20 us at batch 256 x 8", us < 20, f"{us:.1f} us")
    log("bench_noise.py")
    out = report.path.parent / "noise.json"
    command = [sys.executable, "benchmarks/bench_noise.py", "--device", "cuda", "--out", str(out)]
    if report.expect("bench_noise.py", run_child(command, cwd=REPOSITORY).returncode == 0):
        report.record("bench_noise", json.loads(out.read_text()))


# -- c: attention --------------------------------------------------------------------------------------------


class EagerPass:
    """Step 1: FlashInfer's own plan from exact lengths on the host, no graph."""

    def __init__(self, shape: HeadShape, dtype: torch.dtype) -> None:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
        self._wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")
        self._shape, self._dtype = shape, dtype

    def run(self, batch: RaggedBatch) -> Tensor:
        self._wrapper.plan(
            *(torch.tensor((0, *lens)).cumsum(0).to(torch.int32) for lens in (batch.verify_lens, batch.kv_lens)),
            batch.slots,
            torch.ones(len(batch.verify_lens), dtype=torch.int32),
            self._shape.heads,
            self._shape.kv_heads,
            self._shape.head_dim,
            1,
            causal=True,
            q_data_type=self._dtype,
            kv_data_type=self._dtype,
        )
        return self._wrapper.run(batch.queries, (batch.keys.unsqueeze(1), batch.values.unsqueeze(1)))


class CapturedPass:
    """Steps 2 and 3: the serving backend's PassPlan and a graph of one attention, for batches in a pool of one size.

    Args:
        like: its pool gives head counts, dtype and the pool's size; its lengths the plan of the capture.
        num_requests: of the largest batch.
        num_rows: query rows, the token tier.
        on_device: step 3.
    """

    def __init__(self, like: RaggedBatch, num_requests: int, num_rows: int, on_device: bool) -> None:
        from tetris_sglang.runtime.cuda.pass_plan import PassPlan

        shape, dtype = like.shape, like.queries.dtype
        self._indices = torch.zeros(len(like.keys) + num_rows, dtype=torch.int32, device="cuda")
        self.plan = PassPlan(
            torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda"),
            self._indices,
            num_requests=num_requests,
            num_rows=num_rows,
            num_qo_heads=shape.heads,
            num_kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            q_dtype=dtype,
            kv_dtype=dtype,
            on_device=on_device,
        )
        self._queries = torch.zeros((num_rows, shape.heads, shape.head_dim), dtype=dtype, device="cuda")
        self._output = torch.empty_like(self._queries)
        self._keys, self._values = like.keys.unsqueeze(1).clone(), like.values.unsqueeze(1).clone()
        self.set_lengths(like, lens_on_device(like))
        self.plan.capture()
        self._run()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._run()

    def set_lengths(self, batch: RaggedBatch, lens: tuple[Tensor, Tensor]) -> None:
        self._indices[: len(batch.slots)].copy_(batch.slots)
        self._indices[len(batch.slots) :].zero_()
        self.plan.set_lengths(*lens)

    def replay(self, batch: RaggedBatch, lens: tuple[Tensor, Tensor]) -> Tensor:
        """`lens` are those of `lens_on_device`, made beforehand so that nothing is uploaded here."""
        self.set_lengths(batch, lens)
        self.plan.replan()
        self._keys.copy_(batch.keys.unsqueeze(1))
        self._values.copy_(batch.values.unsqueeze(1))
        self._queries[: batch.num_tokens].copy_(batch.queries)
        self._output.fill_(torch.nan)  # a row that nobody writes shows
        self.graph.replay()
        return self._output[: batch.num_tokens].clone()

    def _run(self) -> None:
        self.plan.wrapper.run(self._queries, (self._keys, self._values), out=self._output)


def lens_on_device(batch: RaggedBatch) -> tuple[Tensor, Tensor]:
    """verify_lens and prefix_lens."""
    return (
        torch.tensor(batch.verify_lens, dtype=torch.int32, device="cuda"),
        torch.tensor(batch.prefix_lens, dtype=torch.int64, device="cuda"),
    )


def check_attention(report: Report) -> None:
    with recorded(report, "selection under set_sync_debug_mode('error')"):
        _select_without_sync()
    shapes = (HeadShape(4, 2, 64), HeadShape(64, 32, 64), HeadShape(32, 8, 128), HeadShape(14, 2, 64))
    for shape in (shapes[0], HeadShape(8, 2, 128)) if ON_HOST_CUDA else shapes:
        for dtype in [torch.bfloat16] if ON_HOST_CUDA else TOLERANCES:
            name = f"{shape.heads}/{shape.kv_heads} heads of {shape.head_dim}, {str(dtype).removeprefix('torch.')}"
            with recorded(report, f"{name}: runs"):
                _check_steps(report, name, shape, dtype)
    if not ON_HOST_CUDA:
        with recorded(report, "timing"):
            _time_ragged_against_plain(report)


def _select_without_sync() -> None:
    from tetris_sglang.kernels.select import select_drafts

    survival = torch.rand(256, 8, device="cuda").sort(dim=1, descending=True).values
    weights = torch.rand(256, device="cuda")
    select_drafts(survival, 512, weights)  # compiles
    with _no_sync():
        draft_lens = select_drafts(survival, 512, weights)
    if int(draft_lens.sum()) != 512:
        raise AssertionError(f"{int(draft_lens.sum())} drafts were selected instead of 512")


def _check_steps(report: Report, name: str, shape: HeadShape, dtype: torch.dtype) -> None:
    """The three steps on random batches of every kind, against float64 and against each other."""
    rng = random.Random(0)
    slots, max_verify, max_prefix = (8, 6, 600) if ON_HOST_CUDA else (24, 9, 1500)
    num_rows = 5 * slots

    def make(verify: list[int], prefix: list[int], seed: int) -> RaggedBatch:
        return random_batch(verify, prefix, shape, dtype=dtype, device="cuda", seed=seed)

    full = make([num_rows // slots] * slots, [max_prefix] * slots, 0)
    eager = EagerPass(shape, dtype)
    captured = {
        "host plan": CapturedPass(full, slots, num_rows, on_device=False),
        "device plan": CapturedPass(full, slots, num_rows, on_device=True),
    }
    report.expect(f"{name}: the device's plan is FlashInfer's", captured["device plan"].plan.on_device)
    worst = dict.fromkeys(("eager", *captured, "device plan against host plan"), 0.0)
    for seed in range(1, 2 if ON_HOST_CUDA else 21):
        for kind in KINDS:
            verify, prefix = random_lens(kind, rng, slots, max_verify, max_prefix, num_rows)
            batch = _in_pool_of(full, make(verify, prefix, seed))
            expected, lens = reference_attention(batch), lens_on_device(batch)
            outputs = {"eager": eager.run(batch), "host plan": captured["host plan"].replay(batch, lens)}
            with _no_sync() if captured["device plan"].plan.on_device else contextlib.nullcontext():
                outputs["device plan"] = captured["device plan"].replay(batch, lens)
            for step, output in outputs.items():
                worst[step] = max(worst[step], relative_error(output, expected))
            apart = relative_error(outputs["device plan"], outputs["host plan"].double())
            worst["device plan against host plan"] = max(worst["device plan against host plan"], apart)
    for step, error in worst.items():
        report.expect(f"{name}: {step}, relative error", error < TOLERANCES[dtype], f"{error:.2e}")


def _in_pool_of(full: RaggedBatch, batch: RaggedBatch) -> RaggedBatch:
    """The batch in a pool of the size of `full`'s, since a graph keeps its addresses; NaN where it has nothing."""
    pools = {}
    for name in ("keys", "values"):
        pools[name] = torch.full_like(getattr(full, name), torch.nan)
        pools[name][: len(getattr(batch, name))] = getattr(batch, name)
    return dataclasses.replace(batch, **pools)


def _time_ragged_against_plain(report: Report) -> None:
    """Attention of a ragged pass and of one whose rows are spread evenly, in microseconds."""
    from triton.testing import do_bench

    rng, cells = random.Random(1), []
    for requests, mean_verify, prefix in ((8, 4, 1024), (64, 4, 1024), (256, 4, 512)):
        lens = [1] * requests
        for _ in range(requests * (mean_verify - 1)):
            lens[rng.choice([i for i in range(requests) if lens[i] < 2 * mean_verify])] += 1
        prefixes = [rng.randint(prefix // 2, 3 * prefix // 2) for _ in range(requests)]
        cell: dict[str, Any] = {"requests": requests, "rows": sum(lens), "mean_prefix": prefix}
        for name, verify in (("plain", [mean_verify] * requests), ("ragged", lens)):
            batch = random_batch(verify, prefixes, HeadShape(64, 32, 64), dtype=torch.bfloat16, device="cuda", seed=2)
            device_lens = lens_on_device(batch)
            for on_device, step in ((False, "host"), (True, "device")):
                captured = CapturedPass(batch, requests, sum(lens), on_device)
                captured.replay(batch, device_lens)
                if not on_device:
                    cell[f"{name}_us"] = 1e3 * do_bench(captured.graph.replay, return_mode="median")
                cell[f"{name}_{step}_plan_us"] = _time_host(captured.plan.replan)
        cells.append(cell)
        report.record("timings", cells)
        ratio = cell["ragged_us"] / cell["plain_us"]
        report.expect(f"attention of {requests} requests: ragged at most 1.05 x plain", ratio <= 1.05, f"{ratio:.3f}")


def _time_host(function, calls: int = 30) -> float:
    """Microseconds per call, from the host's side and until the device has done all of them."""
    function()
    torch.cuda.synchronize()
    started_at = time.perf_counter()
    for _ in range(calls):
        function()
    torch.cuda.synchronize()
    return 1e6 * (time.perf_counter() - started_at) / calls


@contextlib.contextmanager
def _no_sync() -> Iterator[None]:
    """An error for whatever waits for the device inside."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
