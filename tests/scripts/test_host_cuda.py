"""The CUDA that computes on the host: what it computes is right, and what nobody computes is an error that names it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPTS = REPOSITORY / "scripts" / "gpu"
sys.path.insert(0, str(SCRIPTS))

from host_cuda import flash_attention, small_kernels, tree_kernels
from host_cuda.environment import build, environment
from host_cuda.streams import Access, Snapshot, Streams

if shutil.which("g++") is None:
    pytest.skip("needs g++ to build the libraries", allow_module_level=True)

# A child that stands still says where.
WATCH = "import faulthandler\nfaulthandler.dump_traceback_later(240, exit=True)\n"
CORE = """
import torch
from host_cuda import recorder, triton_kernels
from host_cuda.operators import HostOperators
recorder.listen()
recorder.take_over_graphs()
triton_kernels.take_over_triton()
HostOperators().__enter__()

def capture(run):
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()
    return graph, result
"""
ALL = "import torch\nfrom host_cuda.plugin import install\ninstall()\n"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("host-cuda")
    build(folder)
    variables = os.environ | environment(folder)
    variables["PYTHONPATH"] = os.pathsep.join([variables["PYTHONPATH"], str(REPOSITORY), str(SCRIPTS)])

    def run(code: str, prelude: str = CORE) -> str:
        command = [sys.executable, "-W", "ignore", "-c", WATCH + prelude + textwrap.dedent(code)]
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr[-20_000:]
        return done.stdout

    return run


def test_operators_compute_and_graphs_read_what_stands_at_their_addresses(run):
    run("""
        x = torch.arange(6.0, device="cuda").view(2, 3)
        assert (x @ x.T).tolist() == [[5, 14], [14, 50]]
        assert x[:, 1:].sum(dim=0).cpu().tolist() == [5, 7]
        graph, y = capture(lambda: (x * 2).cumsum(dim=1)[:, -1] + 1)
        for start in (0.0, 10.0):
            x.copy_(torch.arange(start, start + 6, device="cuda").view(2, 3))
            graph.replay()
            assert y.tolist() == ((x * 2).sum(dim=1) + 1).tolist(), y
        # What is written elsewhere since is not part of the graph.
        z = torch.zeros(3, device="cuda")
        graph, _ = capture(lambda: z.add_(1))
        z.zero_()
        graph.replay(); graph.replay()
        assert z.tolist() == [2, 2, 2]
    """)


def test_fresh_memory_holds_nothing_to_rely_on(run):
    run("""
        assert torch.empty(5, device="cuda").isnan().all()
        assert (torch.empty(5, dtype=torch.int32, device="cuda") == 0x5A5A5A5A).all()
        graph, y = capture(lambda: torch.empty(4, device="cuda"))
        y.zero_()
        graph.replay()
        assert y.isnan().all()
    """)


def test_triton_kernels_compute_in_graphs_too(run):
    run("""
        from tetris_sglang.kernels.select import select_drafts
        from tetris_sglang.selection import fill_capacity
        survival = torch.rand(9, 5, device="cuda").sort(dim=1, descending=True).values
        graph, lens = capture(lambda: select_drafts(survival, 17))
        for seed in range(3):
            torch.manual_seed(seed)
            survival.copy_(torch.rand(9, 5).cumprod(dim=1).to("cuda"))
            graph.replay()
            assert lens.tolist() == fill_capacity(survival.cpu(), 17).tolist()
    """)


def test_what_nobody_computes_is_named(run):
    run("""
        import threading
        # Another thread has no dispatch mode: torch launches its own kernel.
        x = torch.ones(3, device="cuda")
        thread = threading.Thread(target=lambda: x.mul_(2))
        thread.start(); thread.join()
        try:
            x + 1
        except recorder.NobodyComputes as error:
            assert "elementwise" in str(error), error
        else:
            raise SystemExit("nobody noticed")
    """)


@pytest.mark.parametrize(
    ("library", "call", "is_captured"),
    [
        ("libcudart.so.13", "cudaMemset(at, 0, size)", True),
        ("libcudart.so.13", "cudaMemcpy2DAsync(at, size, at, size, size, one, 3, None)", True),
        ("libcudart.so.13", "cudaMemset2DAsync(at, size, 0, size, one, None)", False),
        ("libcuda.so.1", "cuMemcpyDtoDAsync_v2(at, at, size, None)", False),
        ("libcublas.so.13", "cublasSaxpy_v2()", False),
        ("libcublasLt.so.13", "cublasLtMatrixTransform()", False),
    ],
    ids=lambda value: value.split("(")[0] if isinstance(value, str) else "",
)
def test_what_libraries_do_unseen_is_named(run, library, call, is_captured):
    run(f"""
        import contextlib, ctypes
        x, graph = torch.ones(4, device="cuda"), torch.cuda.CUDAGraph()
        at, size, one = ctypes.c_void_p(x.data_ptr()), ctypes.c_size_t(8), ctypes.c_size_t(1)
        library = ctypes.CDLL({library!r})
        try:
            with torch.cuda.graph(graph) if {is_captured} else contextlib.nullcontext():
                library.{call}
                x + 1
        except RuntimeError as error:
            assert {call.split("(")[0]!r} in str(error), error
        else:
            raise SystemExit("nobody noticed")
    """)


@pytest.mark.parametrize(
    "operation", ["y.item()", "y.cpu()", "y.nonzero()", "torch.ones(3).to('cuda')"], ids=["item", "cpu", "nonzero", "upload"]
)
def test_what_ends_a_capture_is_refused(run, operation):
    run(f"""
        y = torch.ones(3, device="cuda")
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                {operation if "item" not in operation else "y.sum().item()"}
        except RuntimeError as error:
            assert "while a graph is captured" in str(error), error
        else:
            raise SystemExit("it went through")
    """)


ATTENTION = """
import random
import device_checks as checks
from host_cuda.memory import on_host
from ragged import HeadShape, KINDS, random_batch, random_lens, reference_attention, relative_error
checks.WORKSPACE_BYTES = 64 << 20
SLOTS, ROWS, PREFIX = 8, 24, 600
shape, dtype, rng = HeadShape(4, 2, 64), torch.bfloat16, random.Random(0)
make = lambda verify, prefix, seed: random_batch(verify, prefix, shape, dtype=dtype, device="cuda", seed=seed)
full = make([ROWS // SLOTS] * SLOTS, [PREFIX] * SLOTS, 0)
passed = checks.CapturedPass(full, SLOTS, ROWS, on_device=ON_DEVICE)
assert passed.plan.on_device == ON_DEVICE

def error_of(kind, seed):
    lens = [2, 4] * (SLOTS // 2), [PREFIX - 99, PREFIX] * (SLOTS // 2)
    if kind:
        lens = random_lens(kind, rng, SLOTS, 6, PREFIX, ROWS)
    batch = checks._in_pool_of(full, make(*lens, seed))
    return relative_error(passed.replay(batch, checks.lens_on_device(batch)), reference_attention(batch))
"""


@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
def test_attention_follows_the_plan_in_a_graph(run, on_device):
    code = """
        for number, kind in enumerate(KINDS):
            error = error_of(kind, number)
            assert error < 1e-2, (kind, error)
    """
    run(ATTENTION.replace("ON_DEVICE", str(on_device)) + textwrap.dedent(code), ALL)


def test_every_array_of_the_plan_matters(run):
    """Each, broken a little, is found: in the output, or by what reads it."""
    code = """
        plan, replan = passed.plan, passed.plan.replan
        for name in ("request_indices", "qo_tile_indices", "kv_tile_indices", "o_indptr", "kv_chunk_size_ptr",
                     "total_num_rows", "merge_indptr", "block_valid_mask"):
            def broken():
                replan()
                octets = on_host(plan.wrapper._int_workspace_buffer)
                at = getattr(plan._layout, name + "_offset")
                if name == "block_valid_mask":
                    octets[at + 3] = 0
                    return
                words = octets[at : at + 64].view(torch.int32)
                place = 0 if name in ("kv_chunk_size_ptr", "total_num_rows") else 3
                words[place] += {"total_num_rows": -1, "kv_chunk_size_ptr": -16}.get(name, 1)
            plan.replan = broken
            try:
                error = error_of(None, 99)
            except Exception as problem:
                print(name, type(problem).__name__)
                continue
            assert not error < 1e-2, f"{name}: {error}"
        plan.replan = replan
        assert error_of(None, 99) < 1e-2
    """
    run(ATTENTION.replace("ON_DEVICE", "True") + textwrap.dedent(code), ALL)


OBSERVERS = """
import random
from types import SimpleNamespace
from tetris_sglang.capacity import StepPlan
from tetris_sglang.drafting import Grid, Proposal, TreeShape
from tetris_sglang.estimates.estimator import AcceptanceEstimator
from tetris_sglang.observers import StepRecord
from tetris_sglang.packing import AcceptedTokens, empty_packed_tokens
from tetris_sglang.runtime.cuda.captured_observers import CapturedObservers
from tetris_sglang.runtime.request_texts import RequestTexts

SLOTS, COLUMNS, WIDTH, DEPTH, VOCAB = 9, 200, 7, 6, 50
device = torch.device("cuda")
pool = SimpleNamespace(req_to_token=torch.zeros(SLOTS, COLUMNS, dtype=torch.int32, device=device))

def make():
    texts, slots = RequestTexts(pool, VOCAB, WIDTH), range(1, SLOTS)
    texts.recent.begin(torch.arange(1, SLOTS, device=device), texts.recent.place(slots, slots, [0] * len(slots)).to(device))
    return texts, AcceptanceEstimator(DEPTH, device, steps_together=1)

def make_record(draw, lens, has_combs):
    batch_size, num_nodes = draw.randint(1, 6), draw.randint(2, WIDTH - 1)
    slots = draw.sample(range(1, SLOTS), batch_size)
    integers = lambda *size, high: torch.randint(high, size)
    drafted = torch.tensor([draw.randint(0, num_nodes) for _ in slots])
    parents = torch.zeros(batch_size, WIDTH, dtype=torch.int64)
    depths, path = parents.clone(), None
    num_accepted = torch.tensor([draw.randint(0, int(n)) for n in drafted])
    if has_combs:
        # Chains of the nodes with even numbers, and leaves beside them.
        for node in range(1, num_nodes + 1):
            parents[:, node] = max(node - 1 - (node % 2 == 0), 0) // 2 * 2
            depths[:, node] = depths[:, parents[0, node]] + 1
        num_accepted = drafted // 2
        path = torch.arange(DEPTH // 2 + 1).mul(2).expand(batch_size, -1).contiguous()
    shape = TreeShape(parents.to(device), depths.to(device)) if has_combs else None
    kinds = integers(batch_size, num_nodes, high=15)
    probs = torch.rand(batch_size, num_nodes)
    drafted_shape = None if shape is None else TreeShape(*(part[:, : num_nodes + 1] for part in shape))
    proposal = Proposal(kinds.to(device), probs.to(device), probs.to(device), drafted_shape, kinds.to(device))
    packed = empty_packed_tokens(batch_size, batch_size, device)._replace(verify_lens=(drafted + 1).int().to(device))
    rows = torch.tensor(slots, device=device)
    seq_lens = torch.tensor([lens[slot] for slot in slots], device=device)
    accepted = AcceptedTokens(
        num_accepted.int().to(device), rows, rows, seq_lens, integers(batch_size, WIDTH, high=VOCAB).to(device),
        None if path is None else path.to(device),
    )
    for slot, n in zip(slots, num_accepted.tolist()):
        lens[slot] += n + 1
    batch = SimpleNamespace(req_pool_indices=rows, seq_lens=seq_lens, reqs=slots)
    grid = Grid(accepted.target_tokens, DEPTH, shape)
    return StepRecord(batch, StepPlan(DEPTH, int(drafted.sum())), proposal, grid, packed, accepted, num_nodes)
"""


LEAVE_DRAFTS_IN_THE_POOL = """
from mutations import DRAFT_GRAPHS, Mutation
Mutation(DRAFT_GRAPHS, "_keep", "return self._outputs[size, depth]", "return made", "").land()
"""
KEEP_DRAFTS = """
from types import SimpleNamespace
from tetris_sglang.drafting import Proposal
from tetris_sglang.runtime.cuda.draft_graph import DraftGraphs

graphs, probs = SimpleNamespace(_shares=None, _outputs={}), torch.full((2, 3), 0.5, device="cuda")

def draft():
    survival = probs.cumprod(dim=1)
    return DraftGraphs._keep(graphs, Proposal(survival.long(), survival, probs * 1), 2, 3)

_, kept = capture(draft)
segments = torch.cuda.memory_snapshot()
for each in kept:
    (pool,) = (s["segment_pool_id"] for s in segments if 0 <= each.data_ptr() - s["address"] < s["total_size"])
    assert pool == (0, 0), f"left in a graph's pool, {pool}"
"""


def test_drafts_are_not_left_in_memory_that_the_targets_graphs_share(run):
    run(KEEP_DRAFTS)
    with pytest.raises(AssertionError, match="left in a graph's pool"):
        run(LEAVE_DRAFTS_IN_THE_POOL + KEEP_DRAFTS)


@pytest.mark.parametrize("has_combs", [False, True], ids=["chains", "combs"])
def test_captured_observers_learn_what_the_others_learn(run, has_combs):
    """Batches of unlike sizes, one beyond the captured ones, steps of unlike depths. What fills a batch up teaches nothing."""
    code = f"""
        torch.manual_seed(0)
        draw, lens = random.Random(0), [1] * SLOTS
        plain, inner = make(), make()
        captured = CapturedObservers(
            inner, inner[0], batch_sizes=[1, 2, 4], width=WIDTH, max_depth=DEPTH, has_combs={has_combs}, has_evidence=True,
            device=device,
        )
        for _ in range(25):
            record = make_record(draw, lens, {has_combs})
            for observer in plain:
                observer.observe(record)
            captured.observe(record)
        def state(observers):
            texts, estimator = observers
            texts.flush()
            slots = torch.arange(1, SLOTS, device=device)
            return {{
                "texts": texts.tokens[1:, : min(lens)], "matches": texts.recent.find(slots, 4).tokens,
                "offsets": estimator.evidence._offsets, "calibration": estimator.calibration._lines,
            }}
        ours, theirs = state((captured._texts, *inner[1:])), state(plain)
        assert theirs["offsets"].abs().sum() > 0
        for name, value in theirs.items():
            torch.testing.assert_close(ours[name].cpu(), value.cpu(), msg=lambda m, name=name: name + ": " + m)
    """
    run(OBSERVERS + textwrap.dedent(code), ALL)


# -- the small kernels, against torch's or plain Python's ------------------------------------------------------------


def test_norms():
    x, residual, weight = torch.randn(5, 8), torch.randn(5, 8), torch.randn(8)
    out, total = torch.empty_like(x), x + residual
    small_kernels.rmsnorm(out, x, weight, 1e-5)
    torch.testing.assert_close(out, torch.nn.functional.rms_norm(x, (8,), weight, 1e-5))
    small_kernels.fused_add_rmsnorm(x, residual, weight, 1e-5)
    torch.testing.assert_close(residual, total)
    torch.testing.assert_close(x, torch.nn.functional.rms_norm(total, (8,), weight, 1e-5))


def test_rotary_embeddings_turn_pairs_of_halves():
    dim, positions = 8, torch.tensor([3, 0, 7])
    angles = torch.arange(10.0)[:, None] / 10 ** (torch.arange(dim // 2) / 4)
    q, k = torch.randn(3, 2, dim), torch.randn(3, 1, dim)
    expected = [torch.view_as_complex(torch.stack(x.chunk(2, dim=-1), dim=-1).contiguous()) for x in (q, k)]
    turned = [x * torch.polar(torch.ones(3, 1, dim // 2), angles[positions][:, None]) for x in expected]
    small_kernels.run_rope(q, k, torch.cat((angles.cos(), angles.sin()), dim=-1), positions)
    for found, complex_ in zip((q, k), turned, strict=True):
        torch.testing.assert_close(found, torch.cat((complex_.real, complex_.imag), dim=-1))


def test_the_cache_takes_what_has_a_slot_and_no_other():
    k, v = torch.randn(3, 4), torch.randn(3, 4)
    k_cache, v_cache = torch.zeros(6, 4), torch.zeros(6, 4)
    small_kernels.store_cache(k, v, k_cache, v_cache, torch.tensor([5, 0, 2]), 6, 0)
    assert torch.equal(k_cache[[5, 2]], k[[0, 2]]) and torch.equal(v_cache[[5, 2]], v[[0, 2]]) and not k_cache[0].any()
    with pytest.raises(AssertionError, match=r"slots \[6\] of 6"):
        small_kernels.store_cache(k, v, k_cache, v_cache, torch.tensor([5, 6, 2]), 6, 0)


def test_activation_and_positions():
    x, out = torch.randn(4, 6), torch.empty(4, 3)
    small_kernels.run_activation(x, out, "silu")
    torch.testing.assert_close(out, torch.nn.functional.silu(x[:, :3]) * x[:, 3:])
    with pytest.raises(AssertionError, match="gelu"):
        small_kernels.run_activation(x, out, "gelu")
    positions = torch.empty(3, dtype=torch.int64)
    small_kernels.clamp_position(positions, torch.tensor([4, 0, 1]))
    assert positions.tolist() == [3, 0, 0]


def test_bits_are_packed_segment_by_segment():
    packed = torch.zeros(4, dtype=torch.uint8)
    bits = torch.tensor([1, 0, 1, 0, 0, 0, 0, 0, 1, 0, 1, 1], dtype=torch.bool)
    small_kernels.segment_packbits(bits, torch.tensor([0, 9, 12]), torch.tensor([0, 2, 3]), "little", packed)
    assert packed.tolist() == [0b101, 0b1, 0b110, 0]


def test_samplers_keep_what_top_k_and_top_p_say():
    probs, out = torch.tensor([[0.1, 0.5, 0.15, 0.25]]).repeat(2, 1), torch.empty(2, 4)
    small_kernels.top_k_renorm_probs(probs, out, torch.tensor([2, 4]), 0)
    torch.testing.assert_close(out, torch.tensor([[0, 2 / 3, 0, 1 / 3], [0.1, 0.5, 0.15, 0.25]]))
    small_kernels.top_p_renorm_probs(probs, out, None, 0.6)
    torch.testing.assert_close(out, torch.tensor([[0, 2 / 3, 0, 1 / 3]]).repeat(2, 1))
    samples, valid = torch.empty(2, dtype=torch.int32), torch.zeros(2, dtype=torch.bool)
    for _ in range(20):
        small_kernels.top_k_top_p_sampling_from_probs(probs, samples, valid, None, None, 3, torch.tensor([0.4, 0.9]), 1.0)
        assert samples[0] == 1 and samples[1] in (1, 2, 3) and valid.all()
    for _ in range(20):
        small_kernels.min_p_sampling_from_probs(probs, samples, valid, None, torch.tensor([0.9, 0.4]), 0.0)
        assert samples[0] == 1 and samples[1] in (1, 3)


def test_flash_attention_reads_the_page_table():
    generator = torch.Generator().manual_seed(0)
    page_size, kv_lens, counts, heads, kv_heads, dim = 2, [5, 3, 0], [2, 3, 0], 4, 2, 8
    k_cache, v_cache = (torch.randn(9, page_size, kv_heads, dim, generator=generator) for _ in range(2))
    table = torch.tensor([[7, 2, 5], [1, 8, 0], [0, 0, 0]], dtype=torch.int32)
    q = torch.randn(6, heads, dim, generator=generator)
    out, sums = torch.full_like(q, torch.nan), torch.empty(heads, 6)
    arguments = [None] * 37
    arguments[:3], arguments[7], arguments[11], arguments[12], arguments[14] = (
        (q, k_cache, v_cache), torch.tensor([0, 2, 5, 5]), torch.tensor(kv_lens), 3, table,
    )  # fmt: skip
    arguments[23:29] = 0.3, True, -1, -1, 0, 0.0
    flash_attention.run((out, sums), *arguments)
    first = 0
    for request, (kv_len, count) in enumerate(zip(kv_lens, counts, strict=True)):
        for row in range(count):
            seen = kv_len - count + row + 1
            at = [(int(table[request, t // page_size]), t % page_size) for t in range(seen)]
            for head in range(heads):
                keys, values = (torch.stack([cache[p][e, head // 2] for p, e in at]) for cache in (k_cache, v_cache))
                logits = keys @ q[first + row, head] * 0.3
                torch.testing.assert_close(out[first + row, head], logits.softmax(0) @ values)
                torch.testing.assert_close(sums[head, first + row], logits.logsumexp(0))
        first += count
    assert out[5].isnan().all(), "a row of no request was written"


# -- upstream's trees -------------------------------------------------------------------------------------------------

INDEX = torch.tensor([[0, 1, 2, 3, 4]])
NEXT_TOKEN = torch.tensor([[1, 3, 4, -1, -1]])
NEXT_SIBLING = torch.tensor([[-1, 2, -1, -1, -1]])
"""0 has the children 1 and 2, 1 has 3, 2 has 4."""
TREE_TOKENS = torch.tensor([[9, 3, 5, 1, 2]])


def test_upstreams_tree_kernels_build_and_walk_a_tree(run):
    """Through the doors that upstream's speculation takes."""
    run(
        f"""
        from sglang.kernels.ops.speculative.tree import (
            build_tree_kernel_efficient, reconstruct_indices_from_tree_mask, verify_tree_greedy,
        )
        on_device = lambda *rows, dtype=torch.int64: torch.tensor(rows, dtype=dtype, device="cuda")
        # Two levels of two: nodes 0 and 1, then 2 and 3 below 0, 4 and 5 below 1. Chosen: 0, 1, 2, 4.
        selected, parents = on_device([0, 1, 2, 4]), on_device([-1, 0, 1])
        index, next_token, next_sibling = (torch.full((1, 5), -1, device="cuda") for _ in range(3))
        positions, mask = torch.empty(5, dtype=torch.int64, device="cuda"), torch.ones(25, dtype=torch.bool, device="cuda")
        build_tree_kernel_efficient(
            parents, selected, on_device(7)[0:1], mask, positions, index, next_token, next_sibling, 2, 2, 5, 1
        )
        assert positions.tolist() == [7, 8, 8, 9, 9]
        seen = {{0: [0], 1: [0, 1], 2: [0, 2], 3: [0, 1, 3], 4: [0, 2, 4]}}
        assert {{row: mask.view(5, 5)[row].nonzero()[:, 0].tolist() for row in range(5)}} == seen
        assert index.tolist() == {INDEX.tolist()} and next_token.tolist() == {NEXT_TOKEN.tolist()}
        assert next_sibling.tolist() == {NEXT_SIBLING.tolist()}
        again = [torch.empty_like(t) for t in (positions, index, next_token, next_sibling)]
        reconstruct_indices_from_tree_mask(mask, on_device(7)[0:1], *again, 1, 5)
        for found, expected in zip(again, (positions, index, next_token, next_sibling)):
            assert found.tolist() == expected.tolist()
        # The target goes on with 5 and then 2, which are the nodes 2 and 4, and with 8 behind them.
        predicts = torch.zeros(5, dtype=torch.int32, device="cuda")
        accepted = torch.full((1, 3), -1, dtype=torch.int32, device="cuda")
        count = torch.empty(1, dtype=torch.int32, device="cuda")
        tokens, target = on_device(*{TREE_TOKENS.tolist()}), on_device([5, 0, 2, 0, 8])
        verify_tree_greedy(predicts, accepted, count, tokens, index, next_token, next_sibling, target)
        assert accepted.tolist() == [[0, 2, 4]] and count.tolist() == [2]
        assert [predicts[i].item() for i in (0, 2, 4)] == [5, 2, 8]
    """,
        ALL,
    )


def test_upstreams_draws_over_a_tree_are_the_targets():
    probs = torch.rand(1, 5, 10, generator=torch.Generator().manual_seed(1)).softmax(dim=-1)
    probs[0, 0, 3] += 0.3
    probs /= probs.sum(dim=-1, keepdim=True)
    generator, num_draws = torch.Generator().manual_seed(2), 20_000
    first, second, both = torch.zeros(10), torch.zeros(10), 0
    for _ in range(num_draws):
        predicts, accepted = torch.full((5,), -1, dtype=torch.int32), torch.full((1, 3), -1, dtype=torch.int32)
        count = torch.empty(1, dtype=torch.int32)
        coins, last = torch.rand(1, 5, generator=generator), torch.rand(1, generator=generator)
        tree_kernels.sample(
            predicts, accepted, count, TREE_TOKENS, INDEX, NEXT_TOKEN, NEXT_SIBLING, coins, last, probs,
            torch.zeros_like(probs), 1.0, 1.0,
        )  # fmt: skip
        first[predicts[0]] += 1
        if predicts[0] == 3:
            second[predicts[1]] += 1
        both += int(count[0] == 2)
    assert (first / num_draws - probs[0, 0]).abs().sum() / 2 < 0.02
    assert (second / second.sum() - probs[0, 1]).abs().sum() / 2 < 0.03
    assert both > 0


def test_captured_look_ups_find_what_others_do(run):
    run("""
        import random
        from tetris_sglang.capacity import measure_curves
        from tetris_sglang.estimates.estimator import AcceptanceEstimator
        from tetris_sglang.drafting import propose_matches
        from tetris_sglang.runtime.cuda.ngram_graph import NgramGraphs
        from tetris_sglang.texts import RecentTexts

        rng, shares = random.Random(0), [0.0, 0.5, 1.0, 2.0]
        texts, estimate = RecentTexts(6, 50, "cuda", are_shared=False, width=64), AcceptanceEstimator(4, "cuda")
        look_up = lambda rows, depth: propose_matches(texts.find(rows, depth), estimate)
        graphs = NgramGraphs(look_up, [1, 4, 2], 4, shares, "cuda")
        slots = torch.arange(1, 6, device="cuda")
        texts.begin(slots, texts.place(range(1, 6), range(5), [0] * 5).to("cuda"))
        for _ in range(12):
            tokens = torch.tensor([[rng.randrange(6) for _ in range(3)] for _ in range(5)]).to("cuda")
            texts.append(slots, tokens, torch.full((5,), 3).to("cuda"))
            for batch_size, depth in ((3, 4), (1, 2), (4, 1)):
                rows = slots[torch.tensor(rng.sample(range(5), batch_size)).to("cuda")]
                found, expected = graphs.replay(rows, depth), look_up(rows, depth)
                for name in ("tokens", "survival", "probs", "evidence"):
                    assert getattr(found, name).tolist() == getattr(expected, name).tolist(), name
                shares_there = torch.tensor(shares).to("cuda")
                curves = measure_curves(expected.survival, expected.depths, depth, shares_there)
                assert torch.allclose(found.curves, curves, atol=1e-6)
        assert not graphs.can_run(5)
    """)


# -- streams ----------------------------------------------------------------------------------------------------------


def work(streams: Streams, stream: int, what: str, *touched: Access) -> None:
    streams.launch(stream)
    streams.touch(stream, what, touched)


WRITE, READ, ELSEWHERE = Access(100, 200, True), Access(150, 160, False), Access(200, 300, True)


def test_accesses_in_no_order_are_races():
    streams = Streams()
    work(streams, 1, "a write", WRITE)
    work(streams, 2, "another place", ELSEWHERE)
    assert streams.races == {}
    work(streams, 2, "a read", READ)
    assert streams.races == {"a write writes what a read reads": 1}


def test_two_reads_are_none_and_a_stream_is_in_order_with_itself():
    streams = Streams()
    work(streams, 1, "a read", READ)
    work(streams, 2, "a read", READ)
    work(streams, 3, "a write elsewhere", ELSEWHERE)
    work(streams, 3, "a read there", ELSEWHERE._replace(is_write=False))
    assert streams.races == {}


@pytest.mark.parametrize("order", ["event", "host waits for the event", "host waits for the stream", "host waits for all"])
def test_what_is_waited_for_comes_before(order):
    streams = Streams()
    work(streams, 1, "a write", WRITE)
    carried = streams.record(1)
    if order == "event":
        streams.wait(2, carried)
    elif order == "host waits for the event":
        streams.host_waits(carried)
    elif order == "host waits for the stream":
        streams.host_waits_for(1)
    else:
        streams.host_waits_for_all()
    work(streams, 2, "a read", READ)
    assert streams.races == {}
    # What came later is in no order yet.
    work(streams, 1, "a later write", WRITE)
    work(streams, 2, "a later read", READ)
    assert streams.races == {
        "a read reads what a later write writes": 1,
        "a later write writes what a later read reads": 1,
    }


def test_an_event_in_a_graph_is_recorded_with_every_replay(run):
    run("""
        from host_cuda.streams import STREAMS, current_stream, take_over_streams
        take_over_streams()
        x, event, other = torch.zeros(3, device="cuda"), torch.cuda.Event(external=True), torch.cuda.Stream()
        graph, own = torch.cuda.CUDAGraph(), current_stream()
        with torch.cuda.graph(graph):
            x.add_(1)
            event.record()
        for _ in range(2):
            graph.replay()
            STREAMS.launch(own)  # what comes behind the graph is not waited for
            other.wait_event(event)
            assert STREAMS.record(other.cuda_stream).get(own, 0) == STREAMS.record(own)[own] - 1
    """)


def test_fresh_memory_has_no_past_and_tables_are_exempt():
    streams, table = Streams(), torch.zeros(8)
    work(streams, 1, "a write", WRITE)
    streams.forget([Access(0, 1000, True)])
    work(streams, 2, "a write of the next owner", WRITE)
    streams.exempt(table)
    place = Access(table.data_ptr(), table.data_ptr() + 32, True)
    work(streams, 1, "a row", place)
    work(streams, 2, "another row", place)
    assert streams.races == {}


def test_what_a_kernel_has_written_is_what_has_changed():
    read, written = torch.tensor([1.0, torch.nan]), torch.tensor([1.0, torch.nan])
    snapshot = Snapshot([read, {"out": written}])
    written[0] = 2
    start, other = read.data_ptr(), written.data_ptr()
    assert snapshot.accesses() == [
        Access(start, start + 8, False),
        Access(other, other + 8, False),
        Access(other, other + 8, True),
    ]
