"""How long a step takes: seeded by timed passes, corrected by real steps.

    t(step) = target(rows) + context(tokens in the KV cache of the batch) + host(batch)
              + [depth > 0] * (window(batch) + (depth - 1) * branch(batch))

Every term but the context's is a piecewise linear curve; its values at powers of two (the target's also halfway) are the
parameters. They
start at what was timed, with a Gaussian prior around it whose errors are related (a machine that is slower than when it was
timed is slower everywhere; a curve that is wrong at 8 is wrong at 16), and a Kalman filter corrects them. So settings that
were never used profit from those that were.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

import numpy as np


class StepShape(NamedTuple):
    """What a step's time depends on."""

    batch_size: int
    depth: int
    """Levels drafted; 0: nothing is."""
    rows: int
    """Of the target's pass: a root per request and the selected drafts."""
    context_tokens: float = 0.0
    """Tokens in the KV cache of all requests, which every pass reads."""


@dataclass(frozen=True)
class PassTimes:
    """Seconds of single passes, timed before serving.

    target_s: by rows. window_s, branch_s: a draft's first and each further pass, by batch size; empty where no model drafts.
    context_s: per token in the KV cache of the batch.
    """

    target_s: Mapping[int, float]
    window_s: Mapping[int, float] = field(default_factory=dict)
    branch_s: Mapping[int, float] = field(default_factory=dict)
    context_s: float = 0.0

    def to_json(self) -> dict:
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict) -> PassTimes:
        """The inverse of `to_json`, whose integer keys JSON has made strings."""
        curves = {
            name: {int(size): float(seconds) for size, seconds in values[name].items()}
            for name in ("target_s", "window_s", "branch_s")
        }
        return cls(**curves, context_s=float(values["context_s"]))


# Standard deviations before the first step, relative to what was timed.
_COMMON_DEVIATION = 0.3
_CURVE_DEVIATION = {"target": 0.15, "window": 0.3, "branch": 0.3}
_CONTEXT_DEVIATION = 1.0
HOST_SHARE = 0.05
"""Of the target's pass over as many rows: assumed at first, give or take as much, for a step's host time, which is not timed
beforehand, and again for what a step that drafts takes beside its passes, which counts with the window's."""
_RELATED_OCTAVES = 2.0
"""Sizes so far apart hardly share a curve's errors."""
_NOISE = 0.12
"""Standard deviation of one step's time, relative."""
_DRIFT = 2e-4
"""Share of the prior's variance that returns with every step: how fast the machine may change."""
_DRAW_SHARE = 0.4
"""Of the deviations, in what is drawn: whole ones try more than the tries are worth (docs/lessons.md)."""
_OUTLIER_DEVIATIONS = 2.5
"""A step further off than that counts as that far; one that took so much longer and stands alone (first-use compilation,
another process's burst) does not count at all."""
_SUSPENDED, _LONG_SUSPENDED, _LONG_S, PATIENCE = 10.0, 3.0, 1.0, 3
"""A step that takes `_SUSPENDED` times as long, or `_LONG_SUSPENDED` times and `_LONG_S` seconds longer, was suspended, unless
`PATIENCE` before it were, too: it does not count."""


def is_suspension(predicted: float, seconds: float) -> bool:
    """Whether no step takes so much longer than predicted, unless the process is stopped in it."""
    return seconds > _SUSPENDED * predicted or seconds > max(_LONG_SUSPENDED * predicted, predicted + _LONG_S)


