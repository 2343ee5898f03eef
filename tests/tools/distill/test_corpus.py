"""Files of texts: what is read, what is refused, and that an interrupted call loses nothing."""

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tetris_sglang.tools.distill import corpus
from tetris_sglang.tools.distill.corpus import (
    Question,
    Text,
    make_batches,
    pad,
    read_prompts,
    read_texts,
    steps_of,
    write_texts,
)

READ = {"vocab_size": 100, "max_tokens": 10}


def write_lines(path: Path, entries: list, end: str = "\n") -> Path:
    path.write_text("\n".join(entry if isinstance(entry, str) else json.dumps(entry) for entry in entries) + end)
    return path


def test_texts_are_read_and_cut(tmp_path):
    path = write_lines(
        tmp_path / "texts.jsonl",
        [
            {"prompt": [1, 2], "output": [3, 4, 5], "temperature": 0.7, "kind": "code"},
            {"prompt": [1], "output": list(range(20))},
            {"prompt": [1, 2, 3], "output": [4]},
        ],
    )
    first, second = read_texts(path, **READ, min_output_tokens=2)
    assert first.token_ids.tolist() == [1, 2, 3, 4, 5]
    assert (first.prompt_tokens, first.temperature, first.kind) == (2, 0.7, "code")
    assert second.token_ids.tolist() == [1, *range(9)] and second.kind == "traffic"


def test_a_line_that_was_cut_off_is_left_out(tmp_path, caplog):
    path = write_lines(tmp_path / "texts.jsonl", [{"prompt": [1], "output": [2]}, '{"prompt": [1], "out'], end="")
    assert len(read_texts(path, **READ)) == 1
    assert "last line is incomplete" in caplog.text


@pytest.mark.parametrize(
    "lines, message",
    [
        (["{", '{"prompt": [1], "output": [2]}'], "line 1: no text"),
        ([{"prompt": "words", "output": [2]}, {}], "line 1: no text"),
        ([{"prompt": [1], "output": [100]}], "line 1: token 100 is none of the target's 100"),
        ([{"prompt": [1], "output": []}], "holds no text"),
        ([], "holds no text"),
    ],
)
def test_what_is_no_text_is_named(tmp_path, lines, message):
    with pytest.raises(ValueError, match=message):
        read_texts(write_lines(tmp_path / "texts.jsonl", lines), **READ)


def test_files_that_are_not_there_are_named(tmp_path):
    for read in (lambda path: read_texts(path, **READ), read_prompts):
        with pytest.raises(ValueError, match="cannot be read: No such file"):
            read(tmp_path / "missing.jsonl")


def test_prompts_are_read(tmp_path):
    path = write_lines(tmp_path / "prompts.jsonl", [{"text": "one"}, {"prompt": "two"}])
    assert read_prompts(path) == ["one", "two"]
    with pytest.raises(ValueError, match="line 2: no prompt"):
        read_prompts(write_lines(path, [{"text": "one"}, {"question": "two"}]))


class Interrupted(Exception):
    pass


@pytest.fixture
def served(monkeypatch):
    """Calls of a server that answers with the question's tokens, backwards."""
    calls = []
    monkeypatch.setattr(corpus, "ServerProcess", lambda *_: nullcontext(SimpleNamespace(url="")))
    monkeypatch.setattr(corpus, "PROMPTS_AT_ONCE", 4)

    def answer(url, questions, max_tokens, seed):
        if len(calls) == 2:
            calls.append(None)
            raise Interrupted
        calls.append(seed)
        return [question.token_ids[::-1] for question in questions]

    monkeypatch.setattr(corpus, "_answer", answer)
    return calls


def test_writing_goes_on_where_it_was_interrupted(tmp_path, served):
    path = tmp_path / "texts.jsonl"
    questions = [Question([i, i + 1], 0.5 * (i % 2), "kind") for i in range(11)]
    options = {"max_tokens": 10, "seed": 5, "log_path": tmp_path / "log"}
    with pytest.raises(Interrupted):
        write_texts(path, questions, [], **options)
    assert len(path.read_text().splitlines()) == 8
    with path.open("a") as out:
        out.write('{"prompt": [8, 9], "outp')  # half a line
    write_texts(path, questions, [], **options)
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    assert [entry["prompt"] for entry in entries] == [question.token_ids for question in questions]
    assert all(entry["output"] == entry["prompt"][::-1] for entry in entries)
    assert [entry["temperature"] for entry in entries[:2]] == [0.0, 0.5]
    # Draws of an interrupted call and of a whole one are the same.
    assert served == [5, 9, None, 13]
    write_texts(path, questions, [], **options)
    assert len(served) == 4


def test_a_full_disk_is_named_and_what_was_written_stays(tmp_path, served, monkeypatch):
    path = tmp_path / "texts.jsonl"
    questions = [Question([i], 0.0, "kind") for i in range(8)]
    free = iter([10**12, 10**6])
    monkeypatch.setattr(corpus.shutil, "disk_usage", lambda _: SimpleNamespace(free=next(free)))
    with pytest.raises(OSError, match="has 0 MB left: free some"):
        write_texts(path, questions, [], max_tokens=9, seed=0, log_path=tmp_path / "log")
    assert len(path.read_text().splitlines()) == 4


def make_texts(count: int) -> list[Text]:
    return [Text(torch.arange(5 + 7 * i % 40), 2, 0.0, "kind") for i in range(count)]


def test_padded_texts_say_what_is_learnt():
    both = [Text(torch.tensor([1, 2, 3, 4]), 2, 0.0, "a"), Text(torch.tensor([5, 6]), 1, 0.0, "b")]
    batch = pad(both)
    assert batch.token_ids.tolist() == [[1, 2, 3, 4], [5, 6, 0, 0]]
    assert batch.is_learnt.tolist() == [[False, True, True, False], [True, False, False, False]]


def test_an_epoch_has_every_text_once_and_can_be_entered_anywhere():
    many = make_texts(50)
    batches = make_batches(many, 200, seed=3)
    assert sorted(id(text) for batch in batches for text in batch) == sorted(map(id, many))
    assert all(len(batch) == 1 or max(len(t.token_ids) for t in batch) * len(batch) <= 200 for batch in batches)
    whole = steps_of(many, 200, 3, 0, 0, 1)
    expected = [next(whole) for _ in range(2 * len(batches) + 3)]
    for first in (1, len(batches), len(batches) + 4):
        entered = steps_of(many, 200, 3, first, 0, 1)
        assert all([id(t) for t in next(entered)] == [id(t) for t in each] for each in expected[first:])


def test_several_ranks_share_an_epoch():
    many = make_texts(50)
    num_batches = len(make_batches(many, 200, seed=0))
    ranks = [steps_of(many, 200, 0, 0, rank, 2) for rank in range(2)]
    seen = [id(text) for _ in range(num_batches // 2) for rank in ranks for text in next(rank)]
    assert len(seen) == len(set(seen)) >= len(many) - max(map(len, make_batches(many, 200, seed=0)))
    lonely = [next(steps_of(many[:1], 200, 0, 0, rank, 2)) for rank in range(2)]
    assert lonely[0][0] is lonely[1][0]
