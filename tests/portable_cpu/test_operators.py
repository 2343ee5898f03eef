"""The plain-torch operators against loops written from upstream's kernels, and against those kernels."""

import json
import os
import subprocess
import sys
import textwrap

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tetris_sglang import portable_cpu
from tetris_sglang.portable_cpu import operators
from tetris_sglang.portable_cpu.activate import activate


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def table(rows=9, columns=40):
    return torch.randperm(rows * columns, generator=torch.Generator().manual_seed(0)).int().view(rows, columns)


spans = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=9)


@settings(max_examples=50)
@given(spans)
def test_spans_are_written_and_read_request_after_request(spans):
    indices = torch.randperm(9)[: len(spans)]
    start = torch.tensor([s for s, _ in spans], dtype=torch.int32)
    end = start + torch.tensor([n for _, n in spans], dtype=torch.int32)
    slots = 1000 + torch.arange(int((end - start).sum()))
    written, expected = table(), table()
    operators.assign_req_to_token_pool_cpu(indices, written, start, end, slots, 40)
    at = 0
    for row, s, e in zip(indices.tolist(), start.tolist(), end.tolist(), strict=True):
        expected[row, s:e] = slots[at : at + e - s]
        at += e - s
    assert torch.equal(written, expected)

    read = torch.full((len(slots) + 3,), -7)
    operators.assign_extend_cache_locs_cpu(indices, written, start, end, read, 40)
    assert torch.equal(read, torch.cat((slots, torch.full((3,), -7))))


@pytest.mark.parametrize("topk,steps", [(1, 5), (3, 4)])
def test_draft_slots_follow_the_sequence(topk, steps):
    t = table()
    indices, seq_lens = torch.tensor([4, 0, 8]), torch.tensor([3, 17, 1])
    out = torch.empty(3 * topk * steps, dtype=torch.int64)
    operators.assign_draft_cache_locs_contiguous_cpu(indices, t, seq_lens, out, 40, topk, steps)
    expected = [t[i, n : n + topk * steps] for i, n in zip(indices.tolist(), seq_lens.tolist(), strict=True)]
    assert torch.equal(out, torch.cat(expected).long())


# -------------------------------------------------------------------------------- trees


def random_tree(n, generator):
    """Parents of n nodes, node 0 the root, every parent before its children."""
    return [-1] + [int(torch.randint(0, i, (), generator=generator)) for i in range(1, n)]


def links(parents):
    """First-child and next-sibling links in the order in which upstream builds them."""
    n = len(parents)
    next_token, next_sibling = [-1] * n, [-1] * n
    for i in range(n - 1, 0, -1):
        next_sibling[i] = next_token[parents[i]]
        next_token[parents[i]] = i
    return next_token, next_sibling


def tree_batch(bs, n, seed):
    generator = torch.Generator().manual_seed(seed)
    parents = [random_tree(n, generator) for _ in range(bs)]
    both = [links(p) for p in parents]
    return parents, torch.tensor([a for a, _ in both]), torch.tensor([b for _, b in both])


@pytest.mark.parametrize("bs,n", [(1, 1), (3, 2), (5, 7), (4, 16), (2, 33)])
def test_parents_come_back_from_links(bs, n):
    parents, next_token, next_sibling = tree_batch(bs, n, seed=n)
    expected = torch.tensor([[0] + p[1:] for p in parents])
    assert torch.equal(operators.tree_parents(next_token, next_sibling), expected)


def test_nodes_cut_from_a_tree_are_their_own_parents():
    """A chain of 5 cut to its first 3 nodes: the links past the cut are gone."""
    next_token = torch.tensor([[1, 2, -1, -1, -1]])
    next_sibling = torch.full((1, 5), -1)
    assert operators.tree_parents(next_token, next_sibling).tolist() == [[0, 0, 1, 3, 4]]


