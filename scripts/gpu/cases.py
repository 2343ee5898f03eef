"""What the dry run asks of a server, and how the answers are judged."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import requests
from proof import MAX_OUTSIDE, MAX_REGRET, NO_FILTERS, Filters, Reference

NUM_TOKENS = 16
LOADS = (1, 3, 8)
"""8 is beyond the captured sizes."""
MIN_P = 1e-3
TIMEOUT_S = 900.0
FILTERS = Filters(top_k=20, top_p=0.9, min_p=0.05)
UPSTREAMS_FILTERS = FILTERS._replace(min_p=0.0)
"""SGLang's own verification leaves min-p out."""
FREQUENCY_PENALTY = 0.7
REGEX = r"[0-9]{3}-[0-9]{4}"
MAX_LONG_REGRET = 0.15
MAX_LOG_PROBABILITY_ERROR = 0.1
"""Of bfloat16."""


class Answer(NamedTuple):
    text: str
    output_ids: list[int]
    meta_info: dict[str, Any]


class Verdict(NamedTuple):
    holds: bool
    says: str
    """What was found, for the log."""
    num_tokens: int = 0
    num_best: int = 0
    """Of greedy tokens, those that are the target's own."""
    regret: float = 0.0
    p: float | None = None


Judge = Callable[[Reference, Sequence[str], Sequence[Answer]], Verdict]


@dataclass(frozen=True)
class Case:
    """Requests of one kind.

    Attributes:
        name: for the log.
        load: how many are in flight.
        judge: says whether the answers are the target's.
        sampling: sampling parameters beside greedy ones; options: of /generate itself.
        goes_on: the prompts are those of the case before with what it answered, and the cache is kept.
        is_counted: what its steps ask of the host goes into the ledger. Of captured sizes alone: larger batches run eagerly,
            and FlashInfer's planning waits then.
    """

    name: str
    load: int
    judge: Judge
    sampling: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    goes_on: bool = False
    is_counted: bool = False

    def ask(self, url: str, prompts: Sequence[str]) -> list[Answer]:
        sampling = {"temperature": 0, "max_new_tokens": NUM_TOKENS, "ignore_eos": True} | self.sampling

        def complete(prompt: str) -> Answer:
            body = {"text": prompt, "sampling_params": sampling, **self.options}
            answer = requests.post(f"{url}/generate", json=body, timeout=TIMEOUT_S)
            answer.raise_for_status()
            return Answer(*(answer.json()[name] for name in Answer._fields))

        with ThreadPoolExecutor(self.load) as pool:
            return list(pool.map(complete, prompts))


def _ids(answers: Sequence[Answer]) -> list[list[int]]:
    return [answer.output_ids for answer in answers]


def judge_greedy(reference: Reference, prompts: Sequence[str], answers: Sequence[Answer], penalty: float = 0.0) -> Verdict:
    found = reference.judge_greedy(prompts, _ids(answers), penalty)
    says = f"{found.num_best} of {found.num_tokens} are its own, the worst falls {found.regret:.3f} short"
    return Verdict(found.regret <= MAX_REGRET, says, *found)


def judge_long(reference: Reference, prompts: Sequence[str], answers: Sequence[Answer]) -> Verdict:
    """Rounding costs as much without speculation: one token of 480 falls 0.122 short there."""
    verdict = judge_greedy(reference, prompts, answers)
    return verdict._replace(holds=verdict.regret <= MAX_LONG_REGRET)


def judge_penalised(reference: Reference, prompts: Sequence[str], answers: Sequence[Answer]) -> Verdict:
    return judge_greedy(reference, prompts, answers, FREQUENCY_PENALTY)


def judge_draws(
    reference: Reference, prompts: Sequence[str], answers: Sequence[Answer], filters: Filters = NO_FILTERS
) -> Verdict:
    found = reference.judge_draws(prompts, _ids(answers), filters)
    holds = found.p > MIN_P and found.outside <= MAX_OUTSIDE
    return Verdict(holds, f"p = {found.p:.3f}, {found.outside:.1%} outside of the filters", p=found.p)


def judge_filtered(reference: Reference, prompts: Sequence[str], answers: Sequence[Answer]) -> Verdict:
    return judge_draws(reference, prompts, answers, FILTERS)


def judge_filtered_by_upstream(reference: Reference, prompts: Sequence[str], answers: Sequence[Answer]) -> Verdict:
    return judge_draws(reference, prompts, answers, UPSTREAMS_FILTERS)


def judge_grammar(reference: Reference, prompts: Sequence[str], answers: Sequence[Answer]) -> Verdict:
    wrong = [answer.text for answer in answers if not re.fullmatch(REGEX, answer.text)]
    return Verdict(not wrong, f"{len(wrong)} of {len(answers)} are outside of {REGEX}: {wrong[:3]}")


def judge_log_probabilities(reference: Reference, prompts: Sequence[str], answers: Sequence[Answer]) -> Verdict:
    reported = [[value for value, *_ in answer.meta_info["output_token_logprobs"]] for answer in answers]
    error = reference.judge_log_probabilities(prompts, _ids(answers), reported)
    return Verdict(error <= MAX_LOG_PROBABILITY_ERROR, f"log-probabilities are off by {error:.3f} at most")


def judge_prefix_hits(reference: Reference, prompts: Sequence[str], answers: Sequence[Answer]) -> Verdict:
    verdict = judge_greedy(reference, prompts, answers)
    missed = sum(not answer.meta_info["cached_tokens"] for answer in answers)
    return verdict._replace(holds=verdict.holds and not missed, says=f"{verdict.says}, {missed} found nothing in the cache")


GREEDY = tuple(Case(f"greedy, {load} in flight", load, judge_greedy, is_counted=load == LOADS[1]) for load in LOADS)
PLAIN = replace(GREEDY[1], name="greedy, no drafts wanted", sampling={"custom_params": {"tetris": {"speculate": False}}})
DRAWN = Case("drawn", LOADS[1], judge_draws, {"temperature": 1})
STANDARD = (*GREEDY, DRAWN)
FILTERED = Case("top-k, top-p and min-p", LOADS[1], judge_filtered, {"temperature": 1, **FILTERS._asdict()})
FILTERED_BY_UPSTREAM = Case(
    "top-k and top-p", LOADS[1], judge_filtered_by_upstream, {"temperature": 1, **UPSTREAMS_FILTERS._asdict()}
)
GRAMMAR = Case("grammar", LOADS[1], judge_grammar, {"regex": REGEX, "ignore_eos": False})
LOG_PROBABILITIES = Case("log-probabilities", LOADS[1], judge_log_probabilities, options={"return_logprob": True})
PENALTIES = Case("penalties", LOADS[1], judge_penalised, {"frequency_penalty": FREQUENCY_PENALTY})
PREFIX_HITS = Case("prefix hits", LOADS[1], judge_prefix_hits, goes_on=True)
WANTED = (GREEDY[1], PREFIX_HITS, FILTERED, GRAMMAR, LOG_PROBABILITIES)
"""What requests may want of any algorithm."""
# Not of upstream's under overlap scheduling: there penalties lag by a token (patches/README.md).
OF_TETRIS = (*WANTED, PENALTIES)
LONG = Case("long answers", 8, judge_long, {"max_new_tokens": 40, "min_new_tokens": 40, "ignore_eos": False})
"""More than a small pool holds. With `ignore_eos` SGLang would reserve the whole output beforehand."""
