"""Which verified draft tokens are kept, and why the output is the target's: one file a rule."""

from tetris_sglang.acceptance.block import accept_block
from tetris_sglang.acceptance.chain import AcceptResult, accept_chain
from tetris_sglang.acceptance.noise import RequestNoise, derive_seeds, draw, exponentials, perturb
from tetris_sglang.acceptance.recursive import accept_recursively
from tetris_sglang.acceptance.tree import TreeAcceptResult, accept_tree

__all__ = [
    "AcceptResult",
    "RequestNoise",
    "TreeAcceptResult",
    "accept_block",
    "accept_chain",
    "accept_recursively",
    "accept_tree",
    "derive_seeds",
    "draw",
    "exponentials",
    "perturb",
]
