"""Faults that the dry run must find: each is a line of the CUDA path, bent while the server loads."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import textwrap
from typing import NamedTuple

from cases import GREEDY
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
            cases=(GREEDY[1],),
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
    "the draft's output stays in the pool that the target's graph writes to": Mutation(
        DRAFT_GRAPHS, "_keep", "return self._outputs[size, depth]", "return made", "perfect"
    ),
    "padding writes into the cache of a request": Mutation(
        DRAFT_GRAPHS, "_fill", "self.buffers.req_pool_indices[start:size] = 0",
        "self.buffers.req_pool_indices[start:size] = self.buffers.req_pool_indices[:1]", "perfect",
    ),
    "the verify plan is that of the step before": Mutation(
        PASS_PLAN, "replan", "self._plan_on_device(self.wrapper._int_workspace_buffer)", "pass", "fixed"
    ),
    "surplus rows belong to the last request": Mutation(
        PASS_PLAN, "set_lengths", "lay_out_rows(verify_lens,",
        "lay_out_rows(torch.cat((verify_lens[:-1], (self.num_rows - verify_lens[:-1].sum(dtype=torch.int32))[None])),", "fixed",
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
