"""Who asks for what, and when: classes of requests, their lengths, and arrivals."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tetris_sglang.tools.simulate.traces import DraftRows, encode, read_rows


@dataclass(frozen=True)
class Lengths:
    """A distribution of token counts: `N`, `LOW-HIGH` (uniform, both included) or `exp:MEAN` (geometric)."""

    kind: str
    low: int
    high: int

    @classmethod
    def parse(cls, text: str | int, option: str) -> Lengths:
        """
        Raises:
            ValueError: naming the option.
        """
        kind, rest = ("exp", str(text)[4:]) if str(text).startswith("exp:") else ("uniform", str(text))
        parts = rest.split("-")
        if len(parts) > (1 if kind == "exp" else 2) or not all(part.isdecimal() for part in parts):
            raise ValueError(f"{option} {text}: give N, LOW-HIGH or exp:MEAN")
        low, high = int(parts[0]), int(parts[-1])
        if not 1 <= low <= high:
            raise ValueError(f"{option} {text}: lengths are at least 1, and LOW is not above HIGH")
        return cls(kind, low, high)

    @property
    def mean(self) -> float:
        return (self.low + self.high) / 2

    def draw(self, count: int, random: np.random.Generator) -> np.ndarray:
        if self.kind == "exp":
            return random.geometric(1 / self.low, count)
        return random.integers(self.low, self.high, count, endpoint=True)


@dataclass(frozen=True)
class RequestClass:
    """Requests of one kind.

    share: of all requests, relative to the other classes'. weight: in the batch-wide selection.
    """

    name: str
    rows: DraftRows
    prompt_len: Lengths
    output_len: Lengths
    share: float = 1.0
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not (self.share > 0 and self.weight > 0):
            raise ValueError(f"class {self.name}: share and weight must be above 0")


def read_classes(path: Path, *, seed: int = 0) -> list[RequestClass]:
    """Classes from a JSON list of objects: trace, and optionally name, share, weight, prompt_len, output_len.

    Paths of traces are relative to the file.

    Raises:
        ValueError: not such a file.
    """
    path = Path(path)
    try:
        described = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"--classes {path}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"--classes {path}: {error}") from None
    known = {"trace", "name", "share", "weight", "prompt_len", "output_len"}
    if not (isinstance(described, list) and described and all(isinstance(one, dict) for one in described)):
        raise ValueError(f"--classes {path}: give a JSON list of objects")
    classes = []
    for one in described:
        if unknown := sorted(one.keys() - known):
            raise ValueError(f"--classes {path}: unknown {', '.join(unknown)}; known: {', '.join(sorted(known))}")
        if "trace" not in one:
            raise ValueError(f"--classes {path}: every class needs a trace")
        trace = path.parent / one["trace"]
        classes.append(
            RequestClass(
                str(one.get("name", Path(one["trace"]).name.split(".")[0])),
                read_rows(trace, seed=seed),
                Lengths.parse(one.get("prompt_len", "exp:512"), "prompt_len"),
                Lengths.parse(one.get("output_len", "exp:256"), "output_len"),
                float(one.get("share", 1.0)),
                float(one.get("weight", 1.0)),
            )
        )
    return classes


class RowTable(NamedTuple):
    """The rows of all classes, as compiled code reads them."""

    codes: np.ndarray
    """[P, D] uint16: survivals times the class's weight (`encode`)."""
    accepted: np.ndarray
    """[P] uint8."""
    class_starts: np.ndarray
    """[classes + 1] int64."""


class Requests(NamedTuple):
    """M requests in the order of their arrival."""

    arrival_s: np.ndarray
    """[M] float64, ascending; not read in a closed loop."""
    class_ids: np.ndarray
    """[M] int32."""
    prompt_lens: np.ndarray
    """[M] int32."""
    output_lens: np.ndarray
    """[M] int32."""
    first_rows: np.ndarray
    """[M] int64, of the row table: where the request's text begins."""
    router_draws: np.ndarray
    """[M, 2] float64 in [0, 1): for routers that draw."""


def join_rows(classes: Sequence[RequestClass]) -> RowTable:
    """One table of all classes' rows, cut to the depth that all of them have."""
    depth = min(one.rows.depth for one in classes)
    heaviest = max(one.weight for one in classes)
    sizes = [len(one.rows.accepted) for one in classes]
    return RowTable(
        np.concatenate([encode(one.rows.survival[:, :depth], one.weight / heaviest) for one in classes]),
        np.concatenate([one.rows.accepted for one in classes]).astype(np.uint8),
        np.cumsum([0, *sizes], dtype=np.int64),
    )


def draw_requests(classes: Sequence[RequestClass], count: int, *, seed: int, arrival_s: np.ndarray | None = None) -> Requests:
    """Requests of the classes in their shares; each begins where some recorded request began.

    Args:
        arrival_s: [count], ascending; None for a closed loop.
    """
    random = np.random.default_rng(seed)
    shares = np.array([one.share for one in classes])
    class_ids = random.choice(len(classes), count, p=shares / shares.sum()).astype(np.int32)
    prompt_lens, output_lens = np.empty(count, np.int32), np.empty(count, np.int32)
    first_rows = np.empty(count, np.int64)
    offset = 0
    for number, one in enumerate(classes):
        mine = np.flatnonzero(class_ids == number)
        prompt_lens[mine] = one.prompt_len.draw(len(mine), random)
        output_lens[mine] = one.output_len.draw(len(mine), random)
        first_rows[mine] = offset + random.choice(one.rows.starts[:-1], len(mine))
        offset += len(one.rows.accepted)
    arrivals = np.zeros(count) if arrival_s is None else np.asarray(arrival_s, np.float64)
    return Requests(arrivals, class_ids, prompt_lens, output_lens, first_rows, random.random((count, 2)))


# -- arrivals ------------------------------------------------------------------------------------------------------


def draw_arrivals(kind: str, rate: float, count: int, *, burstiness: float = 1.0, seed: int = 0) -> np.ndarray:
    """Seconds [count] at which requests arrive, ascending.

    Args:
        kind: poisson, or gamma: gaps of a gamma distribution whose standard deviation is `burstiness` times its mean.
        rate: requests per second.
    Raises:
        ValueError: another kind, or nothing positive.
    """
    if not rate > 0:
        raise ValueError(f"--rates {rate:g}: give requests per second above 0")
    if not burstiness > 0:
        raise ValueError(f"--burstiness {burstiness:g}: give a number above 0")
    random = np.random.default_rng([seed, 1])
    if kind == "poisson":
        gaps = random.exponential(1 / rate, count)
    elif kind == "gamma":
        shape = burstiness**-2
        gaps = random.gamma(shape, 1 / (rate * shape), count)
    else:
        raise ValueError(f"--arrivals {kind}: there are closed, poisson, gamma, or a file of seconds")
    return np.cumsum(gaps)


def read_arrivals(path: Path) -> np.ndarray:
    """Seconds from a file, one per line, in any order.

    Raises:
        ValueError: unreadable, or not seconds.
    """
    try:
        seconds = np.array([float(line) for line in Path(path).read_text().split()])
    except OSError as error:
        raise ValueError(
            f"--arrivals {path}: {error.strerror}; there are closed, poisson, gamma, or a file of seconds"
        ) from None
    except ValueError as error:
        raise ValueError(f"--arrivals {path}: {error}") from None
    if len(seconds) == 0 or not np.isfinite(seconds).all():
        raise ValueError(f"--arrivals {path}: give one finite number of seconds per line")
    return np.sort(seconds) - seconds.min()
