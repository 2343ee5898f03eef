"""What is asked of the servers: how requests arrive, with which prompts, and how long the answers may be.

Requests are sent by SGLang's own `python -m sglang.bench_serving`; here are its arguments.

Users' answers are of unlike lengths, and so are the benchmark's. Requests of one length start, prefill and end together
while nothing speculates: their prefills stop nobody. With speculation they end one by one, and every prefill stops the
others. So equal lengths flatter the arm without speculation, and no user sends them.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from tetris_sglang.tools.prompts import RESULTS, Prompt, read_human_eval, read_questions, read_sharegpt

if TYPE_CHECKING:
    from tetris_sglang.tools.bench.settings import Settings

SHAREGPT, HUMAN_EVAL, QUESTIONS = SOURCES = ("sharegpt", "humaneval", "questions")
SHARED_PREFIX = "shared-prefix"
UNLIKE = "unlike"
WORKLOADS = (*SOURCES, "mixed", SHARED_PREFIX, UNLIKE)
"""mixed: the three before it in turn. shared-prefix: the same in groups that begin with the same long text. unlike:
mixed, every other request at temperature 1 instead of 0."""
UNLIKE_TEMPERATURES = (0.0, 1.0)
DRAWN, EQUAL = LENGTHS = ("drawn", "equal")
"""drawn: `draw_length`, or less where the model ends its answer. equal: all of --output-len, past an answer's end."""
MAX_CHARS = 1024
"""Longer prompts are left out: a CPU would spend its time on prefill, which no speculation shortens."""
WARM_UP_PROMPTS = ("def main():\n", "The result is", "import os\n", "for i in range(10):\n")
WAVES = 4
POISSON_SECONDS = 10
GROUP_SIZE = 4
PREFIX_CHARS = 1500
"""Some 400 tokens."""


class Load(NamedTuple):
    """Closed loop: so many requests at a time, the next when one ends. Or Poisson arrivals, so many per second."""

    concurrency: int | None = None
    request_rate: float | None = None

    @classmethod
    def of(cls, sample: Mapping[str, Any]) -> Load:
        return cls(sample["concurrency"], sample["request_rate"])

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
        """Several waves: in the last one the batch only shrinks, and the slowest finish almost alone."""
        if self.request_rate is None:
            return max(least, waves * self.concurrency)
        return max(least, math.ceil(POISSON_SECONDS * self.request_rate))

    def arguments(self) -> list[str]:
        if self.request_rate is None:
            return ["--max-concurrency", str(self.concurrency)]
        return ["--request-rate", str(self.request_rate)]


class Workload(Protocol):
    """Prompts for bench_serving."""

    def arguments(self, count: int, repeat: int, temperature: float, folder: Path) -> list[str]:
        """Its dataset arguments for `count` prompts; every repeat takes others.

        Args:
            temperature: of the run.
            folder: may be written to.
        """

    def temperatures(self, count: int) -> list[float | None]:
        """Each prompt's own; None: that of the run."""


class Dataset(NamedTuple):
    """A user's own, in any of bench_serving's formats. Its seed, another one in each repeat, chooses the prompts; of the format
    `openai` it takes the first ones, so they are given to it in another order each time, and without what the run decides.

    Answers are of `output_len` tokens; where the model ends them (--lengths drawn), of so many at most.
    """

    name: str
    path: str
    output_len: int

    def arguments(self, count: int, repeat: int, temperature: float, folder: Path) -> list[str]:
        path = str(self._shuffle(repeat, folder / "prompts.jsonl")) if self.name == "openai" else self.path
        return [
            *("--dataset-name", self.name, *(("--dataset-path", path) if path else ())),
            *("--sharegpt-output-len", str(self.output_len), "--random-output-len", str(self.output_len)),
            *(chat_arguments(temperature) if self.name == "openai" else ()),
        ]

    def _shuffle(self, repeat: int, path: Path) -> Path:
        with open(self.path, encoding="utf-8") as file:
            rows = [json.loads(line) for line in file if line.strip()]
        random.Random(repeat).shuffle(rows)
        kept = ({name: value for name, value in row.items() if name not in ("temperature", "stream")} for row in rows)
        path.write_text("".join(json.dumps(row) + "\n" for row in kept))
        return path

    def temperatures(self, count: int) -> list[float | None]:
        return [None] * count


