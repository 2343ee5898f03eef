"""The pieces of a TETRIS step against plain Python."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tetris_sglang.runtime.cpu.activate import activate

activate()  # as SGLang does, before its modules are imported

from tetris_sglang.runtime import inventory
from tetris_sglang.runtime.draft import _most_likely, make_draft_input
from tetris_sglang.runtime.logits import adjust_logits
from tetris_sglang.runtime.operations import get_operations, warm_up
from tetris_sglang.runtime.phases import PhaseTimer


def pack(draft_lens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """requests and columns of the rows that these drafts take."""
    rows = [(request, column) for request, n in enumerate(draft_lens) for column in range(n + 1)]
    return torch.tensor(rows).unbind(1)


@pytest.mark.parametrize("selection", ["tetris", "uniform", "random"])
def test_selection_fills_its_capacity_whatever_the_draft_thinks(selection):
    """The host counts on it: the number of verified rows is never read back."""
    probs = torch.tensor([[0.9, 1e-30, 1e-30], [0.0, 0.5, 1.0], [1e-38, float("nan"), 0.0]])
    for capacity in (1, 4, 8, 9):
        draft_lens = get_operations("cpu", selection).select(probs, capacity)
        assert draft_lens.sum() == capacity


def test_warming_up_runs_every_operation_for_every_power_of_two():
    batches = []
    operations = get_operations("cpu", "tetris")

    def select(probs, capacity_tokens):
        batches.append((*probs.shape, capacity_tokens))
        return operations.select(probs, capacity_tokens)

    warm_up(operations._replace(select=select), 20, 3, torch.zeros(21, 16, dtype=torch.int32))
    assert batches == [(size, 3, size) for size in (1, 2, 4, 8, 16, 20)]


def test_most_likely_token_and_its_probability_at_the_requests_temperature():
    logits = torch.randn(7, 100, generator=torch.Generator().manual_seed(0)) * 4
    temperatures = torch.tensor([[1.0], [0.3], [2.0], [1.0], [0.7], [5.0], [1.0]])
    tokens, probs = _most_likely(logits, temperatures)
    expected = torch.softmax(logits / temperatures, dim=-1).max(dim=-1)
    assert tokens.tolist() == expected.indices.tolist()
    torch.testing.assert_close(probs, expected.values)


def test_draft_input_survives_the_scheduler_filtering_and_merging_batches():
    first = make_draft_input(torch.tensor([5, 6, 7]), torch.tensor([15, 16, 17], dtype=torch.int32))
    second = make_draft_input(torch.tensor([8]), torch.tensor([18], dtype=torch.int32))
    first.filter_batch(torch.tensor([0, 2]))
    first.merge_batch(second)
    assert first.topk_index[:, 0].tolist() == [5, 7, 8]
    assert first.bonus_tokens.tolist() == [15, 17, 18]


def _request(prompt_len: int, min_new_tokens: int, stop_token_ids=None):
    return SimpleNamespace(
        origin_input_ids=[1] * prompt_len,
        sampling_params=SimpleNamespace(min_new_tokens=min_new_tokens, stop_token_ids=stop_token_ids),
        eos_token_ids={2},
        tokenizer=SimpleNamespace(additional_stop_token_ids=None, eos_token_id=3),
    )


def test_stop_tokens_are_masked_by_position_not_by_step():
    # Request 0: 4 prompt tokens, 6 with KV, so its rows draw output tokens number 3, 4, 5 (from 0); the first 5 must not
    # stop. Request 1 has no minimum. Request 2 draws its output token number 1, and must not stop before 9.
    requests = [_request(4, 5, {7}), _request(4, 0, {7}), _request(3, 9)]
    batch = SimpleNamespace(
        reqs=requests, seq_lens=torch.tensor([6, 6, 3]), sampling_info=SimpleNamespace(logit_bias=None)
    )
    logits = torch.zeros(6, 10)
    adjust_logits(logits, batch, *pack([2, 1, 0]), grammar_mask=None)
    masked = [row.isinf().nonzero().flatten().tolist() for row in logits]
    assert masked == [[2, 3, 7], [2, 3, 7], [], [], [], [2, 3]]


def test_bias_is_added_to_each_row_of_its_request():
    batch = SimpleNamespace(
        reqs=[_request(4, 0), _request(4, 0)],
        seq_lens=torch.tensor([5, 5]),
        sampling_info=SimpleNamespace(logit_bias=torch.tensor([[1.0, 0.0], [0.0, -2.0]])),
    )
    logits = torch.zeros(5, 2)
    adjust_logits(logits, batch, *pack([2, 1]), grammar_mask=None)
    assert logits.tolist() == [[1, 0]] * 3 + [[0, -2]] * 2


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