class StepTimeModel:
    """Predicts steps' times and learns from them; a few tens of parameters, some tenths of a millisecond a step, on the host.

    Args:
        seed: what was timed; curves are extended with their last slope.
        max_rows, max_batch_size: the largest that will be asked for.
    """

    def __init__(self, seed: PassTimes, *, max_rows: int, max_batch_size: int) -> None:
        self._curves: dict[str, tuple[np.ndarray, slice]] = {}
        """Nodes of each curve, and their places among the parameters."""
        values, deviations, blocks = [], [], []
        timed = {"target": seed.target_s, "window": seed.window_s, "branch": seed.branch_s, "host": {}}
        start = 0
        for name, times in timed.items():
            nodes = _powers_of_two(max_rows if name == "target" else max_batch_size)
            if name == "target":
                # Where memory's cost ends and arithmetic's begins, there is a bend.
                nodes = np.union1d(nodes, 1.5 * nodes[1:-1])
            curve = interpolate(nodes, times) if times else np.zeros(len(nodes))
            deviation = _CURVE_DEVIATION.get(name, 0.0) * curve
            if name in ("window", "host"):
                untimed = HOST_SHARE * interpolate(nodes, seed.target_s)
                curve, deviation = curve + untimed, np.hypot(deviation, untimed)
            self._curves[name] = (nodes, slice(start, start + len(nodes)))
            start += len(nodes)
            values.append(curve)
            deviations.append(deviation)
            octaves = np.abs(np.subtract.outer(np.log2(nodes), np.log2(nodes)))
            blocks.append(np.exp(-octaves / _RELATED_OCTAVES))
        values.append(np.array([seed.context_s]))
        deviations.append(np.array([_CONTEXT_DEVIATION * seed.context_s]))
        blocks.append(np.eye(1))
        self._values = np.concatenate(values)
        self._least = 0.2 * self._values
        scale = np.concatenate(deviations)
        correlation = np.zeros((len(scale), len(scale)))
        at = 0
        for block in blocks:
            correlation[at : at + len(block), at : at + len(block)] = block
            at += len(block)
        self._prior = correlation * np.outer(scale, scale)
        self._prior += _COMMON_DEVIATION**2 * np.outer(self._values, self._values)
        self._covariance = self._prior.copy()
        self._num_late = 0
        """Steps in a row that were."""
        # Steps of a shape follow each other, and describing one costs more than learning from it.
        self._features_of = functools.lru_cache(maxsize=4096)(self._describe)
        self.relative_error = 0.0
        """Moving average of |predicted - measured| / measured."""

    def features(self, batch_size: int, depths: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """What multiplies the parameters, but for the context's.

        Args:
            depths, rows: [n] integers.
        Returns:
            [n, num_parameters] float64.
        """
        features = np.zeros((len(depths), len(self._values)))
        self._add(features, "target", rows, np.ones(len(rows)))
        batch_sizes = np.full(len(depths), batch_size)
        self._add(features, "host", batch_sizes, np.ones(len(depths)))
        self._add(features, "window", batch_sizes, (depths > 0).astype(float))
        self._add(features, "branch", batch_sizes, np.maximum(depths - 1, 0).astype(float))
        return features

    def predict(self, features: np.ndarray, context_tokens: float = 0.0, values: np.ndarray | None = None) -> np.ndarray:
        """Seconds [n] of steps described by `features` [n, num_parameters].

        Args:
            values: from `draw`; default: the most likely ones.
        """
        values = self._bound(self._values if values is None else values)
        return features @ values + values[-1] * context_tokens

    def draw(self, random: np.random.Generator) -> np.ndarray:
        """Parameters [num_parameters] as they may well be: likely where steps have shown them, uncertain elsewhere."""
        spread, directions = np.linalg.eigh(self._covariance)
        scale = np.sqrt(np.maximum(spread, 0.0))
        return self._values + _DRAW_SHARE * (directions @ (scale * random.standard_normal(len(scale))))

    def _bound(self, values: np.ndarray) -> np.ndarray:
        """Nothing takes next to no time, and more rows take no less."""
        values = np.maximum(values, self._least)
        rows = self._curves["target"][1]
        values[rows] = np.maximum.accumulate(values[rows])
        return values

    def predict_step(self, shape: StepShape) -> float:
        return float(self.predict(self._features_of(shape[:-1])[None], shape.context_tokens)[0])

    def observe(self, shape: StepShape, seconds: float) -> float:
        """Learn from one real step; returns what was predicted for it.

        Raises:
            ValueError: seconds not finite and positive.
        """
        if not (math.isfinite(seconds) and seconds > 0):
            raise ValueError(f"a step's time must be finite and above 0, got {seconds}")
        features = self._features_of(shape[:-1]).copy()
        features[-1] = shape.context_tokens
        predicted = float(features @ self._values)
        self.relative_error += 0.05 * (abs(predicted - seconds) / seconds - self.relative_error)

        self._covariance += _DRIFT * (self._prior - self._covariance)
        spread = self._covariance @ features
        variance = float(features @ spread) + (_NOISE * max(predicted, 1e-9)) ** 2
        limit = _OUTLIER_DEVIATIONS * math.sqrt(variance)
        self._num_late = self._num_late + 1 if seconds - predicted > limit else 0
        was_suspended = 0 < self._num_late <= PATIENCE and is_suspension(predicted, seconds)
        if was_suspended or self._num_late == 1:
            return predicted
        gain = spread / variance
        self._values = self._values + gain * min(max(seconds - predicted, -limit), limit)
        self._covariance -= np.outer(gain, spread)
        return predicted

    def _describe(self, shape: tuple[int, int, int]) -> np.ndarray:
        """`features` of one step, without its context."""
        batch_size, depth, rows = shape
        return self.features(batch_size, np.array([depth]), np.array([rows]))[0]

    def _add(self, features: np.ndarray, curve: str, at: np.ndarray, weights: np.ndarray) -> None:
        nodes, columns = self._curves[curve]
        if len(nodes) == 1:
            features[:, columns.start] += weights
            return
        left = np.clip(np.searchsorted(nodes, at, side="right") - 1, 0, len(nodes) - 2)
        share = (at - nodes[left]) / (nodes[left + 1] - nodes[left])
        lines = np.arange(len(at))
        features[lines, columns.start + left] += weights * (1 - share)
        features[lines, columns.start + left + 1] += weights * share


def _powers_of_two(largest: int) -> np.ndarray:
    """1, 2, 4, ... up to the first that is at least `largest`."""
    return 2.0 ** np.arange(math.ceil(math.log2(max(largest, 1))) + 1)


def interpolate(at: np.ndarray, times: Mapping[int, float]) -> np.ndarray:
    """Linear between the timed sizes; beyond them with the outermost slope, but never falling.

    Other work on the machine only ever lengthens a pass. So one that took longer than a larger one, or than as many
    smaller ones as have its size, was disturbed, and takes no longer than those.
    """
    sizes = np.array(sorted(times), dtype=float)
    seconds = np.array([times[int(size)] for size in sizes])
    seconds = np.minimum.accumulate(seconds[::-1])[::-1]
    for i in range(1, len(sizes)):
        seconds[i] = min(seconds[i], np.ceil(sizes[i] / sizes[i - 1]) * seconds[i - 1])
    curve = np.interp(at, sizes, seconds)
    if len(sizes) > 1:
        slope = (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2])
        curve = curve + slope * np.maximum(at - sizes[-1], 0)
    return curve
