"""Calibration on recorded drafts: what it does to selection, learned while replaying from nothing but what was verified."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from tetris_sglang.selection import select_prefixes, survival_from_probs
from tetris_sglang.selection.calibration import Calibration, Reliability, chain_outcomes

# See scripts/record_replay.py.
TRACES = Path(__file__).resolve().parents[1] / "data/replay.npz"
SLOTS = 16
CAPACITY_PER_REQUEST = 2
SEEDS = range(4)


class Request(NamedTuple):
    probs: Tensor
    """[positions, depth] float32."""
    accepted: Tensor
    """[positions] int64, if all were verified."""


class Result(NamedTuple):
    accepted_per_step: float
    """Of a request and step."""
    expected_per_step: float
    """The sum of the selected drafts' survivals."""
    reliability: list[Reliability]


@cache
def load(name: str) -> list[Request]:
    with np.load(TRACES) as arrays:
        probs = torch.from_numpy(arrays[f"{name}_logits"]).float().sigmoid()
        accepted = torch.from_numpy(arrays[f"{name}_accepted"]).long()
        lens = np.diff(arrays[f"{name}_starts"]).tolist()
    return [Request(*parts) for parts in zip(probs.split(lens), accepted.split(lens), strict=True)]


def replay(names: list[str], calibrate: bool, seed: int) -> Result:
    """Serve all requests of the traces, each trace in its share of the slots, until one of them has none waiting."""
    share = SLOTS // len(names)
    waiting: list[Iterator[Request]] = []
    for name in names:
        requests = load(name)
        order = torch.randperm(len(requests), generator=torch.Generator().manual_seed(seed)).tolist()
        waiting.append(iter([requests[i] for i in order]))
    running = [next(waiting[slot // share]) for slot in range(SLOTS)]
    positions = [0] * SLOTS
    depth = running[0].probs.shape[1]
    depths = torch.arange(1, depth + 1)
    calibrations = [Calibration(depth) for _ in names]
    accepted_total = expected_total = steps = 0.0
    while True:
        raw = torch.stack([running[slot].probs[positions[slot]] for slot in range(SLOTS)])
        acceptable = torch.stack([running[slot].accepted[positions[slot]] for slot in range(SLOTS)])
        probs = raw
        if calibrate:
            kinds = zip(calibrations, raw.split(share), strict=True)
            probs = torch.cat([calibration.apply(rows, depths) for calibration, rows in kinds])
        survival = survival_from_probs(probs)
        draft_lens = select_prefixes(survival, CAPACITY_PER_REQUEST * SLOTS)
        accept_lens = torch.minimum(acceptable, draft_lens)
        outcomes = chain_outcomes(accept_lens, draft_lens, depth)
        parts = zip(*(t.split(share) for t in (raw, *outcomes)), strict=True)
        for calibration, (rows, reached, accepted) in zip(calibrations, parts, strict=True):
            calibration.observe(rows, depths, reached, accepted)
        steps += SLOTS
        accepted_total += int(accept_lens.sum())
        expected_total += float(survival[torch.arange(depth) < draft_lens[:, None]].sum())
        for slot, accept_len in enumerate(accept_lens.tolist()):
            positions[slot] += accept_len + 1
            if positions[slot] >= len(running[slot].accepted):
                request = next(waiting[slot // share], None)
                if request is None:
                    return Result(
                        accepted_total / steps,
                        expected_total / steps,
                        [calibration.reliability() for calibration in calibrations],
                    )
                running[slot], positions[slot] = request, 0


def compare(*names: str) -> tuple[list[Result], list[Result]]:
    return tuple([replay(list(names), calibrate, seed) for seed in SEEDS] for calibrate in (False, True))


if __name__ == "__main__":
    for names in (
        ["standalone"],
        ["overconfident"],
        ["ngram"],
        ["ngram_human"],
        ["standalone", "ngram"],
        ["standalone", "overconfident"],
        ["standalone", "ngram_human"],
    ):
        raw, calibrated = compare(*names)
        gains = [c.accepted_per_step / r.accepted_per_step - 1 for r, c in zip(raw, calibrated, strict=True)]
        mean = torch.tensor([r[:2] for r in raw]).mean(0).tolist(), torch.tensor([r[:2] for r in calibrated]).mean(0).tolist()
        print(names, "raw acc/exp %.3f %.3f" % tuple(mean[0]), "cal %.3f %.3f" % tuple(mean[1]), "gain", ["%.3f" % g for g in gains],
              "ECE", [("%.3f %.3f" % (r.raw_error, r.error)) for r in calibrated[0].reliability])
