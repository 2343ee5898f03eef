"""The ragged attention backend against a float64 reference computed one query at a time."""

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tetris_sglang import portable_cpu

if not portable_cpu.is_active():
    pytest.skip("the portable CPU platform is inactive here", allow_module_level=True)

from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from tetris_sglang.portable_cpu import plans
from tetris_sglang.portable_cpu.attention import TorchRaggedBackend, TorchRaggedMultiStepDraftBackend
from tetris_sglang.portable_cpu.grouping import group_requests


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True, scope="module", params=[0.0, math.inf], ids=["groups", "one_group"])
def group_cost(request):
    """Requests of unlike lengths are padded apart, or all alike."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plans, "_group_cost", lambda model_runner: request.param)
        yield request.param


TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}


class Cache:
    """One layer's key and value cache with the methods of SGLang's pool that the backend calls."""

    def __init__(self, slots: int, kv_heads: int, head_dim: int, dtype: torch.dtype):
        self.keys = torch.randn(slots, kv_heads, head_dim).to(dtype)
        self.values = torch.randn(slots, kv_heads, head_dim).to(dtype)

    def get_key_buffer(self, layer_id):
        return self.keys

    def get_value_buffer(self, layer_id):
        return self.values

    def set_kv_buffer(self, layer, location, k, v):
        self.keys[location.loc] = k.view(-1, *self.keys.shape[1:])
        self.values[location.loc] = v.view(-1, *self.values.shape[1:])


class Fixture:
    """A model runner, a layer and random requests whose cache rows lie scattered."""

    def __init__(self, kv_lens, heads=4, kv_heads=2, head_dim=64, dtype=torch.float32, spare=0, seed=0):
        torch.manual_seed(seed)
        bs, width = len(kv_lens), max(kv_lens) + spare
        slots = 1 + bs * width
        self.heads, self.kv_heads, self.head_dim, self.dtype = heads, kv_heads, head_dim, dtype
        self.cache = Cache(slots, kv_heads, head_dim, dtype)
        # A poisoned row that nobody owns: whatever reads it shows.
        self.cache.keys = torch.cat((self.cache.keys, torch.full((1, kv_heads, head_dim), torch.nan, dtype=dtype)))
        self.cache.values = torch.cat((self.cache.values, torch.full((1, kv_heads, head_dim), torch.nan, dtype=dtype)))
        table = torch.full((bs + 3, width + 5), slots, dtype=torch.int32)
        self.indices = torch.randperm(bs + 3)[:bs]
        order = 1 + torch.randperm(slots - 1)
        for b, length in enumerate(kv_lens):
            table[self.indices[b], : length + spare] = order[b * width : b * width + length + spare].int()
        self.table = table
        self.runner = SimpleNamespace(
            device="cpu",
            dtype=dtype,
            use_mla_backend=False,
            model=torch.nn.Module(),
            model_config=SimpleNamespace(context_len=width),
            req_to_token_pool=SimpleNamespace(req_to_token=table),
            token_to_kv_pool=self.cache,
        )
        self.layer = SimpleNamespace(layer_id=0, tp_q_head_num=heads, tp_k_head_num=kv_heads, scaling=head_dim**-0.5)
        self.backend = TorchRaggedBackend(self.runner)

    def queries(self, count):
        return torch.randn(count, self.heads * self.head_dim).to(self.dtype)

    def reference(self, q, views):
        """Attention in float64, request by request.

        views: for every request (and draft branch) the cache rows [kv] it may read and a bool [queries, kv],
        which of them each of its queries sees. q: the queries, packed in the same order.
        """
        group = self.heads // self.kv_heads
        q = q.double().view(-1, self.heads, self.head_dim)
        outs = []
        for rows, visible in views:
            queries, q = q[: len(visible)], q[len(visible) :]
            keys = self.cache.keys[rows].double().repeat_interleave(group, 1)
            values = self.cache.values[rows].double().repeat_interleave(group, 1)
            scores = torch.einsum("qhd,khd->hqk", queries, keys) * self.head_dim**-0.5
            weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
            outs.append(torch.einsum("hqk,khd->qhd", weights, values).flatten(1))
        assert len(q) == 0
        return torch.cat(outs)

    def rows(self, b, columns):
        return self.table[self.indices[b], columns].long()

    def check(self, q, views):
        out = self.backend.attend(q, self.layer, self.backend.forward_metadata)
        assert out.shape == q.shape and out.dtype == self.dtype
        tolerance = TOLERANCE[self.dtype]
        torch.testing.assert_close(out.double(), self.reference(q, views), atol=tolerance, rtol=tolerance)


def chain_views(fixture, kv_lens, q_lens):
    """Every query sees the prefix, the queries before it and itself."""
    return [
        (fixture.rows(b, torch.arange(kv)), torch.ones(n, kv, dtype=torch.bool).tril(kv - n))
        for b, (kv, n) in enumerate(zip(kv_lens, q_lens, strict=True))
    ]


AWKWARD = [
    ([1], [1]),  # nothing cached before
    ([7], [7]),  # a first prefill
    ([700], [1]),
    ([700, 1, 2], [1, 1, 1]),
    ([5, 9, 333], [5, 5, 5]),  # one request without a prefix
    ([12, 400, 31], [3, 7, 1]),  # ragged
    ([1, 1, 6], [1, 1, 6]),
    ([130, 131], [130, 1]),  # a prefill beside a decode
    ([80, 300], [70, 80]),  # too long to fold heads
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads,kv_heads,head_dim", [(4, 4, 64), (8, 2, 64), (6, 1, 32), (4, 2, 128)])
@pytest.mark.parametrize("kv_lens,q_lens", AWKWARD)
def test_chain_matches_reference(kv_lens, q_lens, heads, kv_heads, head_dim, dtype):
    f = Fixture(kv_lens, heads, kv_heads, head_dim, dtype)
    f.backend.plan(f.indices, torch.tensor(kv_lens), torch.tensor(q_lens), max(kv_lens), max(q_lens), sum(q_lens))
    f.check(f.queries(sum(q_lens)), chain_views(f, kv_lens, q_lens))


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.integers(0, 90), st.integers(1, 8)), min_size=1, max_size=33),
    st.integers(0, 9),
    st.integers(0, 3),
)
def test_loose_bounds_change_nothing(lens, slack_kv, slack_q):
    """max_kv_len and max_q_len are upper bounds; how loose they are is invisible."""
    q_lens = [n for _, n in lens]
    kv_lens = [prefix + n for prefix, n in lens]
    f = Fixture(kv_lens, heads=4, kv_heads=2, head_dim=32)
    f.backend.plan(
        f.indices,
        torch.tensor(kv_lens),
        torch.tensor(q_lens),
        max(kv_lens) + slack_kv,  # may exceed the table's width
        max(q_lens) + slack_q,
        sum(q_lens),
    )
    f.check(f.queries(sum(q_lens)), chain_views(f, kv_lens, q_lens))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kv_lens,q_lens", [([20, 9, 300], [6, 6, 6]), ([20, 4, 61], [6, 3, 1]), ([6], [6])])
def test_tree_mask_matches_reference(kv_lens, q_lens, dtype):
    """A node sees the prefix, its ancestors and itself, in uniform and in cut trees."""
    f = Fixture(kv_lens, 8, 2, 64, dtype)
    bs, nodes = len(kv_lens), 6
    mask = torch.zeros(bs, nodes, nodes, dtype=torch.bool)
    for b in range(bs):  # node i hangs under a random earlier node
        for i in range(nodes):
            parent = int(torch.randint(0, i, ())) if i else 0
            mask[b, i] = mask[b, parent] if i else False
            mask[b, i, i] = True
    f.backend.plan(f.indices, torch.tensor(kv_lens), torch.tensor(q_lens), max(kv_lens), max(q_lens), sum(q_lens), mask)
    views = []
    for b, (kv, n) in enumerate(zip(kv_lens, q_lens, strict=True)):
        visible = torch.cat((torch.ones(n, kv - n, dtype=torch.bool), mask[b, :n, :n]), dim=1)
        views.append((f.rows(b, torch.arange(kv)), visible))
    f.check(f.queries(sum(q_lens)), views)


def forward_batch(f, mode, kv_lens, **fields):
    return SimpleNamespace(
        forward_mode=mode,
        batch_size=len(kv_lens),
        req_pool_indices=f.indices,
        seq_lens=torch.tensor(kv_lens),
        seq_lens_cpu=torch.tensor(kv_lens),
        **fields,
    )


@pytest.mark.parametrize(
    "prefixes,q_lens",
    [
        ([0, 0], [90, 4]),  # no prefix: causal kernel
        ([0, 0, 0, 0], [300, 1, 2, 65]),  # uneven: tiles
        ([40, 0, 7, 200], [300, 1, 64, 65]),  # uneven, with prefixes
        ([3], [500]),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_extend_batches_match_reference(prefixes, q_lens, dtype):
    kv_lens = [p + n for p, n in zip(prefixes, q_lens, strict=True)]
    f = Fixture(kv_lens, 4, 2, 32, dtype)
    batch = forward_batch(
        f,
        ForwardMode.EXTEND,
        kv_lens,
        extend_seq_lens=torch.tensor(q_lens, dtype=torch.int32),
        extend_seq_lens_cpu=q_lens,
        extend_prefix_lens_cpu=prefixes,
    )
    f.backend.init_forward_metadata(batch)
    f.check(f.queries(sum(q_lens)), chain_views(f, kv_lens, q_lens))


def test_uneven_prefill_is_not_padded_to_the_longest():
    q_lens = [2000] + [3] * 15
    f = Fixture(q_lens, 2, 1, 32)
    batch = forward_batch(
        f,
        ForwardMode.EXTEND,
        q_lens,
        extend_seq_lens=torch.tensor(q_lens),
        extend_seq_lens_cpu=q_lens,
        extend_prefix_lens_cpu=[0] * 16,
    )
    f.backend.init_forward_metadata(batch)
    assert sum(group.bs * group.q for group in f.backend.forward_metadata.groups) < 2 * sum(q_lens)


def test_decode_and_verify_batches_match_reference():
    prefixes = [3, 77, 20]
    f = Fixture(prefixes, spare=4)
    f.backend.init_forward_metadata(forward_batch(f, ForwardMode.DECODE, prefixes))
    f.check(f.queries(3), chain_views(f, prefixes, [1, 1, 1]))

    spec = SimpleNamespace(draft_token_num=4, tree_topk=1, custom_mask=torch.zeros(0, dtype=torch.bool))
    f.backend.init_forward_metadata(forward_batch(f, ForwardMode.TARGET_VERIFY, prefixes, spec_info=spec))
    f.check(f.queries(12), chain_views(f, [7, 81, 24], [4, 4, 4]))

    spec.ragged_verify_layout = SimpleNamespace(verify_lens=torch.tensor([1, 4, 2], dtype=torch.int32))
    batch = forward_batch(f, ForwardMode.TARGET_VERIFY, prefixes, spec_info=spec, input_ids=torch.zeros(7, dtype=torch.long))
    f.backend.init_forward_metadata(batch)
    f.check(f.queries(7), chain_views(f, [4, 81, 22], [1, 4, 2]))


def test_every_row_of_a_bidirectional_draft_s_block_sees_all_of_them():
    prefixes = [3, 77, 20]
    f = Fixture(prefixes, spare=4)
    f.runner.is_draft_worker = True
    f.runner.model.layer = RadixAttention(4, 64, 1.0, 2, layer_id=0, attn_type=AttentionType.ENCODER_ONLY)
    f.backend = TorchRaggedBackend(f.runner)
    spec = SimpleNamespace(draft_token_num=4)
    f.backend.init_forward_metadata(forward_batch(f, ForwardMode.TARGET_VERIFY, prefixes, spec_info=spec))
    views = [(f.rows(b, slice(n + 4)), torch.ones(4, n + 4, dtype=torch.bool)) for b, n in enumerate(prefixes)]
    f.check(f.queries(12), views)


def test_input_padding_leaves_real_rows_alone():
    f = Fixture([9, 30])
    f.backend.plan(f.indices, torch.tensor([9, 30]), torch.tensor([2, 3]), 30, 3, 5)
    q = f.queries(9)
    expected = f.backend.attend(q[:5], f.layer, f.backend.forward_metadata)
    f.backend.plan(f.indices, torch.tensor([9, 30]), torch.tensor([2, 3]), 30, 3, 9)
    out = f.backend.attend(q, f.layer, f.backend.forward_metadata)
    torch.testing.assert_close(out[:5], expected)
    assert out.isfinite().all()


def test_a_row_that_sees_nothing_stays_finite():
    f = Fixture([5, 5])
    f.backend.plan(f.indices, torch.tensor([5, 0]), torch.tensor([1, 1]), 5, 1, 2)
    out = f.backend.attend(f.queries(2), f.layer, f.backend.forward_metadata)
    assert out.isfinite().all()


def test_requests_do_not_see_each_other():
    """A request's output is bit for bit the same whatever stands beside it in the cache."""
    f = Fixture([40, 17], dtype=torch.float32)
    f.backend.plan(f.indices, torch.tensor([40, 17]), torch.tensor([2, 2]), 40, 2, 4)
    q = f.queries(4)
    before = f.backend.attend(q, f.layer, f.backend.forward_metadata)
    other = f.rows(1, torch.arange(17))
    f.cache.keys[other] = torch.nan
    f.cache.values[other] = torch.nan
    after = f.backend.attend(q, f.layer, f.backend.forward_metadata)
    assert torch.equal(after[:2], before[:2])
    assert after[2:].isnan().all()


