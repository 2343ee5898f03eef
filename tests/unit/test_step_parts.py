"""The pieces of a TETRIS step against plain Python."""

from __future__ import annotations

from array import array
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from tetris_sglang.portable_cpu.activate import activate

activate()  # as SGLang does, before its modules are imported

from sglang.srt.sampling.penaltylib import (
    BatchedFrequencyPenalizer,
    BatchedMinNewTokensPenalizer,
    BatchedPenalizerOrchestrator,
    BatchedPresencePenalizer,
    BatchedRepetitionPenalizer,
)

from tetris_sglang.drafting import Grid, Proposal, TreeShape, ancestor_mask, make_grid
from tetris_sglang.kernels.tree_mask import pack_tree_mask_reference
from tetris_sglang.runtime import inventory
from tetris_sglang.runtime.drafts.passes import most_likely
from tetris_sglang.runtime.drafts.windows import Window, align_right, make_draft_input, read_window
from tetris_sglang.runtime.logits import adjust_logits, count_written
from tetris_sglang.runtime.operations import get_operations, warm_up
from tetris_sglang.runtime.reports.phases import PhaseTimer
from tetris_sglang.runtime.texts import RequestTexts
from tetris_sglang.runtime.verify import _link_nodes, commit_paths, make_verify_input


def pack(draft_lens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """requests and columns of the rows that these drafts take."""
    rows = [(request, column) for request, n in enumerate(draft_lens) for column in range(n + 1)]
    return torch.tensor(rows).unbind(1)


@pytest.mark.parametrize("selection", ["tetris", "uniform", "random"])
def test_selection_fills_its_capacity_whatever_the_draft_thinks(selection):
    """The host counts on it: the number of verified rows is never read back."""
    survival = torch.tensor([[0.9, 1e-30, 1e-38], [0.0, 0.0, 0.0], [1e-38, 0.0, 0.0]])
    for capacity in (1, 4, 8, 9):
        draft_lens = get_operations("cpu", selection).select(survival, capacity)
        assert draft_lens.sum() == capacity


def test_warming_up_runs_every_operation_for_every_power_of_two():
    batches = []
    operations = get_operations("cpu", "tetris")

    def select(survival, capacity_tokens, weights=None):
        batches.append((*survival.shape, capacity_tokens, weights is not None))
        return operations.select(survival, capacity_tokens, weights)

    drawn = []
    watched = operations._replace(select=select, draw=lambda *rows: drawn.append(rows))
    warm_up(watched, 20, [3, 5], 6, torch.zeros(21, 16, dtype=torch.int32))
    assert drawn
    sizes, depths, are_weighted = (1, 2, 4, 8, 16, 20), (3, 5), (False, True)
    assert batches == [(size, d, size, weighted) for size in sizes for d in depths for weighted in are_weighted]


@pytest.mark.parametrize("count", [1, 3])
def test_most_likely_tokens_and_their_probabilities(count):
    logits = torch.randn(7, 100, generator=torch.Generator().manual_seed(0)) * 4
    tokens, probs = most_likely(logits, count)
    expected = torch.softmax(logits, dim=-1).topk(count, dim=-1)
    assert tokens.tolist() == expected.indices.tolist()
    torch.testing.assert_close(probs, expected.values)


def test_draft_input_survives_the_scheduler_filtering_and_merging_batches():
    def make(tokens: list[list[int]], counts: list[int]):
        tokens = torch.tensor(tokens)
        states = tokens[:, :, None].float() + torch.tensor([0.0, 0.5])
        return make_draft_input(Window(tokens, torch.tensor(counts), states), tokens[:, -1].int())

    first = make([[1, 2, 3], [4, 5, 6], [7, 8, 9]], [3, 1, 2])
    first.filter_batch(torch.tensor([0, 2]))
    first.merge_batch(make([[10, 11, 12]], [1]))
    window = read_window(first)
    assert window.tokens.tolist() == [[1, 2, 3], [7, 8, 9], [10, 11, 12]]
    assert window.counts.tolist() == [3, 2, 1]
    assert window.hidden_states[:, :, 1].tolist() == [[1.5, 2.5, 3.5], [7.5, 8.5, 9.5], [10.5, 11.5, 12.5]]
    assert first.bonus_tokens.tolist() == [3, 9, 12]


def test_windows_are_aligned_to_their_ends():
    values = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]])
    aligned = align_right(values, torch.tensor([4, 1, 3]))
    assert aligned[0].tolist() == [1, 2, 3, 4]
    assert aligned[1, -1] == 5
    assert aligned[2, 1:].tolist() == [9, 10, 11]
    states = align_right(values[:, :, None].expand(-1, -1, 2), torch.tensor([2, 2, 2]))
    assert states[:, 2:, 1].tolist() == [[1, 2], [5, 6], [9, 10]]


