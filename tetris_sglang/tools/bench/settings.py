"""What a comparison is made of, and the options that say it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from tetris_sglang.config import SETTINGS
from tetris_sglang.tools.bench.arms import CONTROL, DRAFTS, FAMILIES, HEADS, REFERENCE, Arm
from tetris_sglang.tools.bench.workloads import LENGTHS, WORKLOADS, Load

QUICK = {
    "arms": "none,auto,sglang",
    "k": "3",
    "extra": "2",
    "capacity_tokens": "8",
    "concurrency": "1,4",
    "temperature": "0",
    "prompts": 4,
}
FULL = {
    "arms": ",".join(FAMILIES),
    "k": "1,2,3,4,5",
    "extra": "1,2,3",
    "capacity_tokens": "4,8,16",
    "concurrency": "1,4,16",
    "temperature": "0,1",
    "prompts": 32,
}
RECOMMEND = QUICK | {
    "k": "1,3",
    "capacity_tokens": "none",
    "concurrency": "1,4,16",
}
"""With every draft that is there, and chains beside combs."""
REQUEST_RATES = "1,2,4"
ARRIVALS = ("closed", "poisson")
# SGLang's own choice for the default target, float16, is slow on most CPUs.
DTYPE = "float32"


@dataclass(frozen=True)
class Settings:
    """What decides the figures; results with other settings are never mixed."""

    model_path: str
    """Empty: SmolLM2-135M-Instruct."""
    draft_paths: tuple[str, ...]
    """DRAFT=PATH each."""
    dtype: str
    families: tuple[str, ...]
    drafts: tuple[str, ...]
    k: tuple[int, ...]
    extra: tuple[int, ...]
    capacity_tokens: tuple[int, ...]
    num_steps: int
    topk: tuple[int, ...]
    """Of SGLang's own."""
    num_draft_tokens: tuple[int, ...]
    """Of auto, beside the server's default."""
    variants: tuple[str, ...]
    """Of auto, beside the default: NAME=VALUE each, a setting of TETRIS."""
    workload: str
    dataset: str
    dataset_name: str
    """Of bench_serving's; where given, it replaces the workload."""
    lengths: str
    """One of LENGTHS."""
    output_len: int
    """Tokens per request; the mean of those drawn."""
    temperature: tuple[float, ...]
    concurrency: tuple[int, ...]
    request_rate: tuple[float, ...]
    """Poisson arrivals; empty: closed loop."""
    load_flags: str
    server_flags: str
    min_prompts: int
    waves: int
    """Prompts per run and request in flight, at least."""
    repeats: int
    live_servers: int
    turn_seconds: float
    """0: whole runs."""
    phase_times: bool
    seed: int

    @property
    def one_by_one(self) -> bool:
        """Servers follow one another instead of taking turns: no interleaving, nothing is frozen."""
        return self.live_servers == 1

    @property
    def loads(self) -> list[Load]:
        if self.request_rate:
            return [Load(request_rate=rate) for rate in self.request_rate]
        return [Load(concurrency=concurrency) for concurrency in self.concurrency]

    def build_arms(self) -> list[Arm]:
        """The reference first, then k by k: what is compared at equal k shares a group of live servers."""
        arms = [Arm(REFERENCE)] + ([Arm(CONTROL)] if CONTROL in self.families else [])
        if "adaptive" in self.families:
            # It changes the depth of chains from an EAGLE head, and knows no other draft.
            heads = [draft for draft in self.drafts if draft in HEADS] or [HEADS[0]]
            arms += [Arm("adaptive", draft=head) for head in heads]
        for draft in self.drafts:
            if "auto" in self.families:
                # Chains of n-grams are longer by default: they need no passes.
                auto = Arm("auto", num_steps=2 * self.num_steps if draft == "ngram" else self.num_steps, draft=draft)
                arms.append(auto)
                arms += [replace(auto, num_draft_tokens=n) for n in self.num_draft_tokens if draft != "ngram"]
                arms += [replace(auto, variant=variant) for variant in self.variants]
            for k in self.k:
                arms += self._build_with_k(k, draft)
        for draft, tokens in product(self.drafts, self.capacity_tokens if "tetris" in self.families else ()):
            arms.append(Arm("tetris", capacity_tokens=tokens, num_steps=self.num_steps, draft=draft))
        # Other k and extra can have the same sum, which is all that matters in full.
        return list(dict.fromkeys(arms))

    def _build_with_k(self, k: int, draft: str) -> list[Arm]:
        arms = []
        for topk in self.topk if "sglang" in self.families else ():
            # A tree has at least as many nodes as levels; SGLang verifies all of them. N-grams and DFlash have chains alone.
            if topk == 1:
                arms.append(Arm("sglang", k, draft=draft))
            elif draft not in ("ngram", "dflash") and k >= self.num_steps:
                arms.append(Arm("sglang", k, num_steps=self.num_steps, draft=draft, topk=topk))
        for extra in self.extra:
            arms += [Arm(f, k, extra, draft=draft) for f in ("tetris", "uniform", "random") if f in self.families]
            if "full" in self.families:
                arms.append(Arm("full", k + extra, draft=draft))
        return arms


