"""What a comparison is made of, and the options that say it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from tetris_sglang.bench.arms import DRAFTS, FAMILIES, HEADS, REFERENCE, Arm
from tetris_sglang.bench.workloads import WAVES, WORKLOADS, Load
from tetris_sglang.config import default_continued

QUICK = {
    "arms": "none,auto,standalone,tetris",
    "k": "1,3",
    "extra": "2",
    "capacity_tokens": "8",
    "temperature": "0",
    "prompts": 4,
}
FULL = {
    "arms": ",".join(FAMILIES),
    "k": "1,2,3,4,5",
    "extra": "1,2,3",
    "capacity_tokens": "4,8,16",
    "temperature": "0,1",
    "prompts": 32,
}
REQUEST_RATES = "1,2,4"
ARRIVALS = ("closed", "poisson")
# SGLang's own choice, float16 for the shipped pair, is slow on most CPUs.
PAIR_DTYPE, PAIR_SHAPE = "float32", "cpu-100m"


@dataclass(frozen=True)
class Settings:
    """What decides the figures; results with other settings are never mixed.

    Those with a default came later: results that lack one were measured with the default.
    """

    shape: str
    dtype: str
    families: tuple[str, ...]
    k: tuple[int, ...]
    extra: tuple[int, ...]
    capacity_tokens: tuple[int, ...]
    num_steps: int
    concurrency: tuple[int, ...]
    temperature: tuple[float, ...]
    output_len: int
    min_prompts: int
    repeats: int
    live_servers: int
    phase_times: bool
    seed: int
    draft_shape: str = ""
    server_flags: str = ""
    drafts: tuple[str, ...] = ("standalone",)
    topk: tuple[int, ...] = (1,)
    workload: str = "mixed"
    dataset: str = ""
    dataset_name: str = ""
    """Of bench_serving's; where given, it replaces the workload."""
    load_flags: str = ""
    request_rate: tuple[float, ...] = ()
    """Poisson arrivals; empty: closed loop."""
    model_path: str = ""
    """Empty: the shipped pair."""
    draft_paths: tuple[str, ...] = ()
    """DRAFT=PATH each."""
    turn_seconds: float = 0.0
    """0: whole runs."""
    continued: tuple[int, ...] = (0,)
    """Tokens with which auto's chains go on from the text; of models' chains."""
    fairness: tuple[float, ...] = ()
    """Of auto; empty: the server's default."""
    waves: int = WAVES
    """Prompts per run and request in flight, at least."""

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
        arms = [Arm(REFERENCE)]
        if "adaptive" in self.families:
            # It changes the depth of chains from an EAGLE head, and knows no other draft.
            heads = [draft for draft in self.drafts if draft in HEADS] or [HEADS[0]]
            arms += [Arm("adaptive", draft=head) for head in heads]
        for draft, topk in product(self.drafts, self.topk):
            depth = self.num_steps if topk > 1 else 0
            if "auto" in self.families:
                # Chains of n-grams are as long by default as those of models that go on from the text.
                is_lookup = topk == 1 and draft == "ngram"
                num_steps = 2 * self.num_steps if is_lookup else self.num_steps
                goes_on = self.continued if topk == 1 and not is_lookup else (0,)
                for continued, fairness in product(goes_on, self.fairness or (None,)):
                    drafting = {"num_steps": num_steps, "draft": draft, "topk": topk}
                    arms.append(Arm("auto", **drafting, continued=continued, fairness=fairness))
            for k in self.k:
                arms += self._build_with_k(k, depth, draft, topk)
        for draft, tokens in product(self.drafts, self.capacity_tokens if "tetris" in self.families else ()):
            arms.append(Arm("tetris", capacity_tokens=tokens, num_steps=self.num_steps, draft=draft))
        # Other k and extra can have the same sum, which is all that matters in full.
        return list(dict.fromkeys(arms))

    def _build_with_k(self, k: int, depth: int, draft: str, topk: int) -> list[Arm]:
        # A tree has at least as many nodes as levels; SGLang verifies all of them.
        if topk > 1 and k < depth:
            return []
        common = {"num_steps": depth, "draft": draft, "topk": topk}
        arms = []
        if "standalone" in self.families and not (draft == "ngram" and topk > 1):
            arms.append(Arm("standalone", k, **common))
        for extra in self.extra:
            arms += [
                Arm(f, k, extra, **common) for f in ("tetris", "uniform", "random") if f in self.families
            ]
            if "full" in self.families:
                arms.append(Arm("full", k + extra, **common))
        return arms


