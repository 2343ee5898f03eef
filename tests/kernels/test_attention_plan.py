"""The plan that the device makes is the one that FlashInfer's planner would make for the same lengths."""

from itertools import accumulate

import pytest
import torch

from tests.kernels.batches import DEVICE
from tetris_sglang.kernels.attention_plan import (
    MIN_KV_CHUNK_TOKENS,
    PlanLayout,
    max_work_items,
    plan_prefill,
    plan_prefill_reference,
)


def make_layout(num_requests: int, num_rows: int, group_size: int, cta_tile_q: int, max_items: int) -> PlanLayout:
    """Places every array as FlashInfer's PrefillPlanImpl does: in order, aligned to 16 bytes, sized by the captured shape."""
    padded = max(max_items, -(-num_rows * group_size // cta_tile_q) + num_requests - 1)
    offsets, end = {}, 0
    for name, size, alignment in (
        ("request_indices", 4 * padded, 16),
        ("qo_tile_indices", 4 * padded, 16),
        ("kv_tile_indices", 4 * padded, 16),
        ("o_indptr", 4 * (num_requests + 1), 16),
        ("kv_chunk_size_ptr", 4, 1),
        ("total_num_rows", 4, 16),
        ("merge_indptr", 4 * (num_rows + 1), 16),
        ("block_valid_mask", padded, 16),
    ):
        offsets[f"{name}_offset"] = start = -(-end // alignment) * alignment
        end = start + size
    values = {
        "padded_batch_size": padded,
        "total_num_rows": num_rows,
        "cta_tile_q": cta_tile_q,
        "v_offset": 0,
        "s_offset": 0,
        "enable_cuda_graph": 1,
        "split_kv": 1,
    }
    return PlanLayout.parse([(values | offsets)[name] for name in PlanLayout._fields])


def indptr(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=DEVICE)


def read(workspace: torch.Tensor, layout: PlanLayout, name: str, count: int) -> list[int]:
    start = getattr(layout, f"{name}_offset")
    if name == "block_valid_mask":
        return workspace[start : start + count].tolist()
    return workspace[start : start + 4 * count].view(torch.int32).tolist()


def assert_planned(qo_lens, kv_lens, *, num_rows, group_size, cta_tile_q, max_items) -> None:
    layout = make_layout(len(qo_lens), num_rows, group_size, cta_tile_q, max_items)
    size = layout.block_valid_mask_offset + layout.padded_batch_size
    workspace = torch.full((size + 64,), 0xAB, dtype=torch.uint8, device=DEVICE)
    plan_prefill(workspace, layout, indptr(qo_lens), indptr(kv_lens), group_size=group_size, max_items=max_items)
    expected = plan_prefill_reference(qo_lens, kv_lens, group_size=group_size, cta_tile_q=cta_tile_q, max_items=max_items)
    items, padded = len(expected.request_indices), layout.padded_batch_size
    assert items <= padded, "FlashInfer would refuse this batch"
    for name in ("request_indices", "qo_tile_indices", "kv_tile_indices"):
        assert read(workspace, layout, name, items) == getattr(expected, name), name
    assert read(workspace, layout, "o_indptr", len(qo_lens) + 1) == expected.o_indptr
    assert read(workspace, layout, "merge_indptr", sum(qo_lens) + 1) == expected.merge_indptr
    assert read(workspace, layout, "kv_chunk_size_ptr", 1) == [expected.kv_chunk_tokens]
    assert read(workspace, layout, "total_num_rows", 1) == [sum(qo_lens)]
    assert read(workspace, layout, "block_valid_mask", padded) == [1] * items + [0] * (padded - items)
    assert (workspace[size:] == 0xAB).all(), "written beyond the plan"


@pytest.mark.parametrize("seed", range(12))
def test_random_batches(seed):
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    width, group_size = draw(2, 17), [1, 2, 4, 7, 8][draw(0, 4)]
    batch, slots = draw(1, 40), draw(0, 6)
    qo_lens = [draw(1, width) for _ in range(batch)]
    surplus = draw(0, 9) if slots else 0
    qo_lens += [surplus] * bool(slots) + [0] * max(0, slots - 1)
    longest = 10 ** draw(1, 5)
    kv_lens = [qo_len + draw(0, longest) for qo_len in qo_lens[:batch]] + qo_lens[batch:]
    assert_planned(
        qo_lens,
        kv_lens,
        num_rows=sum(qo_lens) + draw(0, 3),
        group_size=group_size,
        cta_tile_q=[16, 64, 128][draw(0, 2)],
        max_items=max_work_items(132, [1, 4, 8][draw(0, 2)]),
    )


def test_one_long_request_is_cut_into_as_many_chunks_as_there_is_room_for():
    assert_planned([3], [100_000], num_rows=3, group_size=4, cta_tile_q=16, max_items=33)
    plan = plan_prefill_reference([3], [100_000], group_size=4, cta_tile_q=16, max_items=33)
    assert plan.kv_tile_indices == list(range(33))
    assert plan.merge_indptr == [0, 33, 66, 99] and plan.o_indptr == [0, 99]


def test_short_requests_are_not_cut():
    plan = plan_prefill_reference([2, 1], [90, 128], group_size=4, cta_tile_q=16, max_items=33)
    assert plan.kv_chunk_tokens == MIN_KV_CHUNK_TOKENS
    assert plan.request_indices == [0, 1] and plan.merge_indptr == [0, 1, 2, 3]
    assert_planned([2, 1], [90, 128], num_rows=3, group_size=4, cta_tile_q=16, max_items=33)


def test_more_requests_than_one_block_of_items():
    assert_planned(
        [1, 5] * 80,
        [700, 40] * 80,
        num_rows=500,
        group_size=4,
        cta_tile_q=16,
        max_items=max_work_items(132, 8),
    )


def test_a_plan_of_another_kind_is_refused():
    layout = make_layout(2, 8, 4, 16, 33)
    with pytest.raises(ValueError, match="14 entries, 15 are known"):
        PlanLayout.parse(layout[:-1])
    for name, value in (("split_kv", 0), ("enable_cuda_graph", 0), ("cta_tile_q", 7), ("o_indptr_offset", 3)):
        with pytest.raises(ValueError, match="does not look like"):
            PlanLayout.parse(layout._replace(**{name: value}))


@pytest.mark.parametrize(
    "change",
    [
        {"qo_indptr": torch.zeros(3, dtype=torch.int64)},
        {"kv_indptr": torch.zeros(4, dtype=torch.int32)},
        {"workspace": torch.zeros(64, dtype=torch.int32)},
    ],
    ids=str,
)
def test_bad_arguments_are_named(change):
    good = {
        "workspace": torch.zeros(4096, dtype=torch.uint8),
        "qo_indptr": torch.zeros(3, dtype=torch.int32),
        "kv_indptr": torch.zeros(3, dtype=torch.int32),
    }
    arguments = {name: tensor.to(DEVICE) for name, tensor in (good | change).items()}
    with pytest.raises(ValueError, match=next(iter(change)) if "workspace" in change else "indptr"):
        plan_prefill(**arguments, layout=make_layout(2, 8, 4, 16, 33), group_size=4, max_items=33)
