"""Requests that must be refused, aborted or survived."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import requests

from tests.e2e.client import make_request
from tests.e2e.conftest import COMMON
from tetris_sglang.trace import read_trace

MAX_RUNNING = int(COMMON[COMMON.index("--max-running-requests") + 1])


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (make_request("x " * 4000, max_new_tokens=4), "context length"),
        (make_request("", max_new_tokens=4), "empty"),
        (make_request([], max_new_tokens=4), ""),
        (make_request([5, 1_000_000], max_new_tokens=4), "1000000"),
        (make_request([5, -3], max_new_tokens=4), "-3"),
        (make_request("a", temperature=-0.5, max_new_tokens=4), "temperature"),
        (make_request("a", frequency_penalty=5, max_new_tokens=4), "frequency_penalty"),
        ({**make_request("a", max_new_tokens=4), "lora_path": "adapter"}, "lora"),
        ({**make_request("a", max_new_tokens=4), "return_hidden_states": True}, "hidden_states"),
    ],
)
def test_bad_requests_get_4xx_and_the_server_stays_up(overlap, body, named):
    response = overlap.post("/generate", body)
    assert 400 <= response.status_code < 500, response.text
    assert named in response.text
    assert overlap.generate("def", max_new_tokens=3)["meta_info"]["completion_tokens"] >= 1


def test_openai_api_refuses_with_400(overlap):
    body = {"model": "default", "prompt": "def", "max_tokens": 4, "return_hidden_states": True}
    response = overlap.post("/v1/completions", body)
    assert response.status_code == 400
    assert "return_hidden_states" in response.text


def test_aborts_leak_no_slot(tetris, mixed_prompts):
    """Requests dropped in mid-flight: every KV slot and request slot comes back."""

    def drop(prompt: str, delay_s: float) -> None:
        body = make_request(prompt, max_new_tokens=400, ignore_eos=True, stream=True)
        with requests.post(tetris.url + "/generate", json=body, stream=True, timeout=300) as response:
            next(response.iter_lines())
            time.sleep(delay_s)

    threads = [threading.Thread(target=drop, args=(prompt, 0.05 * i)) for i, prompt in enumerate(mixed_prompts[:20])]
    for thread in threads:
        thread.start()
    survivor = tetris.generate(mixed_prompts[21], max_new_tokens=64)["text"]
    for thread in threads:
        thread.join()
    rids = [f"dropped-{time.time_ns()}-{i}" for i in range(6)]
    pool = [
        threading.Thread(
            target=lambda rid=rid: tetris.post("/generate", make_request("def f", max_new_tokens=400, ignore_eos=True, rid=rid))
        )
        for rid in rids
    ]
    for thread in pool:
        thread.start()
    time.sleep(0.3)
    for rid in rids:
        tetris.post("/abort_request", {"rid": rid})
    for thread in pool:
        thread.join()
    # SGLang's idle check ends a scheduler whose slots do not add up; an empty cache makes the sum plain.
    tetris.flush_cache()
    time.sleep(1.5)
    assert tetris.is_alive()
    assert "memory leak" not in tetris.log_path.read_text(errors="replace")
    assert tetris.generate(mixed_prompts[21], max_new_tokens=64)["text"] == survivor


def test_as_much_of_a_prompt_comes_from_the_cache_as_without_speculation(plain, overlap, mixed_prompts):
    """Of prompts, and of conversations that go on from outputs; but for an output's last token, whose keys and values are
    there if it was verified."""
    cached = []
    for server in (plain, overlap):
        server.flush_cache()
        turns, texts = [], mixed_prompts[:8]
        for _ in range(3):
            outputs = [server.generate(text, max_new_tokens=21, ignore_eos=True) for text in texts]
            turns.append([output["meta_info"]["cached_tokens"] for output in outputs])
            texts = [f"{text}{output['text']} And then" for text, output in zip(texts, outputs, strict=True)]
        cached.append(turns)
    for plainly, speculating in zip(*cached, strict=True):
        assert all(n <= m <= n + 1 for n, m in zip(plainly, speculating, strict=True))
    assert all(n > 20 for n in cached[0][2])


def test_no_slot_idles_while_requests_wait(servers, overlap, mixed_prompts):
    """Three times as many requests as slots, of unlike lengths: who ends is followed by the next one (BATON, 2410.18701)."""
    overlap.flush_cache()
    begun = len(read_trace(servers.trace_path("overlap")).steps)
    each = [{"max_new_tokens": 8 + 11 * i % 64} for i in range(48)]
    overlap.generate_all(mixed_prompts[:48], concurrency=48, each=each, ignore_eos=True)
    overlap.flush_cache()
    trace = read_trace(servers.trace_path("overlap"))
    steps, numbers = trace.steps[begun:], trace.requests[begun:]
    last_start = steps[np.unique(numbers, return_index=True)[1]].max()
    running = np.unique(steps[steps < last_start], return_counts=True)[1]
    running = running[(running == MAX_RUNNING).argmax() :]
    assert len(running) > 20
    assert running.mean() > 0.95 * MAX_RUNNING
