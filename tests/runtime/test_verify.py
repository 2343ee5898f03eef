"""Trees in a verify pass, against plain Python."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from tetris_sglang.portable_cpu.activate import activate

activate()  # as SGLang does, before its modules are imported
from tetris_sglang.drafting import Proposal, TreeShape, ancestor_mask, make_grid
from tetris_sglang.kernels.tree_mask import pack_tree_mask_reference
from tetris_sglang.runtime.verify import _link_nodes, commit_paths, make_verify_input

# A tree of the root 0 and nodes 1..5, of which 2 and 4 hang below 1, and 5 below 4; column 6 holds nothing.
TREE = TreeShape(torch.tensor([[0, 0, 1, 0, 1, 4]]), torch.tensor([[0, 1, 2, 1, 2, 3]]))


SURVIVAL = torch.tensor([[0.9, 0.8, 0.5, 0.4, 0.1]])
PROPOSAL = Proposal(torch.tensor([[11, 12, 13, 14, 15]]), SURVIVAL, SURVIVAL, TREE)


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
