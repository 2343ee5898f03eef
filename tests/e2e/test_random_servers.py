"""Random servers under random requests: no text shows what was drafted, selected and verified beside it.

Sampled requests have seeds, so they can be compared as greedy ones can. TETRIS_TEST_SERVERS=40,41,42 tries other servers than
those of every run; what a server was started with is in what fails.
"""

from __future__ import annotations

import json
import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any, NamedTuple

import pytest
import requests

from tests.e2e.client import Client, make_request
from tests.e2e.conftest import COMMON, DRAFT, FORKED, PAIR
from tests.e2e.plugins import SWITCHING_PLANS, write_plugin
from tetris_sglang.portable_cpu.defaults import OVERLAP_VARIABLE
from tetris_sglang.tools.server_process import ServerProcess

SERVERS = [int(number) for number in os.environ.get("TETRIS_TEST_SERVERS", "7,20").split(",")]
NUM_REQUESTS = 48
MAX_NEAR_TIES = 0.03
"""Of the texts, or one: passes of unlike shapes round differently."""
DRAFTS = {"standalone": DRAFT, "eagle": PAIR / "eagle", "eagle3": PAIR / "eagle3"}
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}, "n": {"type": "integer"}},
        "required": ["name", "n"],
    }
)


class Drawn(NamedTuple):
    """A request."""

    prompt: str
    params: dict[str, Any]
    delay_s: float
    lines_read: int | None
    """After which it is dropped; None: it is not."""


def draw_arguments(draw: random.Random) -> tuple[list[str], bool]:
    """Flags of a server that starts, and whether its capacity sets itself."""

    def maybe(probability: float, *flags: Any) -> list[str]:
        return [str(flag) for flag in flags] if draw.random() < probability else []

    kind = draw.choice(["standalone", "standalone", "eagle", "eagle3", "ngram"])
    num_steps = draw.choice([1, 2, 3, 5, 8])
    arguments = ["--speculative-algorithm", "TETRIS", "--speculative-num-steps", str(num_steps)]
    if kind != "ngram":
        arguments += ["--speculative-draft-model-path", str(DRAFTS[kind])]
    if kind != "ngram":
        num_nodes = draw.choice([num_steps, num_steps + draw.randint(1, 3 * num_steps)])
        arguments += maybe(0.6, "--speculative-num-draft-tokens", num_nodes + 1)
    capacity = draw.choice(["auto", "auto", "per-request", "tokens"])
    if capacity == "per-request":
        arguments += ["--speculative-tetris-capacity-per-request", str(draw.choice([0.5, 1]))]
    elif capacity == "tokens":
        arguments += ["--speculative-tetris-capacity-tokens", str(draw.choice([1, 4, 9, 30]))]
    arguments += maybe(0.2, "--speculative-tetris-selection", draw.choice(["uniform", "random"]))
    arguments += maybe(0.3, "--disable-overlap-schedule")
    arguments += maybe(0.3, "--page-size", draw.choice([4, 16]))
    arguments += maybe(0.3, "--disable-radix-cache")
    arguments += maybe(0.5, "--chunked-prefill-size", draw.choice([32, 64, 128]))
    small = draw.choice([1536, 2048, 4096])
    arguments += maybe(0.5, "--max-total-tokens", small, "--schedule-conservativeness", 0.1)
    arguments += ["--max-running-requests", str(draw.choice([1, 3, 8, 16, 24]))]
    arguments += maybe(0.3, "--schedule-policy", draw.choice(["lpm", "fcfs", "lof", "random", "dfs-weight"]))
    arguments += maybe(0.3, "--context-length", 400)
    return arguments, capacity == "auto"


