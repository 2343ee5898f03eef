"""Texts of finished requests, on their way into a file."""

from __future__ import annotations

import json
from array import array
from types import SimpleNamespace

import pytest

from tetris_sglang.portable_cpu.activate import activate

activate()  # as SGLang does, before its modules are imported
from tetris_sglang.runtime.reports.traffic import TextRecorder
from tetris_sglang.tools.distill.corpus import read_texts


def make_request(rid: str, output: list[int], temperature: float = 1.0, top_k: int = -1, ended: str = "stop"):
    return SimpleNamespace(
        rid=rid,
        origin_input_ids=array("q", [1, 2, 3]),
        output_ids_through_stop=array("q", output),
        sampling_params=SimpleNamespace(temperature=temperature, top_k=top_k),
        finished_reason=SimpleNamespace(to_json=lambda: {"type": ended}),
        finished=lambda: True,
    )


def serve(recorder: TextRecorder, *requests) -> None:
    recorder.begin(SimpleNamespace(reqs=requests), None)
    for request in requests:
        recorder.finish(request.rid)


def test_what_is_recorded_can_be_learnt_from(tmp_path):
    path = tmp_path / "traffic.jsonl"
    recorder = TextRecorder(path)
    serve(recorder, make_request("a", [4, 5], 0.7), make_request("b", [6], top_k=1))
    texts = read_texts(path, vocab_size=10, max_tokens=10)
    assert [text.token_ids.tolist() for text in texts] == [[1, 2, 3, 4, 5], [1, 2, 3, 6]]
    assert [(text.prompt_tokens, text.temperature) for text in texts] == [(3, 0.7), (3, 0.0)]
    assert path.stat().st_mode & 0o077 == 0
    # A server that starts again goes on.
    serve(TextRecorder(path), make_request("c", [7]))
    assert len(path.read_text().splitlines()) == 3


def test_requests_that_were_given_up_or_are_unknown_are_not_written(tmp_path):
    path = tmp_path / "traffic.jsonl"
    recorder = TextRecorder(path)
    serve(recorder, make_request("a", [4], ended="abort"))
    recorder.finish("nobody")
    assert path.read_text() == ""


def test_a_full_file_is_rotated_and_an_older_one_goes(tmp_path):
    path = tmp_path / "traffic.jsonl"
    recorder = TextRecorder(path, max_file_bytes=200)
    for i in range(40):
        serve(recorder, make_request(str(i), [i]))
    kept = [json.loads(line)["output"] for name in ("traffic.jsonl.1", "traffic.jsonl") for line in (tmp_path / name).open()]
    assert kept[-1] == [39] and kept == [[i] for i in range(40 - len(kept), 40)] and len(kept) < 12
    assert sorted(each.name for each in tmp_path.iterdir()) == ["traffic.jsonl", "traffic.jsonl.1"]


def test_servers_beside_each_other_have_files_of_their_own(tmp_path):
    for replica in (None, 0, 1):
        serve(TextRecorder(tmp_path / "traffic.jsonl", replica), make_request("a", [4]))
    assert len((tmp_path / "traffic.jsonl").read_text().splitlines()) == 2
    assert len((tmp_path / "traffic.jsonl.rank1").read_text().splitlines()) == 1


def test_a_full_disk_ends_the_recording_and_not_the_serving(tmp_path, monkeypatch, caplog):
    path = tmp_path / "traffic.jsonl"
    recorder = TextRecorder(path)
    serve(recorder, make_request("a", [4]))

    def fail():
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(recorder, "_open", fail)
    serve(recorder, make_request("b", [5]))
    assert "recording texts ends here" in caplog.text
    monkeypatch.undo()
    serve(recorder, make_request("c", [6]))
    assert len(path.read_text().splitlines()) == 1


def test_requests_whose_end_nobody_told_are_forgotten(tmp_path, monkeypatch):
    monkeypatch.setattr("tetris_sglang.runtime.reports.traffic._MAX_REMEMBERED", 3)
    recorder = TextRecorder(tmp_path / "traffic.jsonl")
    running = make_request("running", [1])
    running.finished = lambda: False
    recorder.begin(SimpleNamespace(reqs=[running, *(make_request(str(i), [i]) for i in range(3))]), None)
    assert len(recorder._running) == 3
    recorder.begin(SimpleNamespace(reqs=[running]), None)
    assert list(recorder._running) == ["running"]


def test_a_file_that_is_taken_away_is_begun_anew(tmp_path):
    path = tmp_path / "traffic.jsonl"
    recorder = TextRecorder(path)
    serve(recorder, make_request("a", [4]))
    path.rename(tmp_path / "taken.jsonl")
    serve(recorder, make_request("b", [5]))
    assert [json.loads(line)["output"] for line in path.open()] == [[5]]


def test_a_path_that_cannot_be_written_stops_the_start(tmp_path):
    with pytest.raises(OSError):
        TextRecorder(tmp_path / "nowhere" / "traffic.jsonl")
