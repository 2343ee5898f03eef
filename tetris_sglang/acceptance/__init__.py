"""Which verified draft tokens are kept: those that are the target's own tokens, greedy or sampled."""

from tetris_sglang.acceptance.chain import AcceptResult, accept_chain
from tetris_sglang.acceptance.sampling import sample_rows

__all__ = ["AcceptResult", "accept_chain", "sample_rows"]
