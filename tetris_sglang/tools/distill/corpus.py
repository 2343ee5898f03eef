"""Texts that a draft learns from: prompts, and what the target (or the draft itself) wrote after them.

A file has one text a line, JSON: {"prompt": [ids], "output": [ids], "temperature": 0.7, "kind": "sharegpt"}. Servers write such
files of their own traffic (--speculative-tetris-record-text), and `write_texts` writes one of given prompts.
"""

from __future__ import annotations

import json
import logging
import random
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import requests
import torch
from torch import Tensor
from tqdm import tqdm

from tetris_sglang.tools.fetch import NotFetched
from tetris_sglang.tools.prompts import TRAINING, read_functions, read_human_eval, read_questions, read_sharegpt
from tetris_sglang.tools.server_process import ServerProcess, sigterm_as_interrupt

logger = logging.getLogger(__name__)

PROMPTS_AT_ONCE = 64
_TIMEOUT_S = 600
_MIN_FREE_BYTES = 200 << 20


class Text(NamedTuple):
    """One answer."""

    token_ids: Tensor
    """[length] int64, prompt and output."""
    prompt_tokens: int
    temperature: float
    kind: str


class Question(NamedTuple):
    """What is asked, and how the answer is drawn."""

    token_ids: list[int]
    temperature: float
    kind: str


def read_texts(path: Path, *, vocab_size: int, max_tokens: int, min_output_tokens: int = 1) -> list[Text]:
    """The texts of a file; what is longer than `max_tokens` is cut at its end.

    A last line that was cut off (a server or a run that was ended while it wrote) is left out.

    Args:
        vocab_size: of the target, which all ids must be below.
        min_output_tokens: texts with fewer are left out.
    Raises:
        ValueError: no such file, a line that is no text, an id that the target does not have, or nothing to learn from.
    """
    lines, texts = _read_lines(path), []
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
            prompt, output = entry["prompt"], entry["output"]
            token_ids = torch.tensor([*prompt, *output], dtype=torch.int64)
            text = Text(token_ids[:max_tokens], len(prompt), float(entry.get("temperature", 0)), entry.get("kind", "traffic"))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            if number == len(lines):
                logger.warning("%s: the last line is incomplete and left out", path)
                continue
            raise ValueError(
                f'{path}, line {number}: no text, which is {{"prompt": [ids], "output": [ids]}}: {error}'
            ) from error
        if len(token_ids) and not 0 <= int(token_ids.min()) <= int(token_ids.max()) < vocab_size:
            raise ValueError(f"{path}, line {number}: token {int(token_ids.max())} is none of the target's {vocab_size}")
        if prompt and len(text.token_ids) >= text.prompt_tokens + min_output_tokens:
            texts.append(text)
    if not texts:
        raise ValueError(f"{path} holds no text with {min_output_tokens} output tokens or more within {max_tokens} tokens")
    return texts


NAMED = {
    "sharegpt": lambda: read_sharegpt(TRAINING),
    "humaneval": read_human_eval,
    "functions": read_functions,
    "questions": read_questions,
}
"""Prompts that are fetched, or shipped."""


def read_prompts(path: Path) -> list[str]:
    """A prompt per line: {"text": "a user's turn"}, or {"prompt": "..."}; or one of `NAMED`.

    Raises:
        ValueError: no such file, a line that has neither, or prompts that cannot be fetched.
    """
    if str(path) in NAMED and not path.exists():
        try:
            return [prompt.text for prompt in NAMED[str(path)]()]
        except NotFetched as error:
            raise ValueError(f"--prompts {path}: {error}") from error
    prompts = []
    for number, line in enumerate(_read_lines(path), 1):
        try:
            entry = json.loads(line)
            prompts.append(str(entry["text"] if "text" in entry else entry["prompt"]))
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f'{path}, line {number}: no prompt, which is {{"text": "a question"}}: {error}') from error
    if not prompts:
        raise ValueError(f"{path} holds no prompts")
    return prompts


def _read_lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error


def count_lines(path: Path) -> int:
    """Whole lines of a file that may not be there."""
    return path.read_bytes().count(b"\n") if path.exists() else 0


