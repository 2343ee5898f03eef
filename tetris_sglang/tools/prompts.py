"""Real prompts: HumanEval (MIT), ShareGPT's conversations, functions of Python's own library, and the project's questions.

ShareGPT and HumanEval are fetched where they are used (`fetch.py`), the functions are read where Python is installed; none of
them is part of the repository.
"""

from __future__ import annotations

import ast
import gzip
import hashlib
import json
import sysconfig
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
        Prompt(problem["task_id"], "humaneval", _ask_for_function(problem["prompt"].strip()))
        for problem in map(json.loads, lines)
    ]


def _ask_for_function(head: str) -> str:
    return f"Complete this Python function:\n\n{head}"


def read_functions(library: Path | None = None) -> list[Prompt]:
    """Heads of the functions of Python's own library that say in two lines or more what they do, as HumanEval's problems.

    Args:
        library: folder of modules; None: the running Python's.
    """
    library = library or Path(sysconfig.get_path("stdlib"))
    prompts: dict[str, Prompt] = {}
    for path in sorted(library.rglob("*.py")):
        if {"site-packages", "test", "tests", "idlelib", "lib2to3"}.isdisjoint(path.relative_to(library).parts):
            prompts |= {prompt.text: prompt for prompt in _read_heads(path, str(path.relative_to(library)))}
    # Not module by module: a part of them is of all.
    return sorted(prompts.values(), key=lambda prompt: hashlib.sha1(prompt.id.encode()).hexdigest())


def _read_heads(path: Path, module: str) -> Iterator[Prompt]:
    try:
        source = path.read_text(encoding="utf-8")
        tree = ast.parse(source)
    except (SyntaxError, ValueError):  # Python 2's, and those of other encodings
        return
    lines = source.splitlines()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and "\n" in (ast.get_docstring(node) or ""):
            head = "\n".join(line[node.col_offset :] for line in lines[node.lineno - 1 : node.body[0].end_lineno])
            yield Prompt(f"{module}:{node.lineno}", "functions", _ask_for_function(head))


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
