"""The three kernels in a row, as a decode step runs them, and captured in a CUDA graph."""

import torch
from torch import Tensor

from tests.kernels.batches import DEVICE, Batch, assert_equal, needs_cuda, on_device
from tetris_sglang.kernels.accept import accept_rows
from tetris_sglang.kernels.pack import pack_rows
from tetris_sglang.kernels.select import select_drafts
from tetris_sglang.packing import (
    AcceptedTokens,
    PackedTokens,
    accept_rows_reference,
    pack_rows_reference,
)
from tetris_sglang.selection import fill_capacity, survival_from_probs

BATCH, WIDTH, NUM_TOKENS = 37, 6, 144  # room for a capacity of 107


def run_step(survival: Tensor, capacity: int, case: Batch) -> tuple[PackedTokens, AcceptedTokens]:
    """The target's token after t is 3 - t."""
    draft_lens = select_drafts(survival, capacity)
    packed = pack_rows(draft_lens, *case[:-1], NUM_TOKENS)
    return packed, accept_rows(3 - packed.input_ids, packed.qo_indptr, case.candidates, case.seq_lens)


def run_step_in_torch(survival: Tensor, capacity: int, case: Batch) -> tuple[PackedTokens, AcceptedTokens]:
    draft_lens = fill_capacity(survival, capacity)
    packed = pack_rows_reference(draft_lens, *case[:-1], NUM_TOKENS)
    return packed, accept_rows_reference(3 - packed.input_ids, packed.qo_indptr, case.candidates, case.seq_lens)


def random_step(seed: int) -> tuple[Tensor, int, Batch]:
    generator = torch.Generator().manual_seed(seed)
    survival = survival_from_probs(torch.rand(BATCH, WIDTH - 1, generator=generator))
    capacity = int(torch.randint(0, NUM_TOKENS - BATCH + 1, (), generator=generator))
    case = Batch.random(BATCH, WIDTH, seed)
    alternating = 1 + (case.candidates[:, :1] + torch.arange(WIDTH)) % 2  # what the target would say
    candidates = torch.where(torch.rand(BATCH, WIDTH, generator=generator) < 0.8, alternating, case.candidates)
    return survival, capacity, case._replace(candidates=candidates)


def assert_step_equals_torch(outcome: tuple[PackedTokens, AcceptedTokens], step: tuple) -> None:
    for actual, expected in zip(outcome, run_step_in_torch(*step), strict=True):
        assert_equal(actual, expected)


def test_a_step_equals_torch():
    accepted_drafts = set()
    for seed in range(3):
        survival, capacity, case = random_step(seed)
        outcome = run_step(survival.to(DEVICE), capacity, Batch(*on_device(*case)))
        assert_step_equals_torch(outcome, (survival, capacity, case))
        accepted_drafts |= set(outcome[1].num_accepted.tolist())
    assert {0, 1, 2} <= accepted_drafts


@needs_cuda
def test_a_step_runs_in_a_cuda_graph_without_a_sync():
    """Captured once, replayed on other batches of the same size."""
    survival, capacity, case = random_step(0)
    static = [*on_device(survival, *case)]
    step = (static[0], capacity, Batch(*static[1:]))
    run_step(*step)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.graph(graph):
            outcome = run_step(*step)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for seed in range(1, 6):
        survival, _, case = random_step(seed)
        for buffer, values in zip(static, (survival, *case), strict=True):
            buffer.copy_(values)
        graph.replay()
        assert_step_equals_torch(outcome, (survival, capacity, case))
    assert outcome[0].slots.device.type == DEVICE.type
