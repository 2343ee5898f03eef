"""What is asked of the servers: how requests arrive, and with which prompts.

Requests are sent by SGLang's own `python -m sglang.bench_serving`; here are its arguments.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol

KINDS = ("code", "prose", "chat", "repetitive")
SHARED_PREFIX = "shared-prefix"
UNLIKE = "unlike"
WORKLOADS = ("mixed", *KINDS, SHARED_PREFIX, UNLIKE)
"""mixed: all kinds in turn. shared-prefix: the same in groups that begin with the same long text. unlike: all kinds in turn, as
chats, every other request at temperature 1 instead of 0."""
UNLIKE_TEMPERATURES = (0.0, 1.0)
WARM_UP_PROMPTS = ("def main():\n", "The result is", "import os\n", "for i in range(10):\n")
WAVES = 4
POISSON_SECONDS = 10
GROUP_SIZE = 4
PREFIX_CHARS = 1500
"""About 500 tokens of the shipped pair's, which has 2048 positions."""


class Load(NamedTuple):
    """Closed loop: so many requests at a time, the next when one ends. Or Poisson arrivals, so many per second."""

    concurrency: int | None = None
    request_rate: float | None = None

    @classmethod
    def of(cls, sample: Mapping[str, Any]) -> Load:
        return cls(sample["concurrency"], sample.get("request_rate"))

    @property
    def value(self) -> float:
        return self.concurrency if self.request_rate is None else self.request_rate

    @property
    def unit(self) -> str:
        return "concurrency" if self.request_rate is None else "requests/s"

    def __str__(self) -> str:
        if self.request_rate is None:
            return f"concurrency {self.concurrency}"
        return f"{self.request_rate:g} requests/s"

    def num_prompts(self, least: int, waves: int) -> int:
        """Several waves: in the last one the batch only shrinks. Without speculation requests of one length begin and end
        together, wave by wave; with it they do not, so few waves flatter the former."""
        if self.request_rate is None:
            return max(least, waves * self.concurrency)
        return max(least, math.ceil(POISSON_SECONDS * self.request_rate))

    def arguments(self) -> list[str]:
        if self.request_rate is None:
            return ["--max-concurrency", str(self.concurrency)]
        return ["--request-rate", str(self.request_rate)]


class Workload(Protocol):
    """Prompts for bench_serving."""

    def arguments(self, count: int, repeat: int, folder: Path) -> list[str]:
        """Its dataset arguments for `count` prompts; every repeat takes others.

        Args:
            folder: may be written to.
        """

    def temperatures(self, count: int) -> list[float | None]:
        """Each prompt's own; None: that of the run."""


class Dataset(NamedTuple):
    """A user's own, in any of bench_serving's formats. Its seed, another one in each repeat, chooses the prompts."""

    name: str
    path: str

    def arguments(self, count: int, repeat: int, folder: Path) -> list[str]:
        return ["--dataset-name", self.name, *(("--dataset-path", self.path) if self.path else ())]

    def temperatures(self, count: int) -> list[float | None]:
        return [None] * count


class ShippedPrompts(NamedTuple):
    """The texts that the repository ships."""

    texts: Sequence[str]
    shares_prefixes: bool = False
    in_turn: Sequence[float] = ()
    """Temperatures that the requests have in turn, instead of the run's."""

    def arguments(self, count: int, repeat: int, folder: Path) -> list[str]:
        texts, path = self.take(count, repeat), folder / "prompts.jsonl"
        if self.in_turn:
            # The one format whose requests have parameters of their own.
            dataset = write_chats(texts, self.temperatures(count), path)
            return [
                "--backend",
                "sglang-oai-chat",
                "--dataset-name",
                "openai",
                "--dataset-path",
                str(dataset),
            ]
        return ["--dataset-name", "custom", "--dataset-path", str(write_dataset(texts, path))]

    def temperatures(self, count: int) -> list[float | None]:
        return [*islice(cycle(self.in_turn or [None]), count)]

    def take(self, count: int, repeat: int) -> list[str]:
        """Another `count` prompts for every repeat, from the start again when they run out."""
        texts = extend_prompts(self.texts, count)
        taken = [texts[(repeat * count + i) % len(texts)] for i in range(count)]
        return share_prefixes(taken, self.texts, repeat) if self.shares_prefixes else taken


def extend_prompts(texts: Sequence[str], count: int) -> list[str]:
    """At least `count` texts: those given, and again from a later word on, so that none is another's prefix."""
    extended = list(texts)
    for lap in range(1, -(-count // len(texts))):
        extended += [text.split(" ", lap)[-1] for text in texts]
    return extended


def share_prefixes(texts: Sequence[str], sources: Sequence[str], repeat: int) -> list[str]:
    """The texts in groups of GROUP_SIZE, each behind PREFIX_CHARS characters that its group has in common.

    Args:
        sources: what the prefixes are made of. Each begins with another one, also from repeat to repeat.
    """
    num_groups = -(-len(texts) // GROUP_SIZE)
    prefixes = []
    for group in range(num_groups):
        prefix, start = "", repeat * num_groups + group
        while len(prefix) < PREFIX_CHARS:
            prefix += sources[start % len(sources)] + "\n\n"
            start += 1
        prefixes.append(prefix[:PREFIX_CHARS])
    return [prefixes[i // GROUP_SIZE] + "\n\n" + text for i, text in enumerate(texts)]


def write_dataset(texts: Sequence[str], out: Path) -> Path:
    """Write prompts as `--dataset-name custom` reads them."""
    with out.open("w") as file:
        for text in texts:
            turns = [{"role": "user", "content": text}, {"role": "assistant", "content": ""}]
            file.write(json.dumps({"conversations": turns}) + "\n")
    return out


def write_chats(texts: Sequence[str], temperatures: Sequence[float], out: Path) -> Path:
    """Write requests as `--dataset-name openai` reads them."""
    with out.open("w") as file:
        for text, temperature in zip(texts, temperatures, strict=True):
            messages = [{"role": "user", "content": text}]
            file.write(json.dumps({"messages": messages, "temperature": temperature}) + "\n")
    return out
