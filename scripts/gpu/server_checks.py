"""Stages d to g of check.py: real servers."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from proof import Reference
from stage_report import ON_HOST_CUDA, PAIR, PATIENCE, REPOSITORY, Report, log, recorded, run_child

from tests.e2e.client import Client
from tetris_sglang.cache import cache_folder
from tetris_sglang.tools.bench.workloads import MAX_CHARS
from tetris_sglang.tools.fetch import NotFetched
from tetris_sglang.tools.prompts import RESULTS, read_sharegpt, render_chats
from tetris_sglang.tools.real_model import HEAD, ensure_target
from tetris_sglang.tools.server_process import ServerFailed, ServerProcess, start_all

# Hopper's own FA3 is not in the bundle.
SERVER_FLAGS = "--dtype bfloat16 --attention-backend flashinfer --sampling-backend flashinfer --random-seed 7"
# On by default, but they take a minute of every start: one server has them.
NO_PREFILL_GRAPHS = "--disable-prefill-cuda-graph"
REAL_SHAPE = os.environ.get("GPU_CHECK_SHAPE", "smollm2-8b")
MAX_REAL_REGRET = 0.5
"""In logits: four steps of bfloat16 at the size of SmolLM2's largest."""


class Amounts(NamedTuple):
    """What servers have and are asked."""

    prompts: int = 160
    real_prompts: int = 96
    tokens: int = 64
    samples: int = 1000
    loads: tuple[int, ...] = (1, 4, 16)
    timed_tokens: int = 256
    profiled_steps: int = 24
    graphs: str = "1 2 4 8 16 32 64"
    """Batch sizes that are captured."""
    pool: int = 65536


ON_HOST = Amounts(
    prompts=16, real_prompts=4, tokens=8, samples=256, loads=(1, 4), timed_tokens=8, profiled_steps=1, graphs="1 2 4", pool=4096
)
ASKED = ON_HOST if ON_HOST_CUDA else Amounts()
# Stages e, f and h: room for the KV of what they ask at once.
LARGE_FLAGS = (
    f"{SERVER_FLAGS} {NO_PREFILL_GRAPHS} --cuda-graph-bs-decode {ASKED.graphs} --max-total-tokens {min(ASKED.pool, 24576)}"
)

# -- d: servers ----------------------------------------------------------------------------------------------


TETRIS_FLAGS = [
    *("--speculative-algorithm", "TETRIS", "--speculative-num-steps", "5"),
    *("--speculative-tetris-capacity-per-request", "3", "--speculative-tetris-phase-times", "true"),
]


def tetris_flags(draft: Path) -> list[str]:
    return [*TETRIS_FLAGS, "--speculative-draft-model-path", str(draft)]


# Besides a standalone model's chains and a fixed capacity.
OTHER_DRAFTS = {
    "automatic capacity": [
        *("--speculative-draft-model-path", str(PAIR / "draft")),
        *("--speculative-tetris-capacity-per-request", "auto"),
    ],
    "comb": ["--speculative-draft-model-path", str(PAIR / "draft"), "--speculative-num-draft-tokens", "11"],
    "eagle": ["--speculative-draft-model-path", str(PAIR / "eagle")],
    "eagle3 comb": ["--speculative-draft-model-path", str(PAIR / "eagle3"), "--speculative-num-draft-tokens", "11"],
    "ngram": [],
    "dflash": ["--speculative-draft-model-path", str(PAIR / "dflash"), "--speculative-num-draft-tokens", "11"],
    "dflare": ["--speculative-draft-model-path", str(PAIR / "dflare"), "--speculative-num-draft-tokens", "11"],
}


def check_server(report: Report) -> None:
    """TETRIS, with every way to plan the verify pass (runtime/cuda/), and no speculation side by side on the shipped pair."""
    with contextlib.ExitStack() as outer:
        plain = _serve(report, "d-plain", [], outer)
        expected = _generate_expected(plain)
        for plan in ("device", "host", "eager"):
            with recorded(report, f"a server with {plan} plans"), contextlib.ExitStack() as inner:
                flags = [*tetris_flags(PAIR / "draft"), "--speculative-tetris-verify-plan", plan]
                tetris = _serve(report, f"d-tetris-{plan}", flags, inner)
                outputs = tetris.generate_all(_prompts(), concurrency=32, max_new_tokens=ASKED.tokens)
                _check_greedy(report, f"{plan} plans", expected, outputs)
                if plan == "device":
                    for sampling in ({}, {"top_p": 0.8, "top_k": 30}, {"min_p": 0.05}):
                        _check_sampled(report, plain, tetris, _prompts()[3], sampling)
                    _check_metrics(report, tetris, _prompts()[:32])
                report.record(f"{plan}_phase_ms", {k: v for k, v in tetris.tetris_state().items() if k.endswith("_ms")})


def check_drafts(report: Report) -> None:
    """Automatic capacity, trees, heads and n-grams against no speculation."""
    with contextlib.ExitStack() as outer:
        expected = _generate_expected(_serve(report, "g-plain", [], outer))
        for name, flags in OTHER_DRAFTS.items():
            with recorded(report, f"a server with {name} drafts"), contextlib.ExitStack() as inner:
                prefill_graphs = name == "automatic capacity"
                tetris = _serve(report, f"g-{name.replace(' ', '-')}", [*TETRIS_FLAGS, *flags], inner, prefill_graphs)
                outputs = tetris.generate_all(_prompts(), concurrency=32, max_new_tokens=ASKED.tokens)
                # Automatic capacity chooses for itself whether it drafts.
                _check_greedy(report, name, expected, outputs, min_success=0.15 if not prefill_graphs else None)


def check_real_text(report: Report) -> None:
    """The real model with its EAGLE-3 head against no speculation, and where the time of a step goes."""
    if (target := find_real_model(report)) is None:
        return
    chats = render_chats(target, [p.text for p in read_sharegpt(RESULTS) if len(p.text) <= MAX_CHARS][: ASKED.real_prompts])
    draft = ["--speculative-draft-model-path", str(HEAD)]
    # At equal chains, then as it is by default.
    fixed = EAGLE3_CHAIN.replace("EAGLE3", "TETRIS") + " --speculative-tetris-capacity-per-request 3"
    flags = {"EAGLE3": EAGLE3_CHAIN, "TETRIS-fixed": fixed, "TETRIS": "--speculative-algorithm TETRIS"}
    flags = {"plain": [], **{name: [*own.split(), *draft] for name, own in flags.items()}}
    processes = {name: _prepare(report, f"i-{name}", own, target=target) for name, own in flags.items()}
    with contextlib.ExitStack() as stack:
        for process in processes.values():
            stack.callback(process.stop)
        failures = start_all(list(processes.values()), lambda process: None, at_once=len(processes))
        servers = {name: Client(process.url, process.log_path) for name, process in processes.items()}
        for name, failure in zip(servers, failures, strict=True):
            if not report.expect(f"{name} starts", failure is None, failure or ""):
                return
        reference, missed = Reference(target), {}
        for name, server in servers.items():
            outputs = server.generate_all(chats, concurrency=32, max_new_tokens=ASKED.tokens)
            if steps := sum(output["meta_info"].get("spec_verify_ct", 0) for output in outputs):
                report.record(f"{name}_tokens_per_step", sum(o["meta_info"]["completion_tokens"] for o in outputs) / steps)
            greedy = reference.judge_greedy(chats, [output["output_ids"] for output in outputs])
            report.record(f"{name}_greedy", greedy._asdict())
            missed[name] = 1 - greedy.num_best / greedy.num_tokens
            if name != "plain":
                what = f"{name}: tokens are the float32 target's as often as without speculation"
                report.expect(what, missed[name] <= 1.5 * missed["plain"] + 0.02, f"{missed[name]:.1%} are not")
            what = f"{name}: the others are near-ties"
            report.expect(what, greedy.regret <= MAX_REAL_REGRET, f"short by {greedy.regret:.3f} at most")
            if name == "TETRIS-fixed":  # SGLang's own does not say what it verified, and the default may not draft
                _check_acceptance(report, name, outputs, 0.15)
        for concurrency in ASKED.loads:
            for name, server in servers.items():
                parameters = {"concurrency": concurrency, "max_new_tokens": ASKED.timed_tokens, "ignore_eos": True}
                started_at = time.monotonic()
                server.generate_all(chats[:concurrency], **parameters)
                tokens_per_s = ASKED.timed_tokens * concurrency / (time.monotonic() - started_at)
                report.record(f"{name}_tokens_per_s_at_{concurrency}", round(tokens_per_s, 1))
        for concurrency in (ASKED.loads[0], ASKED.loads[-1]):
            for name in ("TETRIS-fixed", "TETRIS"):
                _profile(servers[name], f"i-{name}-{concurrency}", chats[:concurrency])
        report.record("tetris_state", servers["TETRIS"].tetris_state())
        report.record("pass_times", [json.loads(path.read_text()) for path in (cache_folder() / "pass_times").glob("*.json")])


def _profile(server: Client, name: str, prompts: Sequence[str], num_steps: int = ASKED.profiled_steps) -> None:
    """What the host and the device do in some steps, as a trace for Chrome's or Perfetto's viewer beside the log."""
    asked = {
        # On the host there is no device to ask, and a step is made of so many calls that their stacks take gigabytes.
        "activities": ["CPU"] if ON_HOST_CUDA else ["CPU", "GPU"],
        "with_stack": not ON_HOST_CUDA,
        "num_steps": num_steps,
        "output_dir": str(server.log_path.parent),
        "profile_prefix": name,
    }
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.post, "/start_profile", asked)
        server.generate_all(prompts, concurrency=len(prompts), max_new_tokens=4 * num_steps, ignore_eos=True)
        answer.result()


def _serve(
    report: Report, name: str, flags: Sequence[str], stack: contextlib.ExitStack, prefill_graphs: bool = False
) -> Client:
    server = stack.enter_context(_prepare(report, name, flags, prefill_graphs))
    report.record(f"{name}_start_s", server.start_seconds)
    return Client(server.url, server.log_path)


def _prepare(
    report: Report, name: str, flags: Sequence[str], prefill_graphs: bool = False, target: Path = PAIR / "target"
) -> ServerProcess:
    """A server that is not started yet."""
    common = (
        f"{SERVER_FLAGS} --mem-fraction-static 0.3 --max-total-tokens {ASKED.pool} "
        f"--max-running-requests 64 --cuda-graph-bs-decode {ASKED.graphs} --enable-metrics"
    )
    if not prefill_graphs:
        common += f" {NO_PREFILL_GRAPHS}"
    elif ON_HOST_CUDA:  # all sizes take an hour there
        common += " --cuda-graph-bs-prefill 16 64"
    log_path = report.path.parent / f"{name}.log"
    log(f"starting {name}: {log_path}")
    return ServerProcess(["--model-path", str(target), *common.split(), *flags], log_path, start_timeout_s=300 * PATIENCE)


def _prompts() -> list[str]:
    return [json.loads(line)["text"] for line in (PAIR / "prompts.jsonl").read_text().splitlines()[: ASKED.prompts]]


def _generate_expected(plain: Client) -> list[dict]:
    parameters = {"max_new_tokens": ASKED.tokens, "return_logprob": True, "top_logprobs_num": 2}
    return plain.generate_all(_prompts(), concurrency=32, **parameters)


def _check_greedy(
    report: Report,
    name: str,
    expected: Sequence[dict],
    actual: Sequence[dict],
    min_success: float | None = 0.3,
) -> None:
    """Texts are equal, or part at a near-tie of the target: passes of different shapes round differently."""
    gaps = []
    for want, got in zip(expected, actual, strict=True):
        position = first_difference(want["output_ids"], got["output_ids"])
        if position is not None:
            first, second = (top[0] for top in want["meta_info"]["output_top_logprobs"][position][:2])
            gaps.append(first - second)
    count, largest = len(expected), max(gaps, default=0.0)
    report.record(f"{name}_greedy", {"prompts": count, "identical": count - len(gaps), "gaps": gaps})
    what = f"{name}: most greedy outputs are those without speculation"
    report.expect(what, len(gaps) <= count // 3, f"{len(gaps)} of {count} differ")
    what = f"{name}: they part at near-ties only"
    report.expect(what, largest < 0.15, f"largest log-probability gap {largest:.3f}")
    if min_success is not None:
        _check_acceptance(report, name, actual, min_success)


def _check_acceptance(report: Report, name: str, outputs: Sequence[dict], min_success: float) -> None:
    """Drafts accepted, of those verified."""
    accepted, selected = (
        sum(o["meta_info"].get(f"spec_num_{counted}_drafts", 0) for o in outputs) for counted in ("correct", "selected")
    )
    report.expect(f"{name}: drafts are accepted", accepted > min_success * selected > 0, f"{accepted} of {selected}")


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """The first position at which two outputs differ; None where the shorter one is the other's beginning."""
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), None)


def _check_sampled(report: Report, plain, tetris, prompt: str, sampling: dict) -> None:
    """The same distribution of every one of the first tokens, by a chi-square test of the two servers' counts.

    And drafts are accepted, far oftener than without the noise that they share with the target.
    """
    import numpy
    from scipy.stats import chi2_contingency

    outputs = [
        client.generate_all(
            [prompt] * ASKED.samples,
            concurrency=64,
            max_new_tokens=6,
            temperature=1.0,
            ignore_eos=True,
            **sampling,
        )
        for client in (plain, tetris)
    ]
    for position in range(6):
        counts = [Counter(o["output_ids"][position] for o in answers) for answers in outputs]
        total = counts[0] + counts[1]
        common = [token for token, count in total.items() if count >= 20]
        table = [[c[t] for t in common] + [ASKED.samples - sum(c[t] for t in common)] for c in counts]
        table = [column for column in zip(*table, strict=True) if sum(column)]
        p = chi2_contingency(numpy.array(table).T).pvalue if len(table) > 1 else 1.0
        report.expect(f"sampled token {position} is distributed alike, {sampling}", p > 1e-4, f"p = {p:.3g}")
    # The CPU platform accepts 0.31, 0.27 and 0.28 of these in bfloat16.
    _check_acceptance(report, f"sampled, {sampling}", outputs[1], min_success=0.24)


def _check_metrics(report: Report, client, prompts: Sequence[str]) -> None:
    names = {name: f"sglang:tetris_{name}_tokens_total" for name in ("drafted", "selected", "accepted")}

    def read() -> tuple[dict, dict]:
        return client.tetris_state(), {name: client.metric(metric) for name, metric in names.items()}

    client.generate_all(list(prompts[:1]), max_new_tokens=8)
    state_before, metrics_before = read()
    client.generate_all(list(prompts), concurrency=16, max_new_tokens=32, ignore_eos=True)
    state, metrics = read()
    grown = {key: value - state_before[key] for key, value in state.items() if isinstance(value, int)}
    report.record("counters", grown)
    for name in names:
        report.expect(
            f"Prometheus and /server_info agree on {name} tokens",
            round(metrics[name] - metrics_before[name]) == grown[f"{name}_tokens"],
            grown[f"{name}_tokens"],
        )
    least = grown["num_requests"] + grown["selected_tokens"]
    report.expect("rows are at least roots and selected drafts", grown["verified_rows"] >= least, grown["verified_rows"])


# -- e, h: throughput ----------------------------------------------------------------------------------------


def find_real_model(report: Report) -> Path | None:
    """SmolLM2-135M-Instruct; None where it or the prompts cannot be fetched: the other checks do without."""
    try:
        read_sharegpt(RESULTS)
        return ensure_target()
    except NotFetched as error:
        report.record("not fetched", str(error))
        return None


def inflate_real_model(target: Path) -> tuple[Path, Path]:
    """The model and its head at the cost of a larger one (REAL_SHAPE), saying the same: no larger one is in a package."""
    from inflate_model import ensure_inflated

    started_at = time.monotonic()
    target, head = (ensure_inflated(folder, REAL_SHAPE, "bfloat16") for folder in (target, HEAD))
    log(f"inflated models: {time.monotonic() - started_at:.0f} s")
    return target, head


EAGLE3_CHAIN = (
    "--speculative-algorithm EAGLE3 --speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4"
)
WHAT_IS_ASKED = (
    "--workload sharegpt --concurrency 1,4,16,64 --output-len 128 --prompts 16 --waves 2 --repeats 1 --turn-seconds 3"
)


def check_large_model(report: Report) -> None:
    """`tetris-sglang bench` on the real model at a larger one's cost; it resumes by itself."""
    if (target := find_real_model(report)) is not None:
        target, head = inflate_real_model(target)
        # One takes 24 GB.
        live_servers = 4 if (read_device_memory("total") or 0) > 96 << 10 else 3
        models = f"--model-path {target} --draft eagle3={head} --live-servers {live_servers}"
        _bench(
            report,
            report.path.parent / "large.json",
            f"{models} --arms none,auto,sglang,tetris --k 3 --extra 1 --capacity-tokens none {WHAT_IS_ASKED}",
        )


def check_real_model(report: Report) -> None:
    """The same on the model as it is, n-grams included."""
    if find_real_model(report) is not None:
        arms = "--arms none,control,auto,sglang --drafts eagle3,ngram --k 1,3 --live-servers 8"
        _bench(report, report.path.parent / "real.json", f"{arms} {WHAT_IS_ASKED}")


def _bench(report: Report, results: Path, options: str) -> None:
    if ON_HOST_CUDA:
        raise RuntimeError("there is no speed on the host")
    command = [
        *(sys.executable, "-m", "tetris_sglang", "bench", "--resume", "--dtype", "bfloat16", *options.split()),
        *("--out", str(results), "--server-flags", LARGE_FLAGS),
    ]
    finished = run_child([*command, *os.environ.get("GPU_CHECK_BENCH", "").split()], cwd=REPOSITORY)
    report.expect("tetris-sglang bench", finished.returncode == 0)
    if report.expect("there are results", results.exists(), results):
        measured = json.loads(results.read_text())
        report.record("samples", len(measured["samples"]))
        report.expect("every arm served", not measured["unavailable"], measured["unavailable"])


# -- f: memory and graphs ------------------------------------------------------------------------------------

_CAPTURE = re.compile(
    r"Capture (?P<name>[\w ]+?) CUDA graph end\..*?elapsed=(?P<seconds>[\d.]+) s.*?mem usage=(?P<gib>[\d.]+) GB"
)


def parse_captures(log_text: str) -> list[dict[str, Any]]:
    """What SGLang's log says of every kind of graph it captured."""
    return [
        {"graphs": found["name"], "seconds": float(found["seconds"]), "gib": float(found["gib"])}
        for found in _CAPTURE.finditer(log_text)
    ]


def check_graphs(report: Report) -> None:
    """Start-up, graph capture and memory of each algorithm, at a larger model's cost."""
    if (target := find_real_model(report)) is None:
        return
    target, head = inflate_real_model(target)
    draft = f"--speculative-draft-model-path {head}"
    arms = {
        "none": "",
        "EAGLE3": f"{EAGLE3_CHAIN} {draft}",
        "TETRIS": f"--speculative-algorithm TETRIS {draft}",
    }
    for name, flags in arms.items():
        path = report.path.parent / f"f-{name}.log"
        log(f"starting {name}: {path}")
        common = ["--model-path", str(target), *LARGE_FLAGS.split(), "--max-running-requests", "64"]
        server = ServerProcess([*common, *flags.split()], path, start_timeout_s=240 * PATIENCE)
        try:
            with server:
                captures = parse_captures(path.read_text(errors="replace"))
                figures = {"start_s": server.start_seconds, "device_mib": read_device_memory()}
                report.record(name, figures | {"captures": captures})
                report.expect(f"{name} captured graphs", bool(captures), captures)
        except ServerFailed as error:
            report.expect(f"{name} starts", False, str(error)[-500:])


def read_device_memory(which: str = "used") -> int | None:
    """MiB on the device: those in use, or the total."""
    command = ["nvidia-smi", f"--query-gpu=memory.{which}", "--format=csv,noheader,nounits"]
    try:
        return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[0])
    except (OSError, subprocess.CalledProcessError, ValueError, IndexError):
        return None