def greedy_walk(candidates, next_token, next_sibling, target, retrive, depth):
    """One request, step by step, as upstream's kernel walks it."""
    predicts, index, cur = {}, [retrive[0]], 0
    node = 0
    while len(index) < depth:
        cur = next_token[node]
        while cur != -1 and candidates[cur] != target[node]:
            cur = next_sibling[cur]
        if cur == -1:
            break
        predicts[retrive[node]] = target[node]
        node = cur
        index.append(retrive[node])
    predicts[retrive[node]] = target[node]
    return predicts, index


@settings(max_examples=60)
@given(st.integers(1, 6), st.integers(1, 12), st.integers(1, 8), st.integers(0, 10**6), st.booleans())
def test_greedy_verification_walks_like_upstream(bs, n, depth, seed, chain):
    generator = torch.Generator().manual_seed(seed)
    if chain:
        next_token = torch.tensor([list(range(1, n)) + [-1]] * bs)
        next_sibling = torch.full((bs, n), -1)
    else:
        _, next_token, next_sibling = tree_batch(bs, n, seed)
    # Three tokens, so that paths are long and siblings collide.
    candidates = torch.randint(0, 3, (bs, n), generator=generator)
    target = torch.randint(0, 3, (bs, n), generator=generator)
    retrive = torch.arange(bs * n).view(bs, n)
    predicts = torch.full((bs * n,), -5, dtype=torch.int32)
    accept_index = torch.full((bs, depth), -1, dtype=torch.int32)
    accept_num = torch.empty(bs, dtype=torch.int32)
    operators.verify_tree_greedy_cpu(predicts, accept_index, accept_num, candidates, retrive, next_token, next_sibling, target)
    expected = torch.full((bs * n,), -5, dtype=torch.int32)
    for b in range(bs):
        path, index = greedy_walk(
            candidates[b].tolist(),
            next_token[b].tolist(),
            next_sibling[b].tolist(),
            target[b].tolist(),
            retrive[b].tolist(),
            depth,
        )
        for row, token in path.items():
            expected[row] = token
        assert accept_index[b].tolist() == index + [-1] * (depth - len(index))
        assert int(accept_num[b]) == len(index) - 1
    assert torch.equal(predicts, expected)


# -------------------------------------------------------------------------------- bookkeeping


def test_bonus_is_the_last_accepted_token():
    tokens = torch.arange(100, 112).view(3, 4)
    bonus = torch.full((3,), -1, dtype=torch.int32)
    operators.fill_bonus_tokens_cpu(tokens.view(-1), torch.tensor([1, 4, 2], dtype=torch.int32), bonus, 4)
    assert bonus.tolist() == [100, 107, 109]


def test_accepted_slots_are_packed():
    slots = torch.arange(50, 62)
    out = torch.zeros(6, dtype=torch.int64)
    index = torch.tensor([[0, 2, -1], [4, -1, -1], [8, 9, 11]], dtype=torch.int32)
    operators.fill_accept_out_cache_loc_cpu(index, slots, out)
    assert out.tolist() == [50, 52, 54, 58, 59, 61]


def test_cache_rows_move_even_when_ranges_overlap():
    buffers = [torch.randn(20, 2, 8), torch.randn(20, 2, 4)]
    expected = [b.clone() for b in buffers]
    target, source = torch.tensor([3, 4, 5]), torch.tensor([4, 5, 6])
    for b in expected:
        b[target] = b[source]
    pointers = torch.tensor([b.data_ptr() for b in buffers], dtype=torch.int64)
    widths = torch.tensor([b[0].nbytes for b in buffers], dtype=torch.int64)
    operators.copy_all_layer_kv_cache_cpu(pointers, widths, target, source)
    assert all(torch.equal(a, b) for a, b in zip(buffers, expected, strict=True))


@pytest.mark.skipif(not portable_cpu.is_active(), reason="the portable CPU platform is inactive here")
def test_unserved_operators_name_themselves():
    activate()
    import sgl_kernel

    for name in operators.UNSUPPORTED:
        with pytest.raises(NotImplementedError, match=name):
            getattr(sgl_kernel, name)()


# -------------------------------------------------------------------------------- upstream's kernels