@pytest.mark.parametrize("topk", [1, 3])
def test_draft_steps_see_prefix_and_own_branch(topk):
    prefixes, steps = [5, 60, 1], 4
    f = Fixture(prefixes, spare=topk * steps)
    drafts = TorchRaggedMultiStepDraftBackend(f.runner, topk, steps)
    drafts.init_forward_metadata(forward_batch(f, ForwardMode.DECODE, prefixes))
    for step, backend in enumerate(drafts.attn_backends):
        views = []
        for b, prefix in enumerate(prefixes):
            for branch in range(topk):
                own = prefix + branch * steps + torch.arange(step + 1)
                rows = f.rows(b, torch.cat((torch.arange(prefix), own)))
                # What a model's pass writes just before it reads.
                f.cache.keys[rows[-1]] = torch.randn(f.kv_heads, f.head_dim)
                f.cache.values[rows[-1]] = torch.randn(f.kv_heads, f.head_dim)
                views.append((rows, torch.ones(1, len(rows), dtype=torch.bool)))
        f.backend = backend
        f.check(f.queries(3 * topk), views)


def test_pass_writes_its_tokens_before_reading():
    f = Fixture([6])
    location = f.rows(0, torch.tensor([5]))
    k, v = torch.randn(1, 2 * 64), torch.randn(1, 2 * 64)
    batch = SimpleNamespace(out_cache_loc=location)
    f.backend.plan(f.indices, torch.tensor([6]), None, 6, 1, 1)
    q = f.queries(1)
    out = f.backend.forward_decode(q, k, v, f.layer, batch)
    torch.testing.assert_close(f.cache.keys[location].view(1, -1), k)
    torch.testing.assert_close(out.double(), f.reference(q, chain_views(f, [6], [1])), atol=2e-5, rtol=2e-5)


