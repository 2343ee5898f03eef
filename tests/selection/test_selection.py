"""Selection: optimal, prefix-closed, tie-stable, and the same in every form it is written."""

import math
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tetris_sglang.runtime.operations import get_operations
from tetris_sglang.selection import (
    SMALLEST_SURVIVAL,
    get_selector,
    select_oracle,
    select_prefixes,
    select_prefixes_reference,
    select_random,
    select_uniform,
    survival_from_probs,
)

# Few distinct values: most tokens tie, within a chain and across chains, at 0 and at 1 too.
TIED_PROBS = st.sampled_from([0.0, 0.25, 0.5, 0.5, 1.0, 1.0])
ANY_PROBS = st.floats(0, 1, width=32)


@st.composite
def batches(draw, probs=TIED_PROBS | ANY_PROBS, max_batch=12, max_depth=8):
    """(survival [batch, max_draft], capacity_tokens, max_draft_lens or None)"""
    batch, depth = draw(st.integers(1, max_batch)), draw(st.integers(1, max_depth))
    chains = st.lists(st.lists(probs, min_size=depth, max_size=depth), min_size=batch, max_size=batch)
    survival = survival_from_probs(torch.tensor(draw(chains)))
    capacity = draw(st.integers(0, batch * depth + 3))
    caps = draw(st.none() | st.lists(st.integers(0, depth + 1), min_size=batch, max_size=batch))
    return survival, capacity, None if caps is None else torch.tensor(caps)


def expected_accepted(survival: list[list[float]], draft_lens: list[int]) -> float:
    return math.fsum(math.fsum(chain[:length]) for chain, length in zip(survival, draft_lens, strict=True))


def random_survival(batch: int, depth: int, seed: int = 0) -> torch.Tensor:
    """Survivals without ties, zeros or ones."""
    generator = torch.Generator().manual_seed(seed)
    survival = survival_from_probs(0.3 + 0.65 * torch.rand(batch, depth, generator=generator))
    assert survival.unique().numel() == survival.numel()
    return survival


# --- what is chosen -----------------------------------------------------------------------------------------


def test_docstring_example():
    survival = torch.tensor([[0.9, 0.8], [0.5, 0.1]])
    assert select_prefixes(survival, 3).tolist() == [2, 1]
    assert select_prefixes_reference(survival.tolist(), 3) == [2, 1]


@given(batches(max_batch=4, max_depth=4))
def test_no_prefix_closed_choice_beats_it(case):
    survival, capacity, caps = case
    chains, depth = survival.tolist(), survival.shape[1]
    limits = [depth] * len(chains) if caps is None else [min(depth, cap) for cap in caps.tolist()]
    best = max(
        expected_accepted(chains, choice)
        for choice in product(*(range(limit + 1) for limit in limits))
        if sum(choice) <= capacity
    )
    for draft_lens in (
        select_prefixes(survival, capacity, caps).tolist(),
        select_prefixes_reference(chains, capacity, limits),
    ):
        assert sum(draft_lens) <= capacity
        assert all(length <= limit for length, limit in zip(draft_lens, limits, strict=True))
        assert expected_accepted(chains, draft_lens) == pytest.approx(best, abs=1e-12)


@given(batches())
def test_batched_equals_the_paper_ties_included(case):
    survival, capacity, caps = case
    expected = select_prefixes_reference(survival.tolist(), capacity, None if caps is None else caps.tolist())
    draft_lens = select_prefixes(survival, capacity, caps)
    assert draft_lens.tolist() == expected
    assert draft_lens.dtype == torch.int32


