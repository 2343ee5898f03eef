"""Penalties, minimum lengths and bias per row, against SGLang's own penalizers."""

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

from tetris_sglang.drafting import Grid, TreeShape, make_grid
from tetris_sglang.runtime.logits import adjust_logits, count_written
from tetris_sglang.runtime.request_texts import RequestTexts


def pack(draft_lens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """requests and columns of the rows that these drafts take."""
    rows = [(request, column) for request, n in enumerate(draft_lens) for column in range(n + 1)]
    return torch.tensor(rows).unbind(1)


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


@pytest.mark.parametrize("drafted", ["chains", "trees", "nothing"])
@pytest.mark.parametrize("seed", range(4))
def test_penalties_count_what_was_written_and_the_drafts_before(monkeypatch, drafted, seed):
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
    shape, max_depth_drafted, lens = None, width - 1, [5, 3, 0, 4, 2]
    if drafted == "nothing":  # after steps that drafted
        tokens, max_depth_drafted, lens = tokens[:, :1], 0, [0] * batch_size
    if drafted == "trees":
        max_depth_drafted = max_depth
        trees = [_grow_parents(width, max_depth) for _ in range(batch_size)]
        shape = TreeShape(*(torch.stack(column) for column in zip(*trees, strict=True)))
    grid = Grid(tokens, max_depth_drafted, shape)
    # The host has not heard of the last step yet.
    requests = [
        _request(prompt_len, 0, None, max(output_len - 3, 0), **penalties)
        for prompt_len, output_len, penalties in zip(prompt_lens, output_lens, asked, strict=True)
    ]
    batch = SimpleNamespace(reqs=requests, req_pool_indices=rows, seq_lens=seq_lens, sampling_info=sampling_info)
    places = pack(lens)
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
    unchanged = lens[-1] + 1
    assert (logits != untouched).any(dim=1)[:-unchanged].all()
    assert torch.equal(logits[-unchanged:], untouched[-unchanged:])