def draw_request(draw: random.Random, prompts: list[str]) -> Drawn:
    prompt = draw.choice(prompts)[: draw.choice([20, 700, 700, 700])]
    if draw.random() < 0.3:  # prefixes are shared, and cut in the middle
        prompt = (draw.choice(prompts)[: draw.randint(20, 300)] + " " + prompt)[:700]
    params: dict[str, Any] = {"max_new_tokens": draw.choice([1, 2, 5, 20, 48, 90, 140])}
    if draw.random() < 0.45:
        filters = draw.choice([{}, {}, {"top_p": 0.6}, {"top_k": 3}, {"top_k": 40, "top_p": 0.9, "min_p": 0.05}])
        params |= {
            "temperature": draw.choice([0.3, 0.7, 1, 1.5]), "sampling_seed": draw.getrandbits(40), **filters
        }  # fmt: skip
    params |= draw.choice(
        [
            {},
            {"ignore_eos": True},
            {"regex": draw.choice([r"[a-z ]{5,40}\.", r"(yes|no|maybe)+", r"\d{3}-\d{4}"])},
            {"json_schema": SCHEMA},
            {"frequency_penalty": 0.6, "presence_penalty": 0.4},
            {"repetition_penalty": 1.2},
            {"min_new_tokens": min(params["max_new_tokens"], 15)},
            {"stop": [" the", "."]},
            {"logit_bias": {str(draw.randint(5, 1500)): draw.choice([-5, 3, 8])}},
        ]
    )
    if draw.random() < 0.15:
        params |= {"return_logprob": True, "top_logprobs_num": draw.choice([0, 3])}
    options = draw.choice([{}, {}, {}, {"weight": 8}, {"weight": 0.25}, {"speculate": False}])
    if options:
        params["custom_params"] = {"tetris": options}
    lines_read = draw.randint(0, 6) if draw.random() < 0.1 else None
    return Drawn(prompt, params, 0.3 * draw.random(), lines_read)


def drop(client: Client, drawn: Drawn) -> None:
    body = make_request(drawn.prompt, stream=True, **drawn.params)
    with requests.post(client.url + "/generate", json=body, stream=True, timeout=300) as response:
        for _ in islice(response.iter_lines(), drawn.lines_read):
            pass


def write(client: Client, drawn: Drawn, **changed) -> list[int] | None:
    """What is generated, or None for a request that is dropped."""
    time.sleep(drawn.delay_s)
    if drawn.lines_read is not None:
        return drop(client, drawn)
    return client.generate(drawn.prompt, **{**drawn.params, **changed})["output_ids"]


def write_all(pool: ThreadPoolExecutor, client: Client, drawn: list[Drawn], **changed) -> list[list[int] | None]:
    return list(pool.map(lambda request: write(client, request, **changed), drawn))


@pytest.mark.parametrize("number", SERVERS)
def test_no_text_shows_what_was_drafted(plain, prompts, number, tmp_path):
    draw = random.Random(number)
    arguments, sets_itself = draw_arguments(draw)
    environment = {OVERLAP_VARIABLE: "1", "SGLANG_TETRIS_CACHE": str(tmp_path)}
    if sets_itself:  # to plain steps and back, far more often than it would
        environment |= write_plugin(tmp_path / "switching", "switching_plans", SWITCHING_PLANS)
    drawn = [draw_request(draw, [prompt["text"] for prompt in prompts]) for _ in range(NUM_REQUESTS)]
    kept = [request._replace(delay_s=0) for request in drawn if request.lines_read is None]
    greedy = [request for request in kept if "temperature" not in request.params]
    # The last of a flag counts.
    options = {"environment": environment, "entry_point": FORKED, "start_timeout_s": 400}
    process = ServerProcess([*COMMON, *arguments], tmp_path / "server.log", **options)
    with process as server, ThreadPoolExecutor(20) as pool:
        client = Client(server.url, server.log_path)
        texts = [text for text in write_all(pool, client, drawn) if text is not None]
        accepted = client.tetris_state()["accepted_tokens"]
        assert accepted > 0, "nothing was accepted: nothing was tested"
        undrafted = write_all(pool, client, kept, custom_params={"tetris": {"speculate": False}})
        assert client.tetris_state()["accepted_tokens"] == accepted
        client.flush_cache()  # nothing is left in flight
        assert client.is_alive()
        by_others = write_all(pool, plain, greedy, custom_params=None)
    log = server.log_path.read_text()
    assert "Traceback" not in log and "leak" not in log, f"{arguments}\n{log[-3000:]}"
    for expected, asked in ((undrafted, kept), (by_others, greedy)):
        actual = [text for request, text in zip(kept, texts, strict=True) if request in asked]
        unlike = [r for r, a, e in zip(asked, actual, expected, strict=True) if a != e]
        assert len(unlike) <= max(1, MAX_NEAR_TIES * len(asked)), f"{arguments}\n{unlike}"