@pytest.mark.parametrize("batch, depth", [(1, 16), (33, 6), (257, 3), (600, 16)])
@pytest.mark.parametrize("levels", [2, 5, 1000])
def test_batched_equals_the_paper_at_serving_sizes(batch, depth, levels):
    generator = torch.Generator().manual_seed(batch * levels)
    probs = torch.randint(0, levels + 1, (batch, depth), generator=generator) / levels
    survival = survival_from_probs(probs)
    caps = torch.randint(0, depth + 1, (batch,), generator=generator)
    for capacity in (1, batch // 2, 2 * batch, batch * depth):
        for max_draft_lens in (None, caps):
            expected = select_prefixes_reference(
                survival.tolist(), capacity, None if max_draft_lens is None else max_draft_lens.tolist()
            )
            assert select_prefixes(survival, capacity, max_draft_lens).tolist() == expected


@given(batches())
def test_chosen_tokens_are_the_top_of_the_batch(case):
    """Prefix-closed as a statement about tokens: none left out is worth more than one taken."""
    survival, capacity, _ = case
    draft_lens = select_prefixes(survival, capacity)
    taken = torch.arange(survival.shape[1]) < draft_lens[:, None]
    positive = survival > 0
    assert int(taken.sum()) == min(capacity, int(positive.sum()))
    assert not (taken & ~positive).any()
    if taken.any() and not taken.all():
        assert survival[taken].min() >= survival[~taken].max()


@given(batches())
def test_enough_capacity_takes_every_token_that_can_be_accepted(case):
    survival, _, _ = case
    draft_lens = select_prefixes(survival, survival.numel())
    assert draft_lens.tolist() == (survival > 0).sum(dim=1).tolist()


@given(st.randoms(use_true_random=False), st.integers(1, 16), st.integers(1, 8), st.integers(0, 60))
def test_order_of_requests_does_not_matter_without_ties(random, batch, depth, capacity):
    survival = random_survival(batch, depth, seed=batch * 100 + depth)
    permutation = list(range(batch))
    random.shuffle(permutation)
    draft_lens = select_prefixes(survival, capacity)
    assert select_prefixes(survival[permutation], capacity).tolist() == draft_lens[permutation].tolist()


@given(batches())
def test_more_capacity_never_takes_a_token_away(case):
    survival, capacity, caps = case
    less, more = (select_prefixes(survival, tokens, caps) for tokens in (capacity, capacity + 1))
    assert (more >= less).all() and int((more - less).sum()) <= 1


@pytest.mark.parametrize(
    "survival, capacity, expected",
    [
        pytest.param([[1.0, 1.0], [1.0, 1.0], [1.0, 1.0]], 4, [2, 1, 1], id="all ones: shallow, then low index"),
        pytest.param([[0.5, 0.5, 0.5], [0.5, 0.1, 0.1]], 2, [1, 1], id="a tie goes to the shallower token"),
        pytest.param([[0.5, 0.2], [0.5, 0.2], [0.9, 0.2]], 2, [1, 0, 1], id="then to the lower request"),
        pytest.param([[0.0, 0.0], [0.3, 0.0]], 4, [0, 1], id="zeros stay out though capacity is left"),
        pytest.param([[0.0, 0.0]], 1, [0], id="nothing worth verifying"),
        pytest.param([[0.9, 0.8], [0.7, 0.6]], 0, [0, 0], id="no capacity"),
        pytest.param([[2**-149, 0.0]], 2, [1], id="a subnormal survival is not zero"),
    ],
)
def test_ties_zeros_and_ones(survival, capacity, expected):
    assert select_prefixes(torch.tensor(survival), capacity).tolist() == expected
    assert select_prefixes_reference(survival, capacity) == expected


def test_a_capped_request_leaves_its_capacity_to_others():
    survival = torch.tensor([[0.9, 0.8, 0.7], [0.3, 0.2, 0.1]])
    assert select_prefixes(survival, 3).tolist() == [3, 0]
    assert select_prefixes(survival, 3, torch.tensor([1, 3])).tolist() == [1, 2]
    assert select_prefixes(survival, 3, torch.tensor([0, 9])).tolist() == [0, 3]


@pytest.mark.parametrize("shape", [(0, 4), (3, 0)])
def test_empty_batch_or_no_drafts(shape):
    assert select_prefixes(torch.ones(shape), 5).tolist() == [0] * shape[0]


def test_upstream_selection_agrees():
    """SGLang's DSPARK selector, fed with the same probabilities. Its verify_lens counts the root; its
    threshold for leaving tokens out (survival_eps) is set to the smallest float, which is our "above 0"."""
    from sglang.kernels.ops.speculative.dspark.dspark_schedule import ScheduleVerifyLensTopk

    for seed in range(60):
        generator = torch.Generator().manual_seed(seed)
        batch, depth = 1 + seed, 1 + seed % 8
        if seed % 2:  # distinct
            probs = 0.3 + 0.65 * torch.rand(batch, depth, generator=generator)
        else:  # many ties
            probs = torch.randint(0, 4, (batch, depth), generator=generator) / 3
        cfg = SimpleNamespace(min_verify_len=1, survival_eps=2.0**-149, resolved_max_verify_len=lambda depth=depth: depth + 1)
        survival = survival_from_probs(probs)
        for capacity in (0, 1, batch, 2 * batch, batch * depth + 1):
            verify_lens = ScheduleVerifyLensTopk.execute(confidence=probs, budget=capacity, cfg=cfg)
            draft_lens = select_prefixes(survival, capacity)
            assert (verify_lens - 1).tolist() == draft_lens.tolist()


# --- requests with wishes -----------------------------------------------------------------------------------


@given(batches(), st.data())
def test_weighted_selection_takes_the_largest_weighted_survivals(case, data):
    """Through the operation that serves; against a sort in plain Python, ties included."""
    survival, capacity, _ = case
    batch, depth = survival.shape
    weight = st.sampled_from([0.0, 1.0, 1.0, 4.0, 1 / 64, 64.0]) | st.floats(1 / 64, 64, width=32)
    weights = torch.tensor(data.draw(st.lists(weight, min_size=batch, max_size=batch)))
    num_speculating = int((weights > 0).sum())
    capacity = min(capacity, num_speculating * depth)
    draft_lens = get_operations("cpu", "tetris").select_drafts(survival, capacity, weights)

    # Scaled as served; what is lifted off 0 ranks last, shallower first.
    worth = (survival * (weights / 512)[:, None]).clamp(min=SMALLEST_SURVIVAL).tolist()
    tokens = [(r, j) for r in range(batch) if weights[r] > 0 for j in range(depth)]
    taken = sorted(tokens, key=lambda token: (-worth[token[0]][token[1]], token[1], token[0]))[:capacity]
    assert int(draft_lens.sum()) == capacity
    assert not draft_lens[weights == 0].any()
    assert {(r, j) for r, length in enumerate(draft_lens.tolist()) for j in range(length)} == set(taken)


@given(batches(), st.integers(0, 11), st.floats(1, 64, width=32))
def test_more_weight_never_takes_a_token_away(case, request, factor):
    survival, capacity, _ = case
    request %= survival.shape[0]
    capacity = min(capacity, survival.numel())
    weights = torch.ones(len(survival))
    operations = get_operations("cpu", "tetris")
    before = operations.select_drafts(survival, capacity, weights)
    weights[request] = factor
    after = operations.select_drafts(survival, capacity, weights)
    assert after[request] >= before[request]


# --- survival -----------------------------------------------------------------------------------------------


@given(st.lists(st.lists(st.floats(width=32), min_size=5, max_size=5), min_size=1, max_size=6))
def test_survival_is_a_probability_and_never_rises(draft_probs):
    survival = survival_from_probs(torch.tensor(draft_probs))
    assert survival.dtype == torch.float32
    assert ((survival >= 0) & (survival <= 1)).all()
    assert (survival[:, 1:] <= survival[:, :-1]).all()
    select_prefixes(survival, 3)


def test_survival_multiplies_along_the_chain():
    survival = survival_from_probs(torch.tensor([[0.5, 0.5, 0.25], [1.0, 0.0, 1.0]], dtype=torch.bfloat16))
    assert survival.tolist() == [[0.5, 0.25, 0.0625], [1.0, 0.0, 0.0]]


def test_nan_ends_a_chain_and_is_never_selected():
    nan, inf = math.nan, math.inf
    survival = survival_from_probs(torch.tensor([[0.9, nan, 1.0], [nan, 1.0, 1.0], [1.0000001, -0.1, inf]]))
    assert survival.tolist() == [[pytest.approx(0.9), 0, 0], [0, 0, 0], [1, 0, 0]]
    assert select_prefixes(survival, 9).tolist() == [1, 0, 1]


# --- baselines ----------------------------------------------------------------------------------------------


@given(batches())
def test_uniform_spreads_capacity_evenly(case):
    survival, capacity, _ = case
    batch, depth = survival.shape
    each, remainder = divmod(min(capacity, batch * depth), batch)
    expected = [each + (request < remainder) for request in range(batch)]
    assert select_uniform(survival, capacity).tolist() == expected


def test_uniform_gives_what_a_capped_request_cannot_use_to_others():
    assert select_uniform(torch.zeros(3, 4), 7, torch.tensor([1, 4, 4])).tolist() == [1, 3, 3]


def test_random_uses_the_capacity_within_the_caps():
    caps = torch.tensor([0, 1, 6, 3])
    totals = torch.zeros(4)
    for seed in range(300):
        draws = [select_random(torch.zeros(4, 6), 5, caps, generator=torch.Generator().manual_seed(seed)) for _ in range(2)]
        assert draws[0].tolist() == draws[1].tolist()
        assert int(draws[0].sum()) == 5 and (draws[0] <= caps).all()
        totals += draws[0]
    assert (totals[1:] > 0).all()


def test_random_shares_follow_the_hypergeometric_law():
    """N = 32 shuffled tokens, n = 10 taken, K = 4 in a chain: mean nK/N, variance nK/N (1-K/N) (N-n)/(N-1)."""
    generator = torch.Generator().manual_seed(0)
    shares = torch.stack([select_random(torch.zeros(8, 4), 10, generator=generator) for _ in range(2000)]).double()
    variance = 10 * (4 / 32) * (28 / 32) * (22 / 31)
    standard_error = math.sqrt(variance / 2000)
    assert (shares.mean(dim=0) - 10 / 8).abs().max() < 5 * standard_error
    assert shares.var().item() == pytest.approx(variance, rel=0.05)


@given(batches(), st.integers(0, 2**32 - 1))
def test_oracle_bounds_every_rule(case, seed):
    survival, capacity, caps = case
    batch, depth = survival.shape
    generator = torch.Generator().manual_seed(seed)
    num_accepted = torch.randint(0, depth + 1, (batch,), generator=generator)

    def accepted(draft_lens):
        return int(torch.minimum(draft_lens, num_accepted).sum())

    oracle = select_oracle(survival, capacity, caps, num_accepted=num_accepted)
    assert accepted(oracle) == int(oracle.sum()) <= capacity
    for name in ("tetris", "uniform", "random"):
        assert accepted(oracle) >= accepted(get_selector(name)(survival, capacity, caps))


# --- boundaries ---------------------------------------------------------------------------------------------


def test_bad_input_is_named():
    survival = torch.ones(2, 3)
    with pytest.raises(ValueError, match="capacity_tokens must be >= 0, got -1"):
        select_prefixes(survival, -1)
    with pytest.raises(ValueError, match="capacity_tokens must be >= 0, got -1"):
        select_prefixes_reference(survival.tolist(), -1)
    with pytest.raises(ValueError, match=r"survival must be floats \[batch, max_draft\]"):
        select_prefixes(torch.ones(3), 1)
    with pytest.raises(ValueError, match=r"survival must be floats \[batch, max_draft\]"):
        select_prefixes(torch.ones(2, 3, dtype=torch.int64), 1)
    with pytest.raises(ValueError, match=r"max_draft_lens must be \[2\]"):
        select_prefixes(survival, 1, torch.tensor([1]))
    with pytest.raises(ValueError, match=r"probs must be \[batch, max_draft\]"):
        survival_from_probs(torch.ones(3))
    with pytest.raises(ValueError, match="unknown selector 'triton'; choose one of tetris, uniform, random"):
        get_selector("triton")


def test_selection_never_reads_a_value_on_the_host():
    """Meta tensors have no values: whatever waits for the device, or takes its shape from data, raises."""
    probs = torch.empty(16, 6, device="meta")
    caps = torch.empty(16, dtype=torch.int64, device="meta")
    for selector in (select_prefixes, select_uniform, select_random):
        assert selector(survival_from_probs(probs), 20, caps).shape == (16,)
    with pytest.raises((RuntimeError, NotImplementedError)):
        select_prefixes_reference(probs.tolist(), 20)  # the check can fail


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_selection_runs_in_a_cuda_graph_without_a_sync():
    static, static_caps = torch.zeros(64, 6, device="cuda"), torch.zeros(64, dtype=torch.int64, device="cuda")
    select_prefixes(static, 100, static_caps)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.graph(graph):
            draft_lens = select_prefixes(static, 100, static_caps)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for seed in range(3):
        survival, caps = random_survival(64, 6, seed), torch.randint(0, 7, (64,))
        static.copy_(survival)
        static_caps.copy_(caps)
        graph.replay()
        assert draft_lens.tolist() == select_prefixes(survival, 100, caps).tolist()
