"""Third plugins that bend a server for a test."""

from __future__ import annotations

import textwrap
from pathlib import Path


def write_plugin(folder: Path, name: str, body: str) -> dict[str, str]:
    """A module that SGLang finds by its entry point and whose `body` runs in the scheduler's process.

    Returns:
        Environment variables for the server.
    """
    indented = textwrap.indent(textwrap.dedent(body), " " * 4)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.py").write_text(
        f'import sys\n\n\ndef load():\n    if "sglang.srt.managers.scheduler" not in sys.modules:\n        return\n{indented}'
    )
    dist_info = folder / f"{name}-0.1.dist-info"
    dist_info.mkdir(exist_ok=True)
    (dist_info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1\n")
    (dist_info / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{name} = {name}:load\n")
    return {"PYTHONPATH": str(folder)}


BROKEN_ACCEPTANCE = """
    from tetris_sglang.acceptance import AcceptResult
    from tetris_sglang import packing

    def accept_everything(candidates, target_tokens, draft_lens):
        bonus = target_tokens.gather(1, draft_lens.long().unsqueeze(1)).squeeze(1)
        return AcceptResult(draft_lens, bonus)

    packing.accept_chain = accept_everything
"""
"""Every selected draft is accepted."""

SWITCHING_PLANS = """
    import random
    from tetris_sglang.capacity import AutoCapacity, StepPlan
    from tetris_sglang.runtime.drafts import catch_up

    # Small, so that tokens also have to be caught up on while nothing is drafted.
    assert catch_up.MAX_STEPS
    catch_up.MAX_STEPS = 24
    draw = random.Random(3)
    kind = {"is_plain": True, "steps_left": 0}

    def choose(self, batch_size, limits, context_tokens=0.0):
        if kind["steps_left"] == 0:
            kind["is_plain"] = not kind["is_plain"]
            kind["steps_left"] = draw.choice((1, 2, 3, 7, 30) if kind["is_plain"] else (1, 1, 2, 5))
        kind["steps_left"] -= 1
        if kind["is_plain"]:
            return StepPlan(0, 0)
        depth = draw.choice(list(limits.depths))
        return StepPlan(depth, draw.randint(1, batch_size * limits.count_nodes(depth)))

    AutoCapacity.choose = choose
"""
"""Random plans: plain steps and speculative ones of any depth and capacity follow each other."""

UNLIKE_RANKS = """
    import os
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.runtime_context import get_parallel
    from tetris_sglang.capacity import AutoCapacity, StepPlan
    from tetris_sglang.runtime import operations, step

    select_drafts, make_grid, sample_target = (
        operations.Operations.select_drafts, step.make_grid, step.sample_target
    )
    choose, forward = AutoCapacity.choose, TpModelWorker.forward_batch_generation

    def is_second():
        return get_parallel().tp_rank == 1

    def choose_other(self, *arguments):
        plan = choose(self, *arguments)
        return StepPlan(0, 0) if is_second() else plan

    def select_others(self, *arguments):
        draft_lens = select_drafts(self, *arguments)
        return draft_lens.roll(1) if is_second() else draft_lens

    def make_other_grid(roots, proposal, *arguments):
        grid = make_grid(roots, proposal, *arguments)
        if is_second() and proposal is not None:
            grid.tokens[:, 1:] = 5
        return grid

    def sample_others(*arguments):
        tokens, logits = sample_target(*arguments)
        return (tokens * 0 + 7 if is_second() else tokens), logits

    def forward_others(self, *arguments, is_verify=False, **others):
        result = forward(self, *arguments, is_verify=is_verify, **others)
        if is_second() and not is_verify:
            result.next_token_ids = result.next_token_ids * 0 + 7
        return result

    AutoCapacity.choose, TpModelWorker.forward_batch_generation = choose_other, forward_others
    operations.Operations.select_drafts = select_others
    step.make_grid, step.sample_target = make_other_grid, sample_others
"""
"""The second rank plans, selects, drafts and samples something else than the first one, in prefills and in steps."""
