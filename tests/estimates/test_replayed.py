"""Estimates on recorded drafts of a real model: what they do to selection, and whether they say what will be accepted."""

from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from tetris_sglang.estimates.calibration import Calibration, chain_outcomes
from tetris_sglang.selection import select_prefixes, survival_from_probs
from tetris_sglang.trace import read_trace

TRACES = Path(__file__).resolve().parents[2] / "benchmarks" / "traces"
NUM_SLOTS, CAPACITY_PER_REQUEST = 16, 2
SEEDS = range(3)
RAW, CALIBRATED, SERVED = "raw", "calibrated", "served"
"""The draft's own probabilities; set right by what was accepted while replaying, from nothing but what was verified; what the
recording server saw: calibrated, with the matches in each request's text."""


class Steps(NamedTuple):
    """Of one request, or of those that follow one another in a slot."""

    raw: Tensor
    """[steps, depth] float32 survivals."""
    served: Tensor
    """[steps, depth] float32 survivals."""
    accepted: Tensor
    """[steps] int64, all having been verified."""


class Result(NamedTuple):
    accepted: float
    """Per request and step."""
    expected: float
    """The sum of the selected drafts' survivals."""
    error: float
    """Of calibrated probabilities, where all is calibrated."""
    raw_error: float


@cache
def load(name: str) -> list[Steps]:
    trace = read_trace(TRACES / f"{name}.trace.gz")
    assert trace.is_complete.all()
    accepted = trace.accepted.cumprod(axis=1).sum(axis=1)
    arrays = [torch.from_numpy(array) for array in (trace.raw, trace.survival, accepted)]
    order = np.argsort(trace.requests, kind="stable")
    lens = np.bincount(trace.requests).tolist()
    return [Steps(*parts) for parts in zip(*(array[order].split(lens) for array in arrays), strict=True)]


def fill_slots(name: str, num_slots: int, seed: int) -> list[Steps]:
    """The trace's requests in another order, one after the other in each slot."""
    requests = load(name)
    order = torch.randperm(len(requests), generator=torch.Generator().manual_seed(seed)).tolist()
    shares = [[requests[number] for number in order[slot::num_slots]] for slot in range(num_slots)]
    return [Steps(*map(torch.cat, zip(*share, strict=True))) for share in shares]


@cache
def replay(names: tuple[str, ...], kind: str, seed: int) -> Result:
    """Select as long as all slots have steps. Steps begin where the recorded ones did, whatever is verified."""
    share = NUM_SLOTS // len(names)
    slots = [slot for name in names for slot in fill_slots(name, share, seed)]
    num_steps = min(len(slot.accepted) for slot in slots)
    raw, served, acceptable = (
        torch.stack([array[:num_steps] for array in arrays], dim=1) for arrays in zip(*slots, strict=True)
    )
    probs = raw / torch.cat((torch.ones_like(raw[..., :1]), raw[..., :-1]), dim=2).clamp(min=1e-9)
    depth = raw.shape[2]
    depths, calibrations = torch.arange(1, depth + 1), [Calibration(depth) for _ in names]
    accepted_total = expected_total = 0.0
    for step in range(num_steps):
        parts = list(zip(calibrations, probs[step].split(share), strict=True))
        calibrated = survival_from_probs(torch.cat([calibration.apply(part, depths) for calibration, part in parts]))
        survival = {RAW: raw[step], CALIBRATED: calibrated, SERVED: served[step]}[kind]
        draft_lens = select_prefixes(survival, CAPACITY_PER_REQUEST * NUM_SLOTS)
        accepted = torch.minimum(acceptable[step], draft_lens)
        outcomes = (outcome.split(share) for outcome in chain_outcomes(accepted, draft_lens, depth))
        for (calibration, part), reached, kept in zip(parts, *outcomes, strict=True):
            calibration.observe(part, depths, reached, kept)
        accepted_total += int(accepted.sum())
        expected_total += float(survival[torch.arange(depth) < draft_lens[:, None]].sum())
    found = [calibration.reliability() for calibration in calibrations]
    return Result(
        accepted_total / num_steps / NUM_SLOTS,
        expected_total / num_steps / NUM_SLOTS,
        max(reliability.error for reliability in found),
        max(reliability.raw_error for reliability in found),
    )


def gains(kind: str, *names: str) -> list[float]:
    """Accepted over what the draft's own probabilities have accepted - 1, per order."""
    return [replay(names, kind, seed).accepted / replay(names, RAW, seed).accepted - 1 for seed in SEEDS]


def off(kind: str, *names: str) -> float:
    """How far the expected number of accepted tokens is from the accepted one, relative to the latter."""
    runs = [replay(names, kind, seed) for seed in SEEDS]
    return abs(sum(run.expected for run in runs) / sum(run.accepted for run in runs) - 1)


def test_a_sampled_heads_probabilities_are_set_right():
    """It is far too sure at temperature 1. Capacity is chosen by what is expected."""
    assert off(RAW, "eagle3_sampled") > 0.3
    assert off(CALIBRATED, "eagle3_sampled") < 0.08
    found = replay(("eagle3_sampled",), CALIBRATED, 0)
    assert found.error < found.raw_error / 3


@pytest.mark.parametrize("names", [("eagle3",), ("eagle3_sampled",), ("ngram",), ("eagle3", "ngram")])
def test_setting_them_right_loses_nothing(names):
    assert min(gains(CALIBRATED, *names)) > -0.02


def test_greedy_and_sampled_requests_in_one_batch_share_capacity_no_worse():
    assert min(gains(CALIBRATED, "eagle3", "eagle3_sampled")) > 0
    assert off(CALIBRATED, "eagle3", "eagle3_sampled") < off(RAW, "eagle3", "eagle3_sampled") / 2


@pytest.mark.parametrize("names", [("eagle3",), ("eagle3_sampled",), ("eagle3", "ngram"), ("eagle3", "eagle3_sampled")])
def test_matches_in_the_text_tell_what_scores_do_not(names):
    assert min(gains(SERVED, *names)) > 0.03
    assert off(SERVED, *names) < 0.12


def test_n_grams_are_matches_already():
    assert min(gains(SERVED, "ngram")) > -0.02
