"""Real prompts: HumanEval (MIT), ShareGPT's conversations, and the project's own questions.

ShareGPT and HumanEval are fetched where they are used (`fetch.py`) and never part of the repository.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from tetris_sglang.tools.fetch import HUMAN_EVAL, SHAREGPT, fetch

QUESTIONS = Path(__file__).parents[1] / "data" / "questions.jsonl"
TRAINING, RESULTS, UNTOUCHED = "training", "results", "untouched"
SPLITS = {TRAINING: "0123456789", RESULTS: "abc", UNTOUCHED: "def"}
"""By the first hexadecimal digit of the SHA-1 of a conversation's id."""


class Prompt(NamedTuple):
    """One user turn."""

    id: str
    kind: str
    text: str


def read_human_eval(cache: Path | None = None) -> list[Prompt]:
    """All 164 problems, as a chat: the head of a function to complete."""
    lines = gzip.decompress(fetch(HUMAN_EVAL, cache).read_bytes()).decode().splitlines()
    return [
        Prompt(problem["task_id"], "humaneval", f"Complete this Python function:\n\n{problem['prompt'].strip()}")
        for problem in map(json.loads, lines)
    ]


def read_sharegpt(split: str, cache: Path | None = None) -> list[Prompt]:
    """The first question of every conversation of one of SPLITS, in the file's order.

    Conversations that do not begin with a question and an answer are left out, and of equal questions all but the first,
    whatever its split: no question of one split is in another.
    """
    if split not in SPLITS:
        raise ValueError(f"{split}: the splits are {', '.join(SPLITS)}")
    prompts: dict[str, Prompt] = {}
    for conversation in _read_objects(fetch(SHAREGPT, cache).read_text(encoding="utf-8", errors="replace")):
        turns = conversation.get("conversations") or []
        if len(turns) < 2 or [t.get("from") for t in turns[:2]] != ["human", "gpt"]:
            continue
        question = turns[0]["value"].strip()
        if question and turns[1]["value"].strip():
            prompts.setdefault(question, Prompt(conversation["id"], "sharegpt", question))
    return [p for p in prompts.values() if hashlib.sha1(p.id.encode()).hexdigest()[0] in SPLITS[split]]


def _read_objects(text: str) -> Iterator[dict]:
    """The objects of a JSON array that may be cut off at its end, as the packaged file is."""
    decoder, position = json.JSONDecoder(), text.index("[") + 1
    while True:
        while position < len(text) and text[position] in " \r\n\t,":
            position += 1
        try:
            value, position = decoder.raw_decode(text, position)
        except json.JSONDecodeError:
            return
        yield value


def read_questions(path: Path = QUESTIONS) -> list[Prompt]:
    """The project's own questions, of unlike kinds."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [Prompt(q["id"], q["kind"], q["text"]) for q in map(json.loads, lines)]


def render_chats(model: Path | str, texts: Iterable[str]) -> list[str]:
    """The texts as one user's turn each, in the model's own chat template, ready for an answer."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    return [
        tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False)
        for text in texts
    ]
