"""Faults that the dry run must find: each is a line of the CUDA path, bent while the server loads."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import textwrap
from typing import NamedTuple

from dry_arms import ARMS, Arm

DRAFT_GRAPHS = ("tetris_sglang.runtime.cuda.draft_graph", "DraftGraphs")
STREAM = ("torch.cuda.streams", "Stream")
DRAFT_ATTENTION = ("tetris_sglang.runtime.cuda.draft_attention", "DraftAttention")
PASS_PLAN = ("tetris_sglang.runtime.cuda.pass_plan", "PassPlan")
LANDED = "the dry run's mutation has landed"


class Mutation(NamedTuple):
    owner: tuple[str, str]
    """Module and class."""
    function: str
    old: str
    new: str
    arm: str
    """The server that shows it."""

    @property
    def body(self) -> str:
        """Of a plugin, see tests.e2e.plugins.write_plugin."""
        return f"""
    from mutations import Mutation
    {self!r}.land()
"""

    def bend(self) -> str:
        """The function's source with the fault in it."""
        source = textwrap.dedent(inspect.getsource(getattr(self._find_owner(), self.function)))
        assert source.count(self.old) == 1, f"{self.old!r} stands {source.count(self.old)} times in {self.function}"
        return source.replace(self.old, self.new)

    def land(self) -> None:
        """Put the fault into the process that calls this."""
        module, made = importlib.import_module(self.owner[0]), {}
        exec(compile(self.bend(), str(module.__file__), "exec"), module.__dict__, made)
        setattr(self._find_owner(), self.function, made[self.function])
        print(LANDED, flush=True)

    def _find_owner(self):
        return getattr(importlib.import_module(self.owner[0]), self.owner[1])

    def apply(self) -> Arm:
        """The server with this fault."""
        return dataclasses.replace(
            ARMS[self.arm],
            cases=tuple(case for case in ARMS[self.arm].cases if case.is_counted),
            plugin=self.body,
            must_log=LANDED,
            has_twin=False,
            has_streams_checked=self.owner == STREAM,
        )


MUTATIONS = {
    "the draft's graph reads the tokens of the step before": Mutation(
        DRAFT_GRAPHS, "replay", "values = [window.tokens,", "values = [self._tokens[:batch_size],", "perfect"
    ),
    "the draft's graph reads the lengths of the step before": Mutation(
        DRAFT_GRAPHS, "replay", "window.tokens, seq_lens,", "window.tokens, self.buffers.seq_lens[:batch_size],", "perfect"
    ),
    "padding writes into the cache of a request": Mutation(
        DRAFT_GRAPHS, "_fill", "self.buffers.req_pool_indices[start:size] = 0",
        "self.buffers.req_pool_indices[start:size] = self.buffers.req_pool_indices[:1]", "perfect",
    ),
    "the verify plan is that of the step before": Mutation(
        PASS_PLAN, "replan", "self._plan_on_device(self.wrapper._int_workspace_buffer)", "pass", "fixed"
    ),
    "each request has the rows of another": Mutation(
        PASS_PLAN, "set_lengths", "lay_out_rows(verify_lens,", "lay_out_rows(verify_lens.flip(0),", "fixed"
    ),
    "each request reads the cache of another": Mutation(
        PASS_PLAN, "pack_indices", "torch.nn.functional.pad(forward_batch.req_pool_indices, (0, 1))",
        "torch.nn.functional.pad(forward_batch.req_pool_indices[1:], (1, 1))", "plain",
    ),
    "the draft's passes do not see what the one before them wrote": Mutation(
        DRAFT_ATTENTION, "_lay_out", "forward_batch.seq_lens + (number - 1)", "forward_batch.seq_lens - 1", "perfect"
    ),
    "every node of a comb sees the first": Mutation(
        PASS_PLAN, "set_trees", "pack_tree_mask(parents,", "pack_tree_mask(parents.clamp(min=1),", "comb",
    ),
    "no stream waits for another": Mutation(
        STREAM, "wait_stream", "self.wait_event(stream.record_event())", "pass", "fixed"
    ),
}  # fmt: skip