# A tree of the root 0 and nodes 1..5, of which 2 and 4 hang below 1, and 5 below 4; column 6 holds nothing.
TREE = TreeShape(torch.tensor([[0, 0, 1, 0, 1, 4]]), torch.tensor([[0, 1, 2, 1, 2, 3]]))
PROPOSAL = Proposal(torch.tensor([[11, 12, 13, 14, 15]]), torch.tensor([[0.9, 0.8, 0.5, 0.4, 0.1]]), TREE)


def test_a_trees_rows_take_their_depths_positions_and_their_columns_slots():
    grid = make_grid(torch.tensor([10]), PROPOSAL, 3, 7)
    req_to_token = torch.arange(100, 140).view(1, 40)
    packed = get_operations("cpu", "tetris").pack_grid(
        torch.tensor([4], dtype=torch.int32), grid, torch.tensor([20]), req_to_token, torch.tensor([0]), 5
    )
    assert packed.input_ids.tolist() == [10, 11, 12, 13, 14]
    assert packed.positions.tolist() == [20, 21, 22, 21, 22]
    assert packed.slots.tolist() == [120, 121, 122, 123, 124]


def test_flashinfers_flat_mask_is_the_packed_one():
    """An eager pass and a captured one see the same."""
    lens, prefixes = [4, 1], [3, 5]
    ancestors = ancestor_mask(torch.cat((TREE.parents, torch.zeros_like(TREE.parents))), 3)
    verify_lens = torch.tensor(lens, dtype=torch.int32)
    spec_info = make_verify_input(
        width=6,
        input_ids=None,
        positions=None,
        ancestors=ancestors,
        layout=SimpleNamespace(verify_lens=verify_lens, extend_start_loc=torch.tensor([0, 4])),
    )
    kv_lens = [p + n for p, n in zip(prefixes, lens, strict=True)]
    flat = spec_info._flat_mask(torch.tensor(kv_lens)).tolist()
    packed = pack_tree_mask_reference(ancestors, lens, kv_lens)
    bits = [byte >> place & 1 for byte in packed for place in range(8)]
    assert flat == [bool(bit) for bit in bits[:28] + bits[32:38]]


def test_sglang_walks_the_links_of_a_tree():
    grid = make_grid(torch.tensor([10]), PROPOSAL, 3, 7)
    children, siblings = _link_nodes(grid.shape)
    assert children.tolist() == [[1, 2, -1, -1, 5, -1, -1]]
    assert siblings.tolist() == [[-1, 3, 4, -1, -1, -1, -1]]


def test_accepted_nodes_move_to_their_depths():
    class Pool:
        def __init__(self):
            self.values = torch.arange(40)

        def move_kv_cache(self, target, source):
            self.values[target] = self.values[source]

    pool = Pool()
    slots = torch.tensor([[30, 31, 32, 33, 34, 35, 36]])
    # Columns 0, 1, 4, 5 were accepted; the path of another step ends after column 4.
    commit_paths(pool, slots, torch.tensor([[0, 1, 4, 5]]), torch.tensor([3]))
    assert pool.values[30:].tolist() == [30, 31, 34, 35, 34, 35, 36, 37, 38, 39]
    pool = Pool()
    commit_paths(pool, slots, torch.tensor([[0, 1, 4, 6]]), torch.tensor([2]))
    assert pool.values[30:].tolist() == [30, 31, 34, 33, 34, 35, 36, 37, 38, 39]


NO_PENALTIES = {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0}


def _request(prompt_len: int, min_new_tokens: int, stop_token_ids=None, output_len: int = 0, **penalties):
    return SimpleNamespace(
        origin_input_ids=[1] * prompt_len,
        output_ids=[1] * output_len,
        sampling_params=SimpleNamespace(
            min_new_tokens=min_new_tokens, stop_token_ids=stop_token_ids, **(NO_PENALTIES | penalties)
        ),
        eos_token_ids={2},
        tokenizer=SimpleNamespace(additional_stop_token_ids=None, eos_token_id=3),
    )