def test_plan_reads_nothing_back_to_the_host(monkeypatch):
    """Everything the plan needs from the host comes as an argument, where reading would be a wait."""
    f = Fixture([40, 17, 30])
    f.backend.device = "not the host"

    def forbid(*args, **kwargs):
        raise AssertionError("host synchronisation")

    for name in ("item", "tolist", "__int__", "__bool__", "__float__", "__index__", "numpy", "cpu"):
        monkeypatch.setattr(torch.Tensor, name, forbid)
    mask = torch.ones(3, 4, 4, dtype=torch.bool).tril()
    kv_lens, q_lens = torch.tensor([40, 17, 30]), torch.tensor([1, 4, 2])
    f.backend.plan(f.indices, kv_lens, q_lens, 40, 4, 7)
    f.backend.plan(f.indices, kv_lens, q_lens, 40, 4, 7, mask)
    f.backend.plan(f.indices, kv_lens, q_lens, 40, 1, 3)
    f.backend.plan_tiles(f.indices, kv_lens, q_lens, 40, 3, 7)


@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 13)), min_size=1, max_size=6),
    st.sampled_from([0.0, 0.07, 1.0]),
    st.sampled_from([0.0, 20.0, 300.0]),
)
def test_requests_are_grouped_at_the_least_cost(lens, query_cost, group_cost):
    """Against every way to cut the sorted requests."""
    kv_lens, q_lens = np.array(lens).T

    def cost(parts):
        return sum(group_cost + len(part) * kv_lens[part].max() * (1 + q_lens[part].max() * query_cost) for part in parts)

    order, sizes = group_requests(kv_lens, q_lens, query_cost=query_cost, group_cost=group_cost)
    assert sorted(order.tolist()) == list(range(len(lens)))
    chosen = cost(np.split(order, np.cumsum(sizes)[:-1]))
    by_length = np.lexsort((q_lens, kv_lens))
    places = range(1, len(lens))
    cuts = itertools.chain.from_iterable(itertools.combinations(places, n) for n in range(len(lens)))
    assert chosen <= min(cost(np.split(by_length, list(cut))) for cut in cuts) + 1e-6


