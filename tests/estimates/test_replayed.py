"""Calibration on recorded drafts: what it does to selection, learned while replaying from nothing but what was verified."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from tetris_sglang.estimates.calibration import Calibration, Reliability, chain_outcomes
from tetris_sglang.estimates.estimator import AcceptanceEstimator
from tetris_sglang.selection import select_prefixes, survival_from_probs

# See scripts/record_replay.py.
TRACES = Path(__file__).resolve().parents[1] / "data/replay.npz"
SLOTS = 16
CAPACITY_PER_REQUEST = 2
SEEDS = range(2)


class Request(NamedTuple):
    probs: Tensor
    """[positions, depth] float32."""
    evidence: Tensor
    """[positions, depth] int64; 0 for n-grams, which have no second opinion."""
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
        evidence = torch.from_numpy(arrays["evidence"]).long()
        if name.startswith("ngram"):
            evidence = torch.zeros(probs.shape, dtype=torch.int64)
        lens = np.diff(arrays[f"{name}_starts"]).tolist()
    return [Request(*parts) for parts in zip(*(t.split(lens) for t in (probs, evidence, accepted)), strict=True)]


RAW, CALIBRATED, WITH_EVIDENCE = range(3)
"""Each with what those before it have."""


class Estimate:
    """What serving estimates acceptance with, or a part of it."""

    def __init__(self, kind: int, depth: int) -> None:
        self.kind, self.depths, self.calibrate = kind, torch.arange(1, depth + 1), AcceptanceEstimator(depth)
        self.calibrate.calibration = self.calibration = Calibration(depth)

    def apply(self, probs: Tensor, evidence: Tensor) -> Tensor:
        if self.kind == RAW:
            return probs
        return self.calibrate(probs, self.depths, evidence if self.kind == WITH_EVIDENCE else None)

    def observe(self, probs: Tensor, evidence: Tensor, reached: Tensor, accepted: Tensor) -> None:
        if self.kind == WITH_EVIDENCE:
            self.calibrate.evidence.observe(evidence, self.apply(probs, evidence), reached, accepted)
        self.calibration.observe(probs, self.depths, reached, accepted)


def replay(names: list[str], kind: int, seed: int) -> Result:
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
    estimators = [Estimate(kind, depth) for _ in names]
    accepted_total = expected_total = steps = 0.0
    while True:
        raw, evidence = (torch.stack([running[slot][field][positions[slot]] for slot in range(SLOTS)]) for field in range(2))
        acceptable = torch.stack([running[slot].accepted[positions[slot]] for slot in range(SLOTS)])
        parts = zip(estimators, raw.split(share), evidence.split(share), strict=True)
        survival = survival_from_probs(torch.cat([e.apply(rows, kinds) for e, rows, kinds in parts]))
        draft_lens = select_prefixes(survival, CAPACITY_PER_REQUEST * SLOTS)
        num_accepted = torch.minimum(acceptable, draft_lens)
        outcomes = chain_outcomes(num_accepted, draft_lens, depth)
        parts = zip(*(t.split(share) for t in (raw, evidence, *outcomes)), strict=True)
        for estimator, part in zip(estimators, parts, strict=True):
            estimator.observe(*part)
        steps += SLOTS
        accepted_total += int(num_accepted.sum())
        expected_total += float(survival[torch.arange(depth) < draft_lens[:, None]].sum())
        for slot, accept_len in enumerate(num_accepted.tolist()):
            positions[slot] += accept_len + 1
            if positions[slot] >= len(running[slot].accepted):
                request = next(waiting[slot // share], None)
                if request is None:
                    return Result(
                        accepted_total / steps,
                        expected_total / steps,
                        [estimator.calibration.reliability() for estimator in estimators],
                    )
                running[slot], positions[slot] = request, 0


@cache
def replay_orders(names: tuple[str, ...], kind: int) -> list[Result]:
    return [replay(list(names), kind, seed) for seed in SEEDS]


def accepted(kind: int, *names: str) -> float:
    """Per request and step, mean over the orders."""
    return sum(run.accepted_per_step for run in replay_orders(names, kind)) / len(SEEDS)


def off(kind: int, *names: str) -> float:
    """How far the expected number of accepted tokens is from the accepted one, relative to the latter."""
    expected = sum(run.expected_per_step for run in replay_orders(names, kind)) / len(SEEDS)
    return abs(expected / accepted(kind, *names) - 1)


def gains(kind: int, *names: str) -> list[float]:
    """Accepted tokens over those of the kind before - 1, per order."""
    runs = zip(replay_orders(names, kind), replay_orders(names, kind - 1), strict=True)
    return [with_it.accepted_per_step / without.accepted_per_step - 1 for with_it, without in runs]


@pytest.mark.parametrize("name", ["standalone", "overconfident", "ngram", "ngram_human"])
def test_one_kind_of_draft_loses_nothing_and_knows_what_to_expect(name):
    assert accepted(CALIBRATED, name) > 0.99 * accepted(RAW, name)
    assert off(CALIBRATED, name) < 0.13
    # Its raw error is that of what calibrated selection has reached.
    (reliability,) = replay_orders((name,), CALIBRATED)[-1].reliability
    assert reliability.error < 0.03
    assert off(CALIBRATED, name) < off(RAW, name) / 3
    assert reliability.error < reliability.raw_error / 3


def test_a_draft_that_is_unsure_in_the_wrong_places_gains():
    """Order within one batch changes where the error depends on depth and score."""
    assert min(gains(CALIBRATED, "standalone")) > 0
    assert min(gains(CALIBRATED, "ngram_human")) > 0


@pytest.mark.parametrize("other", ["ngram", "ngram_human", "overconfident"])
def test_drafts_of_two_kinds_in_one_batch_share_capacity_better(other):
    """The draft model is too modest about greedy acceptance, the others less so, or too sure: raw scores do not compare."""
    assert min(gains(CALIBRATED, "standalone", other)) > 0.04
    assert off(CALIBRATED, "standalone", other) < off(RAW, "standalone", other) / 3


@pytest.mark.parametrize("name", ["standalone", "overconfident"])
def test_a_match_in_the_text_tells_what_scores_do_not(name):
    assert min(gains(WITH_EVIDENCE, name)) > 0.03
    assert off(WITH_EVIDENCE, name) < 0.1


def test_without_evidence_nothing_changes():
    """One kind for all tokens says nothing: the score's calibration has it already."""
    assert min(gains(WITH_EVIDENCE, "ngram_human")) > -0.02