def write_texts(
    path: Path, questions: Sequence[Question], arguments: Sequence[str], *, max_tokens: int, seed: int, log_path: Path
) -> None:
    """Let a server answer the questions that `path` has no line for yet, and append the answers in the order of the questions.

    Args:
        arguments: of the server, whose model writes.
        max_tokens: of a question and its answer together.
    Raises:
        ServerFailed: it did not start, or ended. OSError: the disk is full; what was written stays.
    """
    _drop_broken_end(path)
    first = count_lines(path)
    if first >= len(questions):
        return
    with sigterm_as_interrupt(), ServerProcess(arguments, log_path) as server, path.open("a", encoding="utf-8") as out:
        bar = tqdm(total=len(questions), initial=first, desc=path.stem, unit="text", mininterval=2)
        for begin in range(first, len(questions), PROMPTS_AT_ONCE):
            part = questions[begin : begin + PROMPTS_AT_ONCE]
            _check_space(path)
            for question, output in zip(part, _answer(server.url, part, max_tokens, seed + begin), strict=True):
                entry = {"prompt": question.token_ids, "output": output, "temperature": question.temperature}
                out.write(json.dumps(entry | {"kind": question.kind}) + "\n")
            out.flush()
            bar.update(len(part))
        bar.close()


def _answer(url: str, questions: Sequence[Question], max_tokens: int, seed: int) -> list[list[int]]:
    """All at once: the server batches them."""
    sampling = [
        {
            "temperature": question.temperature,
            "max_new_tokens": max(1, max_tokens - len(question.token_ids)),
            "sampling_seed": seed + i,
        }
        for i, question in enumerate(questions)
    ]
    body = {"input_ids": [question.token_ids for question in questions], "sampling_params": sampling}
    response = requests.post(f"{url}/generate", json=body, timeout=_TIMEOUT_S * len(questions))
    response.raise_for_status()
    return [answer["output_ids"] for answer in response.json()]


def _drop_broken_end(path: Path) -> None:
    """A line that an interrupted call left incomplete."""
    if path.exists() and (content := path.read_bytes()) and not content.endswith(b"\n"):
        path.write_bytes(content[: content.rfind(b"\n") + 1])


def _check_space(path: Path) -> None:
    free = shutil.disk_usage(path.parent).free
    if free < _MIN_FREE_BYTES:
        raise OSError(f"{path.parent} has {free >> 20} MB left: free some, then call again with --resume; nothing is lost")


class Batch(NamedTuple):
    """Texts of like length, padded at their ends to the longest."""

    token_ids: Tensor
    """[texts, length] int64."""
    is_learnt: Tensor
    """[texts, length] bool: whether what follows this token is of an answer."""
    texts: list[Text]

    def to(self, device: torch.device) -> Batch:
        return Batch(self.token_ids.to(device), self.is_learnt.to(device), self.texts)


def pad(texts: Sequence[Text]) -> Batch:
    longest = max(len(text.token_ids) for text in texts)
    token_ids = torch.zeros(len(texts), longest, dtype=torch.int64)
    is_learnt = torch.zeros(len(texts), longest, dtype=torch.bool)
    for row, text in enumerate(texts):
        length = len(text.token_ids)
        token_ids[row, :length] = text.token_ids
        is_learnt[row, text.prompt_tokens - 1 : length - 1] = True
    return Batch(token_ids, is_learnt, list(texts))


def make_batches(texts: Sequence[Text], batch_tokens: int, seed: int) -> list[list[Text]]:
    """Every text once, those of like length together, in an order of the seed's own; padded to at most `batch_tokens`."""
    draw = random.Random(seed)
    batches: list[list[Text]] = [[]]
    longest = 0
    for text in sorted(texts, key=lambda text: len(text.token_ids) + draw.uniform(0, 32)):
        longest = max(longest, len(text.token_ids))
        if batches[-1] and (len(batches[-1]) + 1) * longest > batch_tokens:
            batches.append([])
            longest = len(text.token_ids)
        batches[-1].append(text)
    draw.shuffle(batches)
    return batches


def steps_of(texts: Sequence[Text], batch_tokens: int, seed: int, first: int, rank: int, ranks: int) -> Iterator[list[Text]]:
    """Batches without end, epoch after epoch, from step `first` on, of one of several ranks that take them in turn.

    A step is a batch for each rank; what an epoch has beyond whole steps is left out.
    """
    epoch = 0
    while True:
        batches = make_batches(texts, batch_tokens, seed * 1009 + epoch)
        if len(batches) < ranks:  # fewer than one each: some learn from the same
            batches = [batches[i % len(batches)] for i in range(ranks)]
        num_steps = len(batches) // ranks
        if first < num_steps:
            yield from batches[first * ranks + rank : num_steps * ranks : ranks]
        first, epoch = max(0, first - num_steps), epoch + 1