@pytest.mark.parametrize("q_lens", [[1, 1, 1], [3, 1, 2]])
@pytest.mark.parametrize(("cost", "num_groups"), [(0.0, 3), (15.0, 2), (30.0, 1), (100.0, 1)])
def test_any_number_of_groups_attends_alike(cost, num_groups, q_lens):
    """One group also where a cut was considered."""
    kv_lens = [30, 10, 20]
    f = Fixture(kv_lens)
    f.backend.group_cost = cost
    plan = f.backend.plan(f.indices, torch.tensor(kv_lens), torch.tensor(q_lens), 30, max(q_lens), sum(q_lens))
    assert len(plan.groups) == num_groups
    f.check(f.queries(sum(q_lens)), chain_views(f, kv_lens, q_lens))


def test_groups_follow_lengths():
    order, sizes = group_requests(np.array([9, 500, 8]), np.array([1, 1, 1]), query_cost=0.0, group_cost=50.0)
    assert order.tolist() == [2, 0, 1] and sizes == [2, 1]


@pytest.mark.parametrize(
    "change,reason",
    [
        ({"sliding_window_size": 128}, "a sliding window"),
        ({"logit_cap": 30.0}, "a cap on attention logits"),
        ({"is_cross_attention": True}, "cross attention"),
        ({"attn_type": AttentionType.ENCODER_ONLY}, "bidirectional attention"),
    ],
)
def test_other_kinds_of_attention_are_refused_by_name(change, reason):
    f = Fixture([1])
    layer = plans.RadixAttention(2, 32, 1.0, 2, layer_id=0)
    for name, value in change.items():
        setattr(layer, name, value)
    f.runner.is_draft_worker = False
    f.runner.model.add_module("attn", layer)
    with pytest.raises(ValueError, match=reason):
        TorchRaggedBackend(f.runner)


def test_latent_attention_is_refused_by_name():
    f = Fixture([1])
    f.runner.use_mla_backend = True
    with pytest.raises(ValueError, match="multi-head latent attention"):
        TorchRaggedBackend(f.runner)