ORACLE = textwrap.dedent(
    """
    import torch, json, sys
    from sglang.kernels.ops.speculative import spec_tree
    from sglang.kernels.ops.attention.table_qk_norm_rope import table_qk_norm_rope_
    from sglang.kernels.ops.speculative.gather_spec_extras import gather_spec_extras
    from tetris_sglang.portable_cpu import operators
    torch.manual_seed(0)
    different = []

    def select(bs, topk, steps, n):
        # What upstream's draft loop hands to the tree builder, from random scores.
        width = topk + (steps - 1) * topk * topk
        parents = torch.cat(
            [torch.arange(-1, topk).repeat(bs, 1)]
            + [
                torch.stack([torch.randperm(topk * topk)[:topk] for _ in range(bs)]) + topk + topk * topk * s
                for s in range(steps - 2)
            ],
            dim=1,
        )
        scores = torch.rand(bs, width)
        return parents, torch.sort(torch.topk(scores, n - 1, dim=-1).indices).values

    for bs, topk, steps, n in [(3, 2, 3, 5), (2, 4, 4, 16), (4, 3, 2, 8), (2, 1, 5, 6), (1, 8, 5, 32)]:
        for mode in (0, 1):
            if topk == 1:
                parents, selected = torch.zeros(bs, 0, dtype=torch.long), torch.arange(steps).repeat(bs, 1)
                parents = torch.arange(-1, steps - 1).repeat(bs, 1)
            else:
                parents, selected = select(bs, topk, steps, n)
            lens = torch.randint(1, 20, (bs,))
            results = []
            for build in (spec_tree.sgl_build_tree_kernel_triton, operators.build_tree_kernel_efficient_cpu):
                size = n * n * bs + (int(lens.sum()) * n if mode == 0 else 0)
                mask = torch.ones(size, dtype=torch.bool)
                positions = torch.empty(bs * n, dtype=torch.long)
                retrieve = torch.full((3, bs, n), -1, dtype=torch.long)
                build(parents, selected, lens, mask, positions, *retrieve, topk, steps, n, mode)
                results.append((mask, positions, retrieve))
            for name, a, b in zip(("mask", "positions", "links"), *results):
                if not torch.equal(a, b):
                    different.append([name, bs, topk, steps, n, mode])

    buffers = torch.rand(9, 1), torch.randint(0, 9, (9, 1)), torch.randint(0, 9, (9,)), torch.rand(9, 5)
    index = torch.tensor([3, 0, 8, 3])
    for hidden in (buffers[3], None):
        a = gather_spec_extras(index, *buffers[:3], hidden)
        b = operators.gather_spec_extras(index, *buffers[:3], hidden)
        if not all(x is y is None or torch.equal(x, y) for x, y in zip(a, b)):
            different.append(["gather_spec_extras"])
    for rows, num_q, num_k, dim in ((1, 2, 1, 16), (5, 4, 2, 64)):
        qkv = torch.randn(rows, (num_q + 2 * num_k) * dim + 8).to(torch.bfloat16)[:, :-8]
        weights = [torch.randn(dim).to(torch.bfloat16) for _ in range(2)]
        angles = torch.rand(40, dim // 2) * 6
        table = torch.cat((angles.cos(), angles.sin()), dim=1)
        given = (torch.randint(0, 40, (rows,)), *weights, table, num_q, num_k, dim, 1e-6)
        a, b = qkv.clone(), qkv.clone()
        table_qk_norm_rope_(a, *given)
        operators.table_qk_norm_rope_(b, *given)
        v = slice((num_q + num_k) * dim, None)
        if not (torch.equal(a[:, v], b[:, v]) and torch.allclose(a.float(), b.float(), atol=0.02, rtol=0.01)):
            different.append(["table_qk_norm_rope_", rows])
        if torch.equal(a, qkv):
            different.append(["nothing was done"])
    print(json.dumps(different))
    """
)


@pytest.mark.kernels
def test_trees_and_gathers_equal_upstreams_triton_kernels():
    """Upstream's own kernels, run by Triton's interpreter in a process of their own."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ORACLE],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == []
