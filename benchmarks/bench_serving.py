"""Compare TETRIS with no speculation, STANDALONE and other selection rules on real servers: `make bench`.

    python benchmarks/bench_serving.py                      # quick
    python benchmarks/bench_serving.py --full --resume      # every k, every number of extra drafts; hours
    python benchmarks/bench_serving.py --arms none,tetris --k 3 --extra 1,2,3 --concurrency 1,16

Load comes from SGLang's own `python -m sglang.bench_serving`, called in this process with the arguments that
are printed. Several servers are up at once, all but the measured one frozen, and every repeat visits all of
them, so that a change of the machine's speed meets every arm alike. See benchmarks/README.md.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import io
import json
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from tqdm import tqdm

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "benchmarks"), str(REPOSITORY / "scripts")]

import serving_report
from serving_report import REFERENCE, Results, round_key

from tetris_sglang.load import count_drafts, flush_cache, generate, read_step_counts
from tetris_sglang.server_process import ServerProcess, start_all

PAIR = REPOSITORY / "benchmarks" / "pair"
RESULTS = REPOSITORY / "benchmarks" / "results" / "serving.json"
FAMILIES = (REFERENCE, "standalone", "tetris", "uniform", "random", "auto")
DRAFTS = ("standalone", "eagle", "eagle3", "ngram", "perfect", "useless")
"""perfect: the target before it was inflated. useless: the shipped draft as sure as ever, its tokens mixed up."""
SERVER_GIB = 4.0  # a server's three processes without an accelerator, its target of 100 M parameters included
START_TIMEOUT_S = 600.0
WAVES = 2
AUTO = 0
"""As a k: the capacity that sets itself."""
_RECORDS_TIMEOUT_S = 20.0


# -- what is compared ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arm:
    """One server configuration.

    k: drafts verified per request and step, on average. extra: drafts beyond k that selection chooses from.
    capacity_tokens: instead of k, drafts verified per step over the whole batch, of num_steps drafted per request.
    draft: what drafts, one of DRAFTS. topk: branches of a draft tree, which is num_steps deep; 1: chains.
    """

    family: str
    k: int = 0
    extra: int = 0
    capacity_tokens: int = 0
    num_steps: int = 0
    draft: str = "standalone"
    topk: int = 1

    @property
    def name(self) -> str:
        if self.family == REFERENCE:
            return REFERENCE
        if self.draft == "standalone":
            name = self.family
        elif self.family == "standalone" and self.algorithm != "STANDALONE":
            name = self.algorithm
        else:
            name = f"{self.family} {self.draft}"
        if self.topk > 1:
            name += f" topk={self.topk}"
        if self.family == "auto":
            return f"{name} D={self.num_steps}"
        if self.capacity_tokens:
            return f"{name} C={self.capacity_tokens}, D={self.num_steps}"
        return f"{name} k={self.k}" + (f"+{self.extra}" if self.extra else "")

    @property
    def algorithm(self) -> str:
        """SGLang's own with this draft."""
        return "STANDALONE" if self.draft in ("perfect", "useless") else self.draft.upper()

    def flags(self, draft: Path | None, phase_times: bool) -> list[str]:
        """Server flags beyond the model's.

        Args:
            draft: the draft's folder; None for n-grams.
        """
        if self.family == REFERENCE:
            return []
        drafting = [
            *(("--speculative-draft-model-path", str(draft)) if draft else ()),
            *("--speculative-num-steps", str(self.num_steps or self.k + self.extra)),
        ]
        if self.topk > 1 and self.family != "auto":
            num_draft_tokens = self.k + self.extra + 1
            drafting += ["--speculative-num-draft-tokens", str(num_draft_tokens)]
        if self.family == "standalone":
            chain = ("--speculative-num-draft-tokens", str(self.k + 1)) if self.topk == 1 else ()
            branches = ("--speculative-eagle-topk", str(self.topk)) if self.draft != "ngram" else ()
            return ["--speculative-algorithm", self.algorithm, *drafting, *branches, *chain]
        if self.topk > 1:
            drafting += ["--speculative-eagle-topk", str(self.topk)]
        if self.family == "auto":
            return ["--speculative-algorithm", "TETRIS", *drafting]
        return [
            *("--speculative-algorithm", "TETRIS", *drafting),
            *(
                ("--speculative-tetris-capacity-tokens", str(self.capacity_tokens))
                if self.capacity_tokens
                else ("--speculative-tetris-capacity-per-request", str(self.k))
            ),
            *("--speculative-tetris-selection", self.family),
            *(("--speculative-tetris-phase-times", "true") if phase_times else ()),
        ]


@dataclass(frozen=True)
class Settings:
    """What decides the figures; results with other settings are never mixed."""

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

    @property
    def one_by_one(self) -> bool:
        """Servers follow one another instead of taking turns: no interleaving, nothing is frozen."""
        return self.live_servers == 1

    def num_prompts(self, concurrency: int) -> int:
        """Several waves: in a single one the batch only shrinks, and a run measures its slowest request."""
        return max(self.min_prompts, WAVES * concurrency)

    def build_arms(self) -> list[Arm]:
        """The reference first, then k by k: what is compared at equal k shares a group of live servers."""
        arms = [Arm(REFERENCE)]
        for draft, topk, k in product(self.drafts, self.topk, (AUTO, *self.k)):
            if k == AUTO:
                if "auto" in self.families:
                    arms.append(Arm("auto", num_steps=self.num_steps, draft=draft, topk=topk))
                continue
            depth = self.num_steps if topk > 1 else 0
            # A tree has at least as many nodes as levels; SGLang verifies all of them.
            if topk > 1 and k < depth:
                continue
            if "standalone" in self.families and not (draft == "ngram" and topk > 1):
                arms.append(Arm("standalone", k, num_steps=depth, draft=draft, topk=topk))
            for extra, family in product(self.extra, ("tetris", "uniform", "random")):
                if family in self.families:
                    arms.append(Arm(family, k, extra, num_steps=depth, draft=draft, topk=topk))
        for draft, tokens in product(self.drafts, self.capacity_tokens if "tetris" in self.families else ()):
            arms.append(Arm("tetris", capacity_tokens=tokens, num_steps=self.num_steps, draft=draft))
        return arms


def group_arms(arms: Sequence[Arm], live_servers: int) -> list[list[Arm]]:
    """Split into groups of at most `live_servers`, each with the reference; one group if they follow one another."""
    if live_servers == 1:
        return [list(arms)]
    reference, *others = arms
    size = live_servers - 1
    return [[reference, *others[i : i + size]] for i in range(0, len(others), size)] or [[reference]]


def order_arms(arms: Sequence[Arm], repeat: int) -> list[Arm]:
    """Rotate from repeat to repeat and reverse every other one: no arm always follows the same one."""
    start = repeat % len(arms)
    rotated = [*arms[start:], *arms[:start]]
    return rotated[::-1] if repeat % 2 else rotated


# -- results on disk -----------------------------------------------------------------------------------------


class ResultsFile:
    """Samples are written as they are taken; only complete rounds survive a resumption."""

    def __init__(self, path: Path, settings: Settings, arms: Sequence[Arm], *, resume: bool) -> None:
        self.path = path
        described = json.loads(json.dumps(asdict(settings)))
        self.results: Results = {
            "provenance": collect_provenance(),
            "settings": described,
            "arms": {arm.name: asdict(arm) for arm in arms},
            "unavailable": {},
            "samples": [],
        }
        if resume and path.exists():
            self._take_over(json.loads(path.read_text()), described)

    def _take_over(self, earlier: Results, described: dict[str, Any]) -> None:
        # "": a setting that did not exist when the earlier run was made.
        changed = [name for name, value in described.items() if earlier["settings"].get(name, "") != value]
        if changed:
            details = ", ".join(f"{name}={earlier['settings'].get(name)!r}" for name in changed)
            raise ValueError(
                f"--resume: {self.path} was measured with {details}. Give the same options, or another --out."
            )
        self.results["unavailable"] = earlier["unavailable"]
        self.results["samples"] = earlier["samples"]
        self.results["provenance"]["resumed_from"] = earlier["provenance"]

    def drop_incomplete(self, groups: Sequence[Sequence[Arm]]) -> None:
        """Forget rounds that some arm of the group is missing from: their runs were not taken together."""
        kept = []
        for sample in self.results["samples"]:
            names = {arm.name for arm in groups[sample["group"]]} - self.results["unavailable"].keys()
            taken = {s["arm"] for s in self.results["samples"] if round_key(s) == round_key(sample)}
            if names <= taken:
                kept.append(sample)
        self.results["samples"] = kept

    def has_round(self, key: tuple) -> bool:
        return any(round_key(sample) == key for sample in self.results["samples"])

    def has_sample(self, arm: Arm, key: tuple) -> bool:
        return any((s["arm"], round_key(s)) == (arm.name, key) for s in self.results["samples"])

    def add(self, sample: serving_report.Sample) -> None:
        self.results["samples"].append(sample)
        self.write()

    def mark_unavailable(self, arm: Arm, reason: str) -> None:
        self.results["unavailable"][arm.name] = reason
        self.write()

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(self.results, indent=1) + "\n")
        partial.replace(self.path)


