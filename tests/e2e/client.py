"""A small client of SGLang's native API."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import requests
from prometheus_client.parser import text_string_to_metric_families

GREEDY = {"temperature": 0}


class Client:
    """Talks to one server.

    Args:
        url: base address. log_path: the server's log.
    """

    def __init__(self, url: str, log_path: Path) -> None:
        self.url = url
        self.log_path = log_path

    def post(self, path: str, body: dict) -> requests.Response:
        return requests.post(self.url + path, json=body, timeout=300)

    def generate(self, prompt: str | list[int], **params) -> dict:
        """One request; `params` are sampling parameters but for those of /generate itself."""
        response = self.post("/generate", make_request(prompt, **params))
        assert response.status_code == 200, response.text
        return response.json()

    def generate_all(self, prompts: list, concurrency: int = 16, **params) -> list[dict]:
        """Many requests, `concurrency` in flight; params may hold a list `each` of per-prompt parameters."""
        each = params.pop("each", [{}] * len(prompts))
        with ThreadPoolExecutor(concurrency) as pool:
            return list(pool.map(lambda pair: self.generate(pair[0], **(params | pair[1])), zip(prompts, each, strict=True)))

    def generate_together(self, prompts: list[str], **params) -> list[dict]:
        """Many in one request: they begin together, however busy the machine is."""
        response = self.post("/generate", make_request(prompts[0], **params) | {"text": prompts})
        assert response.status_code == 200, response.text
        return response.json()

    def flush_cache(self) -> None:
        for _ in range(50):
            if self.post("/flush_cache", {}).status_code == 200:
                return
            time.sleep(0.2)
        raise AssertionError("the cache could not be flushed: requests are still running")

    def tetris_state(self) -> dict:
        """TETRIS's counters from /server_info."""
        return self.server_info()["internal_states"][0]["tetris"]

    def server_info(self) -> dict:
        return requests.get(self.url + "/server_info", timeout=60).json()

    def metric(self, name: str) -> float:
        """Sum of a Prometheus metric over its labels."""
        text = requests.get(self.url + "/metrics", timeout=60).text
        samples = [s for family in text_string_to_metric_families(text) for s in family.samples if s.name == name]
        assert samples, f"no metric {name}"
        return sum(sample.value for sample in samples)

    def is_alive(self) -> bool:
        return requests.get(self.url + "/health_generate", timeout=60).status_code == 200


class Reference(Client):
    """A server that others are compared with, and so is asked the same again and again: it answers greedy requests once."""

    def __init__(self, url: str, log_path: Path) -> None:
        super().__init__(url, log_path)
        self._answers: dict[str, dict] = {}

    def generate(self, prompt: str | list[int], **params) -> dict:
        if params.get("temperature", 0) > 0:
            return super().generate(prompt, **params)
        question = json.dumps([prompt, params], sort_keys=True)
        if question not in self._answers:
            self._answers[question] = super().generate(prompt, **params)
        return self._answers[question]


_REQUEST_FIELDS = (
    "return_logprob",
    "logprob_start_len",
    "top_logprobs_num",
    "token_ids_logprob",
    "stream",
    "rid",
)


def make_request(prompt: str | list[int], **params) -> dict:
    body = {name: params.pop(name) for name in _REQUEST_FIELDS if name in params}
    body["text" if isinstance(prompt, str) else "input_ids"] = prompt
    body["sampling_params"] = {**GREEDY, **params}
    return body


def texts(outputs: list[dict]) -> list[str]:
    return [output["text"] for output in outputs]