@pytest.mark.parametrize("has_penalty", [True, False])
def test_what_was_written_before_a_retraction_counts_as_if_it_had_just_been_written(has_penalty):
    """Against SGLang's own penalizers, told token by token; a tokenizer's stop token that the model does not know among
    them."""
    torch.manual_seed(0)
    vocab_size = 12
    asked = [{"frequency_penalty": 0.7, "presence_penalty": -0.4}, {"repetition_penalty": 1.3}, {}, {}, {}]
    requests = [
        _request(3, min_new_tokens, {7, vocab_size}, **(penalties if has_penalty else {}))
        for penalties, min_new_tokens in zip(asked, [5, 0, 9, 2, 5], strict=True)
    ]
    written = torch.randint(vocab_size, (6, len(requests)))

    class Batch(SimpleNamespace):
        """Can be referred to weakly."""

    batch = Batch(reqs=requests, device="cpu")

    def add_up(orchestrator) -> SimpleNamespace:
        additive = torch.zeros(len(requests), vocab_size)
        orchestrator.accumulate_additive_penalties(additive)
        scaling = orchestrator.accumulate_scaling_penalties()
        return SimpleNamespace(acc_additive_penalties=additive, acc_scaling_penalties=scaling)

    orchestrator = BatchedPenalizerOrchestrator(
        vocab_size,
        batch,
        {
            BatchedFrequencyPenalizer,
            BatchedPresencePenalizer,
            BatchedRepetitionPenalizer,
            BatchedMinNewTokensPenalizer,
        },
    )
    fresh = add_up(orchestrator)
    for tokens in written:
        orchestrator.cumulate_output_tokens(tokens)
    expected = add_up(orchestrator)
    # The last one is new.
    for request, tokens in zip(requests[:-1], written.t().tolist(), strict=False):
        request.output_ids = array("q", tokens)
    expected.acc_additive_penalties[-1] = fresh.acc_additive_penalties[-1]
    batch.sampling_info = fresh
    count_written(batch)
    torch.testing.assert_close(fresh.acc_additive_penalties, expected.acc_additive_penalties)
    assert fresh.acc_additive_penalties.isinf().any(dim=1).tolist() == [False, False, True, False, True]
    if has_penalty:
        expected.acc_scaling_penalties[-1] = 1
        torch.testing.assert_close(fresh.acc_scaling_penalties, expected.acc_scaling_penalties)
    else:
        assert fresh.acc_scaling_penalties is None
    nothing_asked = SimpleNamespace(acc_additive_penalties=None)
    count_written(SimpleNamespace(sampling_info=nothing_asked, reqs=requests))
    assert nothing_asked.acc_additive_penalties is None


def _sampling_info(is_required: bool = True, logit_bias=None):
    return SimpleNamespace(
        acc_additive_penalties=None,
        logit_bias=logit_bias,
        penalizer_orchestrator=SimpleNamespace(is_required=is_required),
    )


def test_stop_tokens_are_masked_by_position_not_by_step():
    # Request 0: 4 prompt tokens, 6 with KV, so its rows draw output tokens number 3, 4, 5 (from 0); the first 5 must not
    # stop. Request 1 has no minimum. Request 2 draws its output token number 1, and must not stop before 9.
    requests = [_request(4, 5, {7}), _request(4, 0, {7}), _request(3, 9)]
    batch = SimpleNamespace(reqs=requests, seq_lens=torch.tensor([6, 6, 3]), sampling_info=_sampling_info())
    logits = torch.zeros(6, 10)
    grid = make_grid(torch.zeros(3, dtype=torch.int64), None, 0, 3)
    adjust_logits(logits, batch, grid, *pack([2, 1, 0]), texts=None, grammar_mask=None)
    masked = [row.isinf().nonzero().flatten().tolist() for row in logits]
    assert masked == [[2, 3, 7], [2, 3, 7], [], [], [], [2, 3]]


def test_bias_is_added_to_each_row_of_its_request():
    batch = SimpleNamespace(
        reqs=[_request(4, 0), _request(4, 0)],
        seq_lens=torch.tensor([5, 5]),
        sampling_info=_sampling_info(is_required=False, logit_bias=torch.tensor([[1.0, 0.0], [0.0, -2.0]])),
    )
    logits = torch.zeros(5, 2)
    adjust_logits(logits, batch, None, *pack([2, 1]), texts=None, grammar_mask=None)
    assert logits.tolist() == [[1, 0]] * 3 + [[0, -2]] * 2