def collect_provenance() -> dict[str, Any]:
    """Where and how the figures were taken."""
    return {
        "gpu": read_gpu_model(),
        "cpu": read_cpu_model(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
        "sglang": importlib.metadata.version("sglang"),
        "tetris_sglang": importlib.metadata.version("tetris-sglang"),
        "commit": describe_commit(),
        "command": shlex.join(["python", "benchmarks/bench_serving.py", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def read_cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    if not cpuinfo.exists():
        return platform.processor() or platform.machine()
    for line in cpuinfo.read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "Model"):
            return value.strip()
    return platform.machine()


def read_gpu_model() -> str | None:
    try:
        command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip() or None
    except (OSError, subprocess.CalledProcessError):
        return None


def describe_commit() -> str:
    git = ["git", "-C", str(REPOSITORY)]
    commit = subprocess.run(
        [*git, "rev-parse", "--short=12", "HEAD"], check=False, capture_output=True, text=True
    )
    if commit.returncode:
        return "unknown"
    watched = ["tetris_sglang", "benchmarks/pair", "scripts/inflate_model.py"]
    changes = subprocess.run(
        [*git, "status", "--porcelain", "--", *watched], check=True, capture_output=True, text=True
    )
    return commit.stdout.strip() + (" with uncommitted changes" if changes.stdout.strip() else "")


# -- running -------------------------------------------------------------------------------------------------


@dataclass
class LiveServer:
    arm: Arm
    process: ServerProcess
    records_folder: Path
    """Where SGLang writes one JSON line of meta_info per finished request (--export-metrics-to-file)."""
    is_frozen_between_runs: bool

    def read_records(self) -> list[dict[str, Any]]:
        lines: list[str] = []
        for path in sorted(self.records_folder.glob("*.log")):
            lines += path.read_text().splitlines()
        return [json.loads(line) for line in lines]

    def wait_for_records(self, count: int) -> list[dict[str, Any]]:
        """SGLang writes a record shortly after the answer."""
        deadline = time.monotonic() + _RECORDS_TIMEOUT_S
        while len(records := self.read_records()) < count:
            if time.monotonic() > deadline:
                raise RunFailed(f"the server reported {len(records)} of {count} requests")
            time.sleep(0.05)
        return records


class RunFailed(RuntimeError):
    """A run of an arm did not complete; says why."""


def read_prompts(path: Path) -> list[str]:
    """Texts of every kind in turn, so that any run of consecutive ones is mixed alike."""
    kinds: dict[str, list[str]] = {}
    for line in path.read_text().splitlines():
        prompt = json.loads(line)
        kinds.setdefault(prompt.get("kind", ""), []).append(prompt["text"])
    return [text for in_turn in zip(*kinds.values(), strict=False) for text in in_turn]


def extend_prompts(texts: Sequence[str], count: int) -> list[str]:
    """At least `count` texts: those given, and again from a later word on, so that none is another's prefix."""
    extended = list(texts)
    for lap in range(1, -(-count // len(texts))):
        extended += [text.split(" ", lap)[-1] for text in texts]
    return extended


def take_prompts(texts: Sequence[str], count: int, repeat: int) -> list[str]:
    """Another `count` prompts for every repeat, from the start again when they run out."""
    return [texts[(repeat * count + i) % len(texts)] for i in range(count)]


def write_dataset(texts: Sequence[str], out: Path) -> Path:
    """Write prompts as `--dataset-name custom` reads them."""
    with out.open("w") as file:
        for text in texts:
            turns = [{"role": "user", "content": text}, {"role": "assistant", "content": ""}]
            file.write(json.dumps({"conversations": turns}) + "\n")
    return out


def bench_serving_arguments(
    url: str,
    dataset: Path,
    num_prompts: int,
    settings: Settings,
    concurrency: int,
    temperature: float,
    output_file: Path,
) -> list[str]:
    """The arguments of `python -m sglang.bench_serving`; its seed shuffles every arm's prompts alike."""
    return [
        *("--backend", "sglang", "--base-url", url),
        *("--dataset-name", "custom", "--dataset-path", str(dataset), "--seed", str(settings.seed)),
        *("--num-prompts", str(num_prompts), "--max-concurrency", str(concurrency)),
        *("--sharegpt-output-len", str(settings.output_len), "--temperature", str(temperature)),
        *("--warmup-requests", "0", "--disable-tqdm", "--output-details", "--output-file", str(output_file)),
    ]


def run_bench_serving(arguments: Sequence[str]) -> dict[str, Any]:
    """SGLang's command-line entry point in this process: importing it takes longer than a run.

    Raises:
        RunFailed: with the end of what it printed.
    """
    from sglang.benchmark import serving

    output_file = Path(arguments[arguments.index("--output-file") + 1])
    output_file.unlink(missing_ok=True)
    printed = io.StringIO()
    argv, sys.argv = sys.argv, ["sglang.bench_serving", *arguments]
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            serving.cli_main()
    except (Exception, SystemExit) as error:
        raise RunFailed(
            f"sglang.bench_serving ended with {error!r} after: {printed.getvalue()[-200:]}"
        ) from error
    finally:
        sys.argv = argv
    return json.loads(output_file.read_text())


def measure(
    server: LiveServer, texts: Sequence[str], settings: Settings, concurrency: int, temperature: float
) -> serving_report.Sample:
    """One run of one arm, alone on the machine but for the frozen servers.

    Raises:
        RunFailed: a request failed, or the server went away.
    """
    process = server.process
    process.resume()
    try:
        try:
            # Wakes the server and brings its weights back into the caches.
            generate(process.url, texts[:1], concurrency=1, max_new_tokens=8)
            flush_cache(process.url)
            before, num_records = read_step_counts(process.url), len(server.read_records())
            folder = server.records_folder
            dataset = write_dataset(texts, folder / "prompts.jsonl")
            arguments = bench_serving_arguments(
                process.url, dataset, len(texts), settings, concurrency, temperature, folder / "result.jsonl"
            )
            result = run_bench_serving(arguments)
            steps = read_step_counts(process.url).since(before)
        except OSError as error:
            raise RunFailed(f"{error!r}; the server's log ends with\n{process.log_tail(5)}") from error
        if result["completed"] != len(texts):
            reason = next((error for error in result["errors"] if error), "no reason given")
            raise RunFailed(f"{result['completed']} of {len(texts)} requests completed: {reason[-300:]}")
        records = server.wait_for_records(num_records + len(texts))[num_records:]
    finally:
        if process.is_running and server.is_frozen_between_runs:
            process.pause()
    counts = count_drafts(records)
    return {
        "arm": server.arm.name,
        "concurrency": concurrency,
        "temperature": temperature,
        "output_tokens_per_s": result["output_throughput"],
        **{
            f"{short}_{quantile}_ms": result[f"{'median' if quantile == 'p50' else quantile}_{name}_ms"]
            for short, name in (("ttft", "ttft"), ("tpot", "tpot"), ("itl", "itl"), ("e2e", "e2e_latency"))
            for quantile in ("p50", "p99")
        },
        "output_tokens": result["total_output_tokens"],
        "duration_s": result["duration"],
        "verify_steps": counts.verify_steps,
        "selected": counts.selected,
        "accepted": counts.accepted,
        "num_steps": steps.num_steps,
        "verified_rows": steps.verified_rows,
        "phase_ms": dict(steps.phase_ms),
        "output_hashes": [hashlib.sha256(t.encode()).hexdigest()[:8] for t in result["generated_texts"]],
        # The machine's other work shows here: a frozen server adds nothing.
        "load_average": os.getloadavg()[0],
    }


class Bench:
    """Starts the groups of servers one after the other and takes every round that is still missing."""

    def __init__(
        self,
        settings: Settings,
        file: ResultsFile,
        target: Path,
        drafts: dict[str, Path | None],
        prompts: Path,
        folder: Path,
    ):
        self.settings, self.file, self.target, self.drafts, self.folder = (
            settings,
            file,
            target,
            drafts,
            folder,
        )
        self.texts = extend_prompts(
            read_prompts(prompts), max(map(settings.num_prompts, settings.concurrency))
        )

    def server_arguments(self, arm: Arm, records_folder: Path) -> list[str]:
        return [
            *(
                "--model-path",
                str(self.target),
                "--max-running-requests",
                str(max(self.settings.concurrency)),
            ),
            *("--dtype", self.settings.dtype, "--random-seed", str(self.settings.seed)),
            *("--export-metrics-to-file", "--export-metrics-to-file-dir", str(records_folder)),
            *shlex.split(self.settings.server_flags),
            *arm.flags(self.drafts[arm.draft], self.settings.phase_times),
        ]

    def run(self, groups: Sequence[Sequence[Arm]]) -> None:
        settings, file = self.settings, self.file
        rounds = list(product(range(settings.repeats), settings.temperature, settings.concurrency))
        total = sum(len(group) for group in groups) * len(rounds)
        with tqdm(total=total, unit="run", smoothing=0.1) as bar:
            if settings.one_by_one:
                self._run_one_by_one(groups[0], rounds, bar)
                return
            file.drop_incomplete(groups)
            for number, group in enumerate(groups):
                missing = []
                for repeat, temperature, concurrency in rounds:
                    if file.has_round((number, temperature, concurrency, repeat)):
                        bar.update(len(group))
                    else:
                        missing.append((repeat, temperature, concurrency))
                if missing:
                    self._run_group(number, group, missing, bar)

    def _run_one_by_one(self, arms: Sequence[Arm], rounds: Sequence[tuple], bar: tqdm) -> None:
        for arm in arms:
            missing = [
                (repeat, temperature, concurrency)
                for repeat, temperature, concurrency in rounds
                if not self.file.has_sample(arm, (0, temperature, concurrency, repeat))
            ]
            bar.update(len(rounds) - len(missing))
            if missing and arm.name not in self.file.results["unavailable"]:
                self._run_group(0, [arm], missing, bar)
            else:
                bar.update(len(missing))

    def _run_group(self, number: int, group: Sequence[Arm], rounds: Sequence[tuple], bar: tqdm) -> None:
        with contextlib.ExitStack() as stack:
            available = [arm for arm in group if arm.name not in self.file.results["unavailable"]]
            bar.set_description(f"group {number + 1}: starting {len(available)} servers")
            servers = self._start(available, stack)
            if group[0].family == REFERENCE and group[0] not in servers:
                raise RunFailed(f"no reference: {self.file.results['unavailable'][group[0].name]}")
            for repeat, temperature, concurrency in rounds:
                for arm in order_arms(group, repeat):
                    bar.set_description(f"{arm.name} at {concurrency}, repeat {repeat + 1}")
                    if arm in servers:
                        self._take(servers, arm, number, repeat, temperature, concurrency)
                    bar.update()

    def _take(
        self,
        servers: dict[Arm, LiveServer],
        arm: Arm,
        number: int,
        repeat: int,
        temperature: float,
        concurrency: int,
    ) -> None:
        texts = take_prompts(self.texts, self.settings.num_prompts(concurrency), repeat)
        try:
            sample = measure(servers[arm], texts, self.settings, concurrency, temperature)
        except RunFailed as error:
            if arm.family == REFERENCE:
                raise
            # Its earlier samples stay: what it did before it failed is true.
            self.file.mark_unavailable(arm, f"failed at concurrency {concurrency}: {error}")
            servers.pop(arm).process.stop()
            return
        self.file.add({"group": number, "repeat": repeat, **sample})

    def _start(self, group: Sequence[Arm], stack: contextlib.ExitStack) -> dict[Arm, LiveServer]:
        """Start all servers of a group, two at a time, and freeze each once it is warm; a single one is not frozen."""
        check_memory(len(group))
        servers = [self._prepare(arm) for arm in group]
        for server in servers:
            stack.callback(server.process.stop)

        def warm_up(process: ServerProcess) -> None:
            generate(process.url, self.texts[:4], concurrency=4, max_new_tokens=16)
            if not self.settings.one_by_one:
                process.pause()

        # These time their passes while they start: on a machine that does nothing else, as a user's does.
        alone = [server for server in servers if server.arm.family == "auto"]
        together = [server for server in servers if server.arm.family != "auto"]
        failures = []
        for batch in filter(None, (*([server] for server in alone), together)):
            failures += start_all([server.process for server in batch], warm_up)
        servers = [*alone, *together]
        for server, failure in zip(servers, failures, strict=True):
            if failure is not None:
                self.file.mark_unavailable(server.arm, last_words(str(failure)))
        return {s.arm: s for s, failure in zip(servers, failures, strict=True) if failure is None}

    def _prepare(self, arm: Arm) -> LiveServer:
        records_folder = Path(tempfile.mkdtemp(dir=self.folder))
        process = ServerProcess(
            self.server_arguments(arm, records_folder),
            self.folder / f"{arm.name.replace(' ', '-')}.log",
            start_timeout_s=START_TIMEOUT_S,
        )
        return LiveServer(arm, process, records_folder, is_frozen_between_runs=not self.settings.one_by_one)


def last_words(message: str) -> str:
    """The line of a failed start that says most: the last error of the log, else its last line."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line or "error:" in line]
    return (errors or lines or ["no output"])[-1][-300:]


def check_memory(num_servers: int, meminfo: Path = Path("/proc/meminfo")) -> None:
    """Raise ValueError when the servers would not fit into what is available."""
    if not meminfo.exists():
        return
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
    available_gib = int(fields["MemAvailable"].split()[0]) / 2**20
    if available_gib < num_servers * SERVER_GIB:
        raise ValueError(
            f"--live-servers {num_servers}: {num_servers} servers take {num_servers * SERVER_GIB:.1f} GiB, "
            f"{available_gib:.1f} GiB are available. Lower it (1: one server after the other)."
        )


def make_useless(draft: Path, out: Path) -> Path:
    """The draft with its output tokens permuted: as sure of its tokens as before, and wrong."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(draft, out)
    weights = load_file(out / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    order = torch.randperm(len(embedding), generator=torch.Generator().manual_seed(0))
    weights["lm_head.weight"] = embedding[order].contiguous()
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((out / "config.json").read_text()) | {"tie_word_embeddings": False}
    (out / "config.json").write_text(json.dumps(config))
    return out


# -- command line --------------------------------------------------------------------------------------------

QUICK = {
    "arms": "none,standalone,tetris",
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


def _split(text: str, flag: str, parse: type, optional: bool = False) -> tuple:
    if optional and text == "none":
        return ()
    try:
        values = tuple(parse(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"{flag} {text!r}: give numbers separated by commas") from None
    if parse is not float and any(value < 1 for value in values):
        raise ValueError(f"{flag} {text!r}: give numbers above 0")
    if any(value < 0 for value in values):
        raise ValueError(f"{flag} {text!r}: give numbers not below 0")
    return values


def build_settings(*, preset: dict[str, Any], options: dict[str, Any]) -> Settings:
    """Settings from a preset and the options given beside it (None where not given).

    Raises:
        ValueError: naming the option.
    """
    chosen = preset | {name: value for name, value in options.items() if value is not None}
    families = _split_names(chosen["arms"], "--arms", FAMILIES)
    for name in ("repeats", "output_len", "prompts", "num_steps", "live_servers"):
        if chosen[name] < 1:
            raise ValueError(f"--{name.replace('_', '-')} {chosen[name]}: give a number above 0")
    if chosen["output_len"] < 4:
        raise ValueError(f"--output-len {chosen['output_len']}: sglang.bench_serving wants 4 or more")
    return Settings(
        shape=chosen["shape"],
        dtype=chosen["dtype"],
        families=families,
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
        phase_times=chosen["phase_times"],
        seed=chosen["seed"],
        draft_shape=chosen.get("draft_shape", ""),
        server_flags=chosen.get("server_flags", ""),
        drafts=_split_names(chosen["drafts"], "--drafts", DRAFTS),
        topk=_split(chosen["topk"], "--topk", int),
    )


def _split_names(text: str, flag: str, known: Sequence[str]) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"{flag}: no such {', '.join(unknown)}; there are {', '.join(known)}")
    return names


@contextlib.contextmanager
def _terminated_as_interrupt() -> Iterator[None]:
    """SIGTERM ends the servers as Ctrl-C does."""
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def main(
    full: Annotated[
        bool, typer.Option("--full/--quick", help="Everything, or what fits in a coffee break.")
    ] = False,
    arms: Annotated[
        str | None, typer.Option(help=f"Of {', '.join(FAMILIES)}; 'none' is always measured.")
    ] = None,
    k: Annotated[
        str | None, typer.Option(help="Verified drafts per request, e.g. 1,2,3; none: no such arms.")
    ] = None,
    extra: Annotated[str | None, typer.Option(help="Drafts beyond k for TETRIS, uniform and random.")] = None,
    capacity_tokens: Annotated[
        str | None,
        typer.Option(
            help="Also TETRIS with this many verified drafts per step over the whole batch; none: no such arms."
        ),
    ] = None,
    num_steps: Annotated[
        int, typer.Option(help="Drafts per request in those arms and in auto; levels of draft trees.")
    ] = 6,
    concurrency: Annotated[str, typer.Option(help="Requests in flight.")] = "1,4,16",
    temperature: Annotated[str | None, typer.Option(help="0 is greedy.")] = None,
    output_len: Annotated[int, typer.Option(help="Tokens generated per request.")] = 64,
    prompts: Annotated[
        int | None, typer.Option(help=f"Prompts per run; at least {WAVES} per request in flight.")
    ] = None,
    repeats: Annotated[int, typer.Option(help="Rounds per cell.")] = 3,
    shape: Annotated[
        str, typer.Option(help="Of the inflated target: scripts/inflate_model.py.")
    ] = "cpu-100m",
    dtype: Annotated[
        str, typer.Option(help="Of both models. SGLang's own choice, float16 here, is slow on most CPUs.")
    ] = "float32",
    pair: Annotated[Path, typer.Option(help="Folder with target/, draft/ and prompts.jsonl.")] = PAIR,
    draft_shape: Annotated[str, typer.Option(help="Inflate the standalone draft, too.")] = "",
    drafts: Annotated[str, typer.Option(help=f"What drafts, of {', '.join(DRAFTS)}.")] = "standalone",
    topk: Annotated[
        str, typer.Option(help="Branches of draft trees, --num-steps deep, of k + extra nodes; 1: chains.")
    ] = "1",
    server_flags: Annotated[str, typer.Option(help="More flags for every server, as one argument.")] = "",
    live_servers: Annotated[
        int,
        typer.Option(
            help=f"Servers up at once, {SERVER_GIB} GiB each. 1: one after the other, for a GPU that holds one; then "
            "a drift of the machine's speed shows as a difference between arms."
        ),
    ] = 4,
    phase_times: Annotated[
        bool, typer.Option(help="Time the phases of TETRIS's steps: some ten clock readings per step.")
    ] = True,
    seed: Annotated[int, typer.Option(help="Of prompt order and sampling.")] = 0,
    out: Annotated[Path, typer.Option(help="JSON; the Markdown and the plot go beside it.")] = RESULTS,
    resume: Annotated[
        bool, typer.Option("--resume", help="Keep the complete rounds of an earlier, interrupted run.")
    ] = False,
) -> None:
    """Compare TETRIS with no speculation, SGLang's own speculation and other selection rules on real servers."""
    console = Console()
    options = {
        name: value
        for name, value in locals().items()
        if name not in ("full", "pair", "out", "resume", "console")
    }  # fmt: skip
    try:
        settings = build_settings(preset=FULL if full else QUICK, options=options)
        arm_list = settings.build_arms()
        groups = group_arms(arm_list, settings.live_servers)
        file = ResultsFile(out, settings, arm_list, resume=resume)
        from inflate_model import ensure_inflated

        with _terminated_as_interrupt(), tempfile.TemporaryDirectory(prefix="bench-serving-") as folder:
            target, draft = ensure_inflated(pair / "target", settings.shape, dtype), pair / "draft"
            if settings.draft_shape:
                draft = ensure_inflated(draft, settings.draft_shape, dtype)
            paths: dict[str, Path | None] = {"standalone": draft, "ngram": None}
            if "perfect" in settings.drafts:
                paths["perfect"] = pair / "target"
            if "useless" in settings.drafts:
                paths["useless"] = make_useless(draft, Path(folder) / "useless-draft")
            for head in set(settings.drafts) & {"eagle", "eagle3"}:
                # A head reads the target's states: it has the target's width.
                paths[head] = ensure_inflated(pair / head, settings.shape, dtype)
            bench = Bench(settings, file, target, paths, pair / "prompts.jsonl", Path(folder))
            arguments = bench_serving_arguments("URL", Path("PROMPTS"), 4, settings, 1, 0.0, Path("FILE"))
            console.print(
                f"load: python -m sglang.bench_serving {shlex.join(arguments)}",
                soft_wrap=True,
                highlight=False,
            )
            for arm in arm_list:
                flags = shlex.join(arm.flags(paths[arm.draft], settings.phase_times))
                console.print(f"{arm.name}: {flags}", soft_wrap=True, highlight=False)
            bench.run(groups)
    except (ValueError, RunFailed) as error:
        console.print(f"[red]error:[/] {error}", highlight=False)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        console.print(f"interrupted; complete rounds are kept in {out}: go on with --resume")
        raise typer.Exit(130) from None
    serving_report.print_tables(file.results, console)
    for path in [out, *serving_report.write_reports(file.results, out)]:
        console.print(str(path), highlight=False, soft_wrap=True)


if __name__ == "__main__":
    typer.run(main)