def build_settings(*, preset: dict[str, Any], options: dict[str, Any]) -> Settings:
    """Settings from a preset and the options given beside it (None where not given).

    Raises:
        ValueError: naming the option.
    """
    chosen = preset | {name: value for name, value in options.items() if value is not None}
    chosen.setdefault("waves", WAVES)
    for name in ("repeats", "output_len", "prompts", "waves", "num_steps", "live_servers"):
        if chosen[name] < 1:
            raise ValueError(f"--{name.replace('_', '-')} {chosen[name]}: give a number above 0")
    if chosen["output_len"] < 4:
        raise ValueError(f"--output-len {chosen['output_len']}: sglang.bench_serving wants 4 or more")
    model_path, draft_paths = chosen.get("model_path", ""), tuple(chosen.get("draft_paths", ()))
    for pair in draft_paths:
        _check_names([pair.partition("=")[0]], "--draft", DRAFTS)
        if not pair.partition("=")[2]:
            raise ValueError(f"--draft {pair!r}: give DRAFT=PATH")
    if model_path and (chosen.get("shape") or chosen.get("draft_shape")):
        raise ValueError(
            "--shape and --draft-shape inflate the shipped pair: leave them out with --model-path"
        )
    if chosen.get("dataset") and not chosen.get("dataset_name"):
        raise ValueError("--dataset: say with --dataset-name which of sglang.bench_serving's formats it has")
    turn_seconds = chosen.get("turn_seconds", 0.0)
    _check_turns(turn_seconds, chosen)
    named = [pair.partition("=")[0] for pair in draft_paths]
    return Settings(
        shape="" if model_path else chosen.get("shape", PAIR_SHAPE),
        dtype=chosen.get("dtype", "auto" if model_path else PAIR_DTYPE),
        families=_split_names(chosen["arms"], "--arms", FAMILIES),
        k=_split(chosen["k"], "--k", int, optional=True),
        extra=_split(chosen["extra"], "--extra", int),
        capacity_tokens=_split(chosen["capacity_tokens"], "--capacity-tokens", int, optional=True),
        num_steps=chosen["num_steps"],
        concurrency=_split(chosen["concurrency"], "--concurrency", int),
        temperature=_split(chosen["temperature"], "--temperature", float),
        output_len=chosen["output_len"],
        min_prompts=chosen["prompts"],
        repeats=chosen["repeats"],
        live_servers=chosen["live_servers"],
        phase_times=not turn_seconds if chosen.get("phase_times") is None else chosen["phase_times"],
        seed=chosen["seed"],
        draft_shape=chosen.get("draft_shape", ""),
        server_flags=chosen.get("server_flags", ""),
        drafts=_split_names(chosen.get("drafts") or ",".join(named) or "standalone", "--drafts", DRAFTS),
        topk=_split(chosen["topk"], "--topk", int),
        workload=_check_names([chosen.get("workload", "mixed")], "--workload", WORKLOADS)[0],
        dataset=chosen.get("dataset", ""),
        dataset_name=chosen.get("dataset_name", ""),
        load_flags=chosen.get("load_flags", ""),
        request_rate=_read_rates(chosen.get("arrivals", ARRIVALS[0]), chosen.get("request_rate")),
        model_path=model_path,
        draft_paths=draft_paths,
        turn_seconds=turn_seconds,
        continued=_split(
            chosen.get("continued") or str(default_continued(chosen["num_steps"])),
            "--continued",
            int,
            least=0,
        ),
        waves=chosen["waves"],
        fairness=_split(chosen.get("fairness") or "none", "--fairness", float, optional=True),
    )


def _check_turns(seconds: float, chosen: dict[str, Any]) -> None:
    if seconds < 0:
        raise ValueError(f"--turn-seconds {seconds}: give 0 for whole runs, or the length of a turn")
    obstacles = {
        "--live-servers 1: there is nobody to take turns with": chosen["live_servers"] == 1,
        "--phase-times: a step that is frozen half-way has no true times": chosen.get("phase_times"),
        "--arrivals poisson: requests would arrive while their server is frozen": chosen.get("arrivals")
        == "poisson",
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
