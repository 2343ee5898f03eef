#!/usr/bin/env python
"""A trace for `tetris-sglang simulate` from the drafts in tests/data/replay.npz.

    python scripts/replay_to_trace.py build/standalone.trace.gz
    python scripts/replay_to_trace.py build/human.trace.gz --name ngram_human

One row per position of each text, every draft verified (scripts/record_replay.py says how they were made). Survivals are
those of a calibration that has learnt from all of these rows.
"""

from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer

from tetris_sglang.estimates.calibration import Calibration, chain_outcomes
from tetris_sglang.selection import survival_from_probs
from tetris_sglang.tools.simulate.traces import EVERY_POSITION
from tetris_sglang.trace import open_for_writing, row_type

REPLAY = Path(__file__).resolve().parents[1] / "tests/data/replay.npz"
_BLOCK = 256


def main(
    out: Annotated[Path, typer.Argument(help="File to write; .gz is compressed.")],
    name: Annotated[str, typer.Option(help="standalone, overconfident, ngram, ngram_human.")] = "standalone",
    replay: Annotated[Path, typer.Option(help="What scripts/record_replay.py wrote.")] = REPLAY,
) -> None:
    with np.load(replay) as arrays:
        if f"{name}_logits" not in arrays:
            raise typer.BadParameter(f"--name {name}: {replay} has no such drafts")
        probs = torch.from_numpy(arrays[f"{name}_logits"]).float().sigmoid()
        accepted = torch.from_numpy(arrays[f"{name}_accepted"]).long()
        starts = arrays[f"{name}_starts"]
    num_rows, depth = probs.shape
    rows = np.zeros(num_rows, row_type(depth))
    rows["step"] = np.arange(num_rows)
    rows["request"] = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
    rows["depth"], rows["selected"] = depth, depth
    rows["raw"] = survival_from_probs(probs).numpy()
    rows["survival"] = calibrate(probs, accepted).numpy()
    rows["node_depths"] = np.arange(1, depth + 1)
    bits = np.arange(depth) < accepted.numpy()[:, None]
    rows["accepted"] = np.packbits(bits, axis=1, bitorder="little")
    out.parent.mkdir(parents=True, exist_ok=True)
    with open_for_writing(out, depth, drafts=name, **{EVERY_POSITION: True}) as file:
        file.write(rows.tobytes())
    print(f"{out}: {num_rows} positions of {len(starts) - 1} texts, {accepted.float().mean():.2f} of {depth} accepted")


def calibrate(probs: torch.Tensor, accepted: torch.Tensor) -> torch.Tensor:
    """Survivals [rows, depth] as a server that has served such drafts for a while sees them."""
    depth = probs.shape[1]
    calibration, depths = Calibration(depth), torch.arange(1, depth + 1)
    order = torch.randperm(len(probs), generator=torch.Generator().manual_seed(0))
    for block in order.split(_BLOCK):
        outcomes = chain_outcomes(accepted[block], torch.full_like(accepted[block], depth), depth)
        calibration.observe(probs[block], depths, outcomes.reached, outcomes.accepted)
    return survival_from_probs(calibration.apply(probs, depths))


if __name__ == "__main__":
    typer.run(main)
