"""What the demo and the benchmarks send to a server, and what they read back from it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import requests

_TIMEOUT_S = 600


class Completion(NamedTuple):
    text: str
    meta_info: dict[str, Any]
    """SGLang's, with TETRIS's additions (runtime/reports/metrics.py)."""


def generate(
    url: str,
    prompts: Sequence[str],
    *,
    concurrency: int,
    max_new_tokens: int | Sequence[int],
    **sampling: float,
) -> tuple[list[Completion], float]:
    """Send all prompts to a server's /generate, at most `concurrency` at a time.

    Args:
        max_new_tokens: of all prompts, or one each.
        sampling: further sampling parameters; without any, greedy and past the end of a text.
    Returns:
        The completions in the order of the prompts, and the seconds that all of them took.
    Raises:
        requests.RequestException: the server refused a prompt or went away.
    """
    sampling = {"temperature": 0, "ignore_eos": True} | sampling
    lengths = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else max_new_tokens
    with requests.Session() as session, ThreadPoolExecutor(concurrency) as pool:

        def complete(prompt: str, length: int) -> Completion:
            body = {"text": prompt, "sampling_params": sampling | {"max_new_tokens": length}}
            response = session.post(f"{url}/generate", json=body, timeout=_TIMEOUT_S)
            response.raise_for_status()
            answer = response.json()
            return Completion(answer["text"], answer["meta_info"])

        started_at = time.perf_counter()
        completions = list(pool.map(complete, prompts, lengths))
        return completions, time.perf_counter() - started_at


def flush_cache(url: str) -> None:
    """Forget every cached prefix, so that the next run prefills what the last one did."""
    requests.post(f"{url}/flush_cache", params={"timeout": 30}, timeout=_TIMEOUT_S).raise_for_status()


# -- per request: SGLang's meta_info -------------------------------------------------------------------------


@dataclass(frozen=True)
class DraftCounts:
    """Summed over finished requests; the same definition for every speculative algorithm.

    verify_steps: target passes that a request took part in. selected: drafts verified in them. accepted:
    those kept.
    """

    verify_steps: int = 0
    selected: int = 0
    accepted: int = 0

    @property
    def accept_length(self) -> float | None:
        """Tokens emitted per step and request, the bonus token included (SGLang's convention)."""
        return 1 + self.accepted / self.verify_steps if self.verify_steps else None

    @property
    def success_rate(self) -> float | None:
        """Share of the verified drafts that was accepted."""
        return self.accepted / self.selected if self.selected else None

    @property
    def verified_per_step(self) -> float | None:
        """Target rows per step and request: the verified drafts and one root."""
        return 1 + self.selected / self.verify_steps if self.verify_steps else None


def count_drafts(meta_infos: Iterable[Mapping[str, Any]]) -> DraftCounts:
    """Sum the speculative fields of `meta_info`; zeros where the server does not speculate.

    STANDALONE verifies every draft it proposes; TETRIS reports its selection as `spec_num_selected_drafts`.
    """
    steps = selected = accepted = 0
    for meta_info in meta_infos:
        if "spec_verify_ct" in meta_info:
            steps += meta_info["spec_verify_ct"]
            selected += meta_info.get("spec_num_selected_drafts", meta_info["spec_num_proposed_drafts"])
            accepted += meta_info["spec_num_correct_drafts"]
    return DraftCounts(steps, selected, accepted)


# -- per server: TETRIS's section of /server_info ------------------------------------------------------------


@dataclass(frozen=True)
class StepCounts:
    """Steps of the whole batch between two readings of /server_info."""

    num_steps: int = 0
    verified_rows: int = 0
    phase_ms: Mapping[str, float] = field(default_factory=dict)
    """Milliseconds per step of each phase; empty without --speculative-tetris-phase-times."""

    def since(self, before: StepCounts) -> StepCounts:
        """What happened between `before` and this reading."""
        num_steps = self.num_steps - before.num_steps
        if num_steps <= 0:
            return StepCounts()
        totals = {
            phase: ms * self.num_steps - before.phase_ms.get(phase, 0.0) * before.num_steps
            for phase, ms in self.phase_ms.items()
        }
        return StepCounts(
            num_steps,
            self.verified_rows - before.verified_rows,
            {p: ms / num_steps for p, ms in totals.items()},
        )


def read_step_counts(url: str) -> StepCounts:
    """The counters of a TETRIS server since its start; zeros for any other server."""
    response = requests.get(f"{url}/server_info", timeout=_TIMEOUT_S)
    response.raise_for_status()
    return parse_step_counts(response.json()["internal_states"][0].get("tetris", {}))


def parse_step_counts(section: Mapping[str, float]) -> StepCounts:
    return StepCounts(
        num_steps=int(section.get("num_steps", 0)),
        verified_rows=int(section.get("verified_rows", 0)),
        phase_ms={key.removesuffix("_ms"): value for key, value in section.items() if key.endswith("_ms")},
    )
