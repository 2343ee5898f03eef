"""Trees in a verify pass, against plain Python."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from tetris_sglang.portable_cpu.activate import activate

activate()  # as SGLang does, before its modules are imported
from tetris_sglang.drafting import Proposal, TreeShape, make_grid
from tetris_sglang.kernels.tree_mask import pack_tree_mask_reference
from tetris_sglang.runtime.verify import _link_nodes, make_verify_input

# A tree of the root 0 and nodes 1..5, of which 2 and 4 hang below 1, and 5 below 4; column 6 holds nothing.
TREE = TreeShape(torch.tensor([[0, 0, 1, 0, 1, 4]]), torch.tensor([[0, 1, 2, 1, 2, 3]]))


SURVIVAL = torch.tensor([[0.9, 0.8, 0.5, 0.4, 0.1]])
PROPOSAL = Proposal(torch.tensor([[11, 12, 13, 14, 15]]), SURVIVAL, SURVIVAL, TREE)


def test_flashinfers_flat_mask_is_the_packed_one():
    """An eager pass and a captured one see the same."""
    lens, prefixes = [4, 1], [3, 5]
    parents = torch.cat((TREE.parents, torch.zeros_like(TREE.parents)))
    spec_info = make_verify_input(
        width=6,
        input_ids=None,
        positions=None,
        shape=TreeShape(parents, torch.zeros_like(parents)),
        max_depth=3,
        has_mask=True,
        layout=SimpleNamespace(verify_lens=torch.tensor(lens, dtype=torch.int32), extend_start_loc=torch.tensor([0, 4])),
    )
    assert spec_info.parents is None
    kv_lens = [p + n for p, n in zip(prefixes, lens, strict=True)]
    flat = spec_info._flat_mask(torch.tensor(kv_lens)).tolist()
    packed = pack_tree_mask_reference(parents, lens, kv_lens)
    bits = [byte >> place & 1 for byte in packed for place in range(8)]
    assert flat == [bool(bit) for bit in bits[:28] + bits[32:38]]


def test_sglang_walks_the_links_of_a_tree():
    grid = make_grid(torch.tensor([10]), PROPOSAL, 3, 7)
    children, siblings = _link_nodes(grid.shape)
    assert children.tolist() == [[1, 2, -1, -1, 5, -1, -1]]
    assert siblings.tolist() == [[-1, 3, 4, -1, -1, -1, -1]]