def build_settings(*, preset: dict[str, Any], options: dict[str, Any]) -> Settings:
    """Settings from a preset and the options given beside it (None where not given).

    Raises:
        ValueError: naming the option.
    """
    chosen = preset | {name: value for name, value in options.items() if value is not None}
    for name in ("repeats", "output_len", "prompts", "waves", "num_steps", "live_servers"):
        if chosen[name] < 1:
            raise ValueError(f"--{name.replace('_', '-')} {chosen[name]}: give a number above 0")
    if chosen["output_len"] < 4:
        raise ValueError(f"--output-len {chosen['output_len']}: sglang.bench_serving wants 4 or more")
    for draft in chosen["draft_paths"]:
        _check_names([draft.partition("=")[0]], "--draft", DRAFTS)
        if not draft.partition("=")[2]:
            raise ValueError(f"--draft {draft!r}: give DRAFT=PATH")
    if chosen["dataset"] and not chosen["dataset_name"]:
        raise ValueError("--dataset: say with --dataset-name which of sglang.bench_serving's formats it has")
    if chosen["dataset_name"] == "openai" and not Path(chosen["dataset"]).is_file():
        raise ValueError(f"--dataset {chosen['dataset']!r}: no such file of chats, as --dataset-name openai wants")
    _check_turns(chosen["turn_seconds"], chosen)
    named = [draft.partition("=")[0] for draft in chosen["draft_paths"]]
    return Settings(
        model_path=chosen["model_path"],
        draft_paths=tuple(chosen["draft_paths"]),
        dtype=chosen.get("dtype", "auto" if chosen["model_path"] else DTYPE),
        families=_split_names(chosen["arms"], "--arms", FAMILIES),
        drafts=_split_names(chosen.get("drafts") or ",".join(named) or DRAFTS[0], "--drafts", DRAFTS),
        k=_split(chosen["k"], "--k", int, optional=True),
        extra=_split(chosen["extra"], "--extra", int),
        capacity_tokens=_split(chosen["capacity_tokens"], "--capacity-tokens", int, optional=True),
        num_steps=chosen["num_steps"],
        topk=_split(chosen["topk"], "--topk", int),
        num_draft_tokens=_split(chosen.get("num_draft_tokens") or "none", "--num-draft-tokens", int, optional=True),
        variants=_read_variants(chosen.get("variants")),
        workload=_check_names([chosen["workload"]], "--workload", WORKLOADS)[0],
        dataset=chosen["dataset"],
        dataset_name=chosen["dataset_name"],
        lengths=_check_names([chosen["lengths"]], "--lengths", LENGTHS)[0],
        output_len=chosen["output_len"],
        temperature=_split(chosen["temperature"], "--temperature", float),
        concurrency=_split(chosen["concurrency"], "--concurrency", int),
        request_rate=_read_rates(chosen["arrivals"], chosen.get("request_rate")),
        load_flags=chosen["load_flags"],
        server_flags=chosen["server_flags"],
        min_prompts=chosen["prompts"],
        waves=chosen["waves"],
        repeats=chosen["repeats"],
        live_servers=chosen["live_servers"],
        turn_seconds=chosen["turn_seconds"],
        phase_times=chosen.get("phase_times", not chosen["turn_seconds"]),
        seed=chosen["seed"],
    )


def _read_variants(text: str | None) -> tuple[str, ...]:
    variants = tuple(text.split(",")) if text else ()
    known = [setting.flag.removeprefix("--speculative-tetris-") for setting in SETTINGS]
    for variant in variants:
        _check_names([variant.partition("=")[0]], "--variants", known)
        if not variant.partition("=")[2]:
            raise ValueError(f"--variants {variant!r}: give NAME=VALUE")
    return variants


def _check_turns(seconds: float, chosen: dict[str, Any]) -> None:
    if seconds < 0:
        raise ValueError(f"--turn-seconds {seconds}: give 0 for whole runs, or the length of a turn")
    obstacles = {
        "--live-servers 1: there is nobody to take turns with": chosen["live_servers"] == 1,
        "--phase-times: a step that is frozen half-way has no true times": chosen.get("phase_times"),
        "--arrivals poisson: requests would arrive while their server is frozen": chosen["arrivals"] == "poisson",
    }
    for obstacle, is_there in obstacles.items():
        if seconds and is_there:
            raise ValueError(f"--turn-seconds {seconds} does not go with {obstacle}. Give 0 for whole runs.")


def _read_rates(arrivals: str, rates: str | None) -> tuple[float, ...]:
    _check_names([arrivals], "--arrivals", ARRIVALS)
    if arrivals == "closed":
        if rates is not None:
            raise ValueError("--request-rate: requests arrive at a rate with --arrivals poisson")
        return ()
    values = _split(REQUEST_RATES if rates is None else rates, "--request-rate", float)
    if not all(0 < value < float("inf") for value in values):
        raise ValueError(f"--request-rate {rates!r}: give numbers above 0")
    return values


def _split(text: str, flag: str, parse: type, optional: bool = False, least: int = 1) -> tuple:
    """Numbers separated by commas; integers from `least` on, others from 0. optional: "none" is none of them."""
    if optional and text == "none":
        return ()
    try:
        values = tuple(parse(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"{flag} {text!r}: give numbers separated by commas") from None
    least = 0 if parse is float else least
    if any(value < least for value in values):
        raise ValueError(f"{flag} {text!r}: give numbers {'above 0' if least else 'not below 0'}")
    return values


def _split_names(text: str, flag: str, known: Sequence[str]) -> tuple[str, ...]:
    return _check_names(text.split(","), flag, known)


def _check_names(names: Sequence[str], flag: str, known: Sequence[str]) -> tuple[str, ...]:
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"{flag}: no such {', '.join(unknown)}; there are {', '.join(known)}")
    return tuple(names)