def _grow_parents(width: int, max_depth: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A random tree: parents before their children, and depths."""
    parents, depths = [0], [0]
    for column in range(1, width):
        parent = int(torch.randint(column, ()))
        parents.append(parent if depths[parent] < max_depth else 0)
        depths.append(depths[parents[-1]] + 1)
    return torch.tensor(parents), torch.tensor(depths)


@pytest.mark.parametrize("has_trees", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_penalties_count_what_was_written_and_the_drafts_before(monkeypatch, has_trees, seed):
    """Against a decode step for each row, penalised token by token as SGLang's penalizers do."""
    monkeypatch.setattr("tetris_sglang.runtime.logits._ROWS_AT_ONCE", 4 if seed < 2 else 256)
    torch.manual_seed(seed)
    batch_size, width, vocab_size, max_depth = 5, 6, 9, 3
    asked = [
        {"frequency_penalty": 0.7},
        {"presence_penalty": -0.4},
        {"repetition_penalty": 1.3},
        {"frequency_penalty": 0.2, "presence_penalty": 0.5, "repetition_penalty": 0.8},
        {},
    ]
    prompt_lens, output_lens = [3, 1, 4, 2, 5], [1, 5, 3, 12, 4]
    seq_lens = torch.tensor(prompt_lens) + torch.tensor(output_lens) - 1
    sampling_info = _sampling_info()
    if seed % 2:
        # So it comes under overlap scheduling.
        sampling_info.acc_additive_penalties, sampling_info.penalizer_orchestrator = torch.zeros(1), None
    texts = RequestTexts(SimpleNamespace(req_to_token=torch.zeros(8, 20, dtype=torch.int32)), vocab_size, width)
    # Behind a text's end anything may stand.
    texts.tokens.random_(0, vocab_size)
    rows = torch.randperm(8)[:batch_size]
    tokens = torch.randint(vocab_size, (batch_size, width))
    tokens[:, 0] = texts.tokens[rows, seq_lens]
    shape = None
    if has_trees:
        trees = [_grow_parents(width, max_depth) for _ in range(batch_size)]
        shape = TreeShape(*(torch.stack(column) for column in zip(*trees, strict=True)))
    grid = Grid(tokens, max_depth if has_trees else width - 1, shape)
    # The host has not heard of the last step yet.
    requests = [
        _request(prompt_len, 0, None, max(output_len - 3, 0), **penalties)
        for prompt_len, output_len, penalties in zip(prompt_lens, output_lens, asked, strict=True)
    ]
    batch = SimpleNamespace(reqs=requests, req_pool_indices=rows, seq_lens=seq_lens, sampling_info=sampling_info)
    places = pack([5, 3, 0, 4, 2])
    logits = torch.randn(len(places[0]), vocab_size) * 2
    expected = logits.clone()
    for row, (request, column) in enumerate(zip(*(place.tolist() for place in places), strict=True)):
        written = texts.tokens[rows[request], prompt_lens[request] : seq_lens[request] + 1].tolist()
        if shape is None:
            written += tokens[request, 1 : column + 1].tolist()
        else:
            while column:
                written.append(int(tokens[request, column]))
                column = int(shape.parents[request, column])
        params = NO_PENALTIES | asked[request]
        for token, count in Counter(written).items():
            value = expected[row, token] - count * params["frequency_penalty"] - params["presence_penalty"]
            scale = params["repetition_penalty"]
            expected[row, token] = value * scale if value < 0 else value / scale
    untouched = logits.clone()
    adjust_logits(logits, batch, grid, *places, texts=texts, grammar_mask=None)
    torch.testing.assert_close(logits, expected)
    assert (logits != untouched).any(dim=1)[:-3].all() and torch.equal(logits[-3:], untouched[-3:])


def test_a_hook_that_did_not_land_is_named(monkeypatch):
    """SGLang logs a failing hook and goes on; TETRIS does not."""
    from sglang.srt.plugins.hook_registry import HookRegistry
    from sglang.srt.speculative import spec_registry

    from tetris_sglang.plugin import load

    load()
    HookRegistry.apply_hooks()
    inventory.verify_landed()
    target = "sglang.srt.server_args.ServerArgs.add_cli_args"
    monkeypatch.setattr(HookRegistry, "_patched", HookRegistry._patched - {target})
    with pytest.raises(RuntimeError, match="ServerArgs.add_cli_args"):
        inventory.verify_landed()
    monkeypatch.undo()
    monkeypatch.setattr(spec_registry, "_REGISTRY", {})
    with pytest.raises(RuntimeError, match="registration of TETRIS"):
        inventory.verify_landed()


def test_phase_timer_measures_only_when_enabled():
    for enabled in (False, True):
        phases = PhaseTimer(enabled)
        for _ in range(2):
            phases.begin_step()
            with phases("draft"):
                sum(range(20_000))
            phases.end_step()
        summary = phases.summarise()
        assert set(summary) == ({"draft_ms", "host_ms"} if enabled else set())
        assert all(ms > 0 for ms in summary.values())


@pytest.mark.parametrize(
    "num_steps, depths",
    [(1, [1]), (2, [1, 2]), (6, [1, 2, 3, 6]), (7, [1, 2, 4, 7]), (64, [1, 2, 4, 8, 16, 32, 64])],
)
def test_depths_of_captured_drafts_halve(num_steps, depths):
    from tetris_sglang.runtime.cuda.draft_graph import captured_depths

    assert captured_depths(num_steps) == depths
