"""The packed mask of ragged trees, bit for bit."""

from itertools import accumulate

import pytest
import torch

from tests.kernels.batches import DEVICE, Trees
from tetris_sglang.kernels.tree_mask import pack_tree_mask, pack_tree_mask_reference


def indptr(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=DEVICE)


def pack(parents: torch.Tensor, max_depth: int, rows: list[int], kv_lens: list[int], packed: torch.Tensor) -> None:
    starts = indptr([-(-n * length // 8) for n, length in zip(rows, kv_lens, strict=True)])
    pack_tree_mask(parents.to(DEVICE), max_depth, indptr(rows), indptr(kv_lens), packed, starts)


@pytest.mark.parametrize("seed", range(8))
def test_random_trees(seed):
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    batch, width, padding = draw(1, 6), draw(1, 9), draw(0, 2)
    trees = Trees.random(batch, width, seed)
    rows = [draw(1, width) for _ in range(batch)] + [draw(0, 5) for _ in range(padding)]
    kv_lens = [n + draw(0, 10 ** draw(0, 3)) for n in rows[:batch]] + rows[batch:]
    expected = pack_tree_mask_reference(trees.parents, rows, kv_lens)
    packed = torch.full((len(expected) + 9,), 0xCD, dtype=torch.uint8, device=DEVICE)
    pack(trees.parents, trees.max_depth, rows, kv_lens, packed)
    assert packed.tolist() == expected + [0xCD] * 9


def test_a_tree_read_aloud():
    """Root, its children a and b, and a's child c: c sees the root, a and itself, not b."""
    packed = torch.zeros(3, dtype=torch.uint8, device=DEVICE)
    pack(torch.tensor([[0, 0, 0, 1]]), 2, [4], [6], packed)
    bits = [packed[i // 8].item() >> (i % 8) & 1 for i in range(24)]
    rows = ["".join(map(str, bits[start : start + 6])) for start in range(0, 24, 6)]
    assert rows == ["111000", "111100", "111010", "111101"]


def test_a_chain_is_causal():
    packed = torch.zeros(40, dtype=torch.uint8, device=DEVICE)
    pack(torch.tensor([[0, 0, 1, 2, 3]]), 4, [3], [20], packed)
    bits = [packed[i // 8].item() >> (i % 8) & 1 for i in range(60)]
    assert bits == [int(key <= 17 + row) for row in range(3) for key in range(20)]


@pytest.mark.parametrize(
    "change",
    [
        {"parents": torch.zeros(2, 3, 3, dtype=torch.int64)},
        {"parents": torch.zeros(3, 3, dtype=torch.int64)},
        {"parents": torch.zeros(2, 3)},
        {"kv_indptr": torch.zeros(4, dtype=torch.int32)},
        {"packed": torch.zeros(9, dtype=torch.int32)},
        {"mask_indptr": torch.zeros(3, dtype=torch.int64)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_bad_arguments_are_named(change):
    good = {
        "parents": torch.zeros(2, 3, dtype=torch.int64),
        "qo_indptr": torch.zeros(3, dtype=torch.int32),
        "kv_indptr": torch.zeros(3, dtype=torch.int32),
        "packed": torch.zeros(9, dtype=torch.uint8),
        "mask_indptr": torch.zeros(3, dtype=torch.int32),
    }
    with pytest.raises(ValueError, match=next(iter(change))):
        pack_tree_mask(max_depth=1, **{name: tensor.to(DEVICE) for name, tensor in (good | change).items()})
