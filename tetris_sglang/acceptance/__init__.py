"""Which verified draft tokens are kept: those that are the target's own tokens, greedy or sampled."""

from tetris_sglang.acceptance.chain import AcceptResult, accept_chain
from tetris_sglang.acceptance.noise import RequestNoise, draw, perturb
from tetris_sglang.acceptance.tree import TreeAcceptResult, accept_tree

__all__ = [
    "AcceptResult",
    "RequestNoise",
    "TreeAcceptResult",
    "accept_chain",
    "accept_tree",
    "draw",
    "perturb",
]