class Chats(NamedTuple):
    """Real prompts, written as chats in bench_serving's format `openai`: there requests have parameters of their own.

    Its format `custom` would not do: from what a chat template renders it removes every bos_token, and SmolLM2's
    begins each turn.
    """

    prompts: Sequence[Prompt]
    seed: int
    output_len: int
    """Tokens; the mean of those drawn."""
    lengths: str = DRAWN
    """One of LENGTHS."""
    shares_prefixes: bool = False
    in_turn: Sequence[float] = ()
    """Temperatures that the requests have in turn, instead of the run's."""

    def arguments(self, count: int, repeat: int, temperature: float, folder: Path) -> list[str]:
        path = folder / "prompts.jsonl"
        with path.open("w") as file:
            for prompt, own in zip(self.take(count, repeat), self.temperatures(count), strict=True):
                chat = {"messages": [{"role": "user", "content": prompt.text}]}
                # Given --sharegpt-output-len, bench_serving would not read it.
                chat["max_tokens"] = self.choose_length(prompt)
                file.write(json.dumps(chat if own is None else chat | {"temperature": own}) + "\n")
        return ["--dataset-name", "openai", "--dataset-path", str(path), *chat_arguments(temperature)]

    def temperatures(self, count: int) -> list[float | None]:
        return [*islice(cycle(self.in_turn or [None]), count)]

    def take(self, count: int, repeat: int) -> list[Prompt]:
        """Another `count` prompts for every repeat, from the start again when they run out."""
        taken = [self.prompts[(repeat * count + i) % len(self.prompts)] for i in range(count)]
        return share_prefixes(taken, self.prompts, repeat) if self.shares_prefixes else taken

    def choose_length(self, prompt: Prompt) -> int:
        """Tokens of the answer, at most."""
        return self.output_len if self.lengths == EQUAL else draw_length(prompt.id, self.output_len, self.seed)


def find_workload(settings: Settings) -> Workload:
    """
    Raises:
        NotFetched: the prompts cannot be had.
        ValueError: a run would ask some of them twice.
    """
    if settings.dataset_name:
        return Dataset(settings.dataset_name, settings.dataset, settings.output_len)
    read = {SHAREGPT: lambda: read_sharegpt(RESULTS), HUMAN_EVAL: read_human_eval, QUESTIONS: read_questions}
    sources = [
        [prompt for prompt in read[name]() if len(prompt.text) <= MAX_CHARS]
        for name in ([settings.workload] if settings.workload in SOURCES else SOURCES)
    ]
    for prompts in sources:
        random.Random(settings.seed).shuffle(prompts)
    count = max(load.num_prompts(settings.min_prompts, settings.waves) for load in settings.loads)
    if count > (distinct := len(sources) * min(map(len, sources))):
        raise ValueError(
            f"--workload {settings.workload}: a run of {count} prompts would ask some of its {distinct} twice, "
            "and what a server has written once it may draft at no cost. Lower --waves, --concurrency or --request-rate, "
            f"or give --workload {SHAREGPT}."
        )
    return Chats(
        # In turn, the shorter ones from the start again.
        [prompts[i % len(prompts)] for i in range(max(map(len, sources))) for prompts in sources],
        settings.seed,
        settings.output_len,
        settings.lengths,
        shares_prefixes=settings.workload == SHARED_PREFIX,
        in_turn=UNLIKE_TEMPERATURES if settings.workload == UNLIKE else (),
    )


def find_length_range(mean: int) -> tuple[int, int]:
    """The fewest and the most tokens that are drawn."""
    return -(-mean // 3), 5 * mean // 3


def draw_length(prompt_id: str, mean: int, seed: int) -> int:
    """Tokens, uniform over a third to five thirds of the mean; the same for every arm, whenever it is asked."""
    return random.Random(f"{seed} {prompt_id}").randint(*find_length_range(mean))


def chat_arguments(temperature: float) -> list[str]:
    """For the format `openai`: bench_serving sends no --temperature there, and counts max_tokens unless usage is sent."""
    body = {"temperature": temperature, "stream_options": {"include_usage": True}}
    return ["--backend", "sglang-oai-chat", "--extra-request-body", json.dumps(body)]


def share_prefixes(prompts: Sequence[Prompt], sources: Sequence[Prompt], repeat: int) -> list[Prompt]:
    """The prompts in groups of GROUP_SIZE, each behind PREFIX_CHARS characters that its group has in common.

    Args:
        sources: what the prefixes are made of. Each begins with another one, also from repeat to repeat.
    """
    num_groups = -(-len(prompts) // GROUP_SIZE)
    prefixes = []
    for group in range(num_groups):
        prefix, start = "", repeat * num_groups + group
        while len(prefix) < PREFIX_CHARS:
            prefix += sources[start % len(sources)].text + "\n\n"
            start += 1
        prefixes.append(prefix[:PREFIX_CHARS])
    return [p._replace(text=prefixes[i // GROUP_SIZE] + "\n\n" + p.text) for i, p in enumerate(prompts)]
