#!/usr/bin/env python
"""Does `tetris-sglang simulate` predict what `tetris-sglang bench` measured?

    python scripts/validate_simulation.py --measured bench.json    # closed loops, the bench's own prompts, the shipped head,
    greedy

1. A TETRIS server with automatic capacity starts alone and times its passes, as any does.
2. Two servers answer the comparison's requests one at a time and record what was drafted: one the head's own tokens, which
   SGLang's speculation verifies; the other what TETRIS drafts, matches included. That the answers are those of the
   comparison is checked.
3. The same requests are simulated in the same order. Fitted are four constants to the runs without speculation and to those of
   SGLang's own with the fewest drafts: the machine's pace against that of the timed passes, with one row and with more, the
   host's time per step, and what a prefill costs beyond its pass.
4. Compared are the other arms' speeds, and their ratios to no speculation, each of its own round as in the bench.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shlex
import sys
import tempfile
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from statistics import mean
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table
from scipy.optimize import least_squares

from tetris_sglang.capacity import PassTimes
from tetris_sglang.config import find_settings
from tetris_sglang.tools.bench.arms import DRAFTS, REFERENCE, Arm
from tetris_sglang.tools.bench.results import Sample, collect_provenance, hash_output, round_key
from tetris_sglang.tools.bench.settings import Settings
from tetris_sglang.tools.bench.workloads import EQUAL, SHARED_PREFIX, UNLIKE, Chats, Load, find_workload
from tetris_sglang.tools.load import generate
from tetris_sglang.tools.prompts import Prompt, render_chats
from tetris_sglang.tools.real_model import HEAD, REPOSITORY, ensure_target
from tetris_sglang.tools.server_process import ServerProcess
from tetris_sglang.tools.simulate.costs import Calibration, load_pass_times, make_costs
from tetris_sglang.tools.simulate.engine import Setup
from tetris_sglang.tools.simulate.fleet import Outcome, simulate_setting
from tetris_sglang.tools.simulate.policies import make_plans
from tetris_sglang.tools.simulate.traces import DraftRows, read_rows
from tetris_sglang.tools.simulate.workload import Lengths, RequestClass, Requests, join_rows

RESULTS = REPOSITORY / "benchmarks/results/simulation"
TRACES = REPOSITORY / "build/validate_simulation"
DEPTH = 6
OWN, SERVED = "own", "served"
RECORDINGS = {
    OWN: ("--speculative-tetris-calibration", "false"),
    SERVED: (),
}
"""Flags of the servers: the head's own tokens and probabilities; calibrated drafts, matches included."""
BAND = 0.10
CHUNK_TOKENS = 2048
"""SGLang's default for --chunked-prefill-size on such a machine."""
MIN_EQUAL = 0.9
"""Of the answers: near-ties fall differently in passes of other shapes."""

Orders = dict[tuple[Load, int], list[Prompt]]
"""The prompts of every run in the order in which they were sent, by load and repeat."""


class Texts(NamedTuple):
    """Prompts, and what the model answers."""

    index: dict[str, int]
    """By the prompt's id."""
    prompt_lens: np.ndarray
    """Tokens."""
    output_lens: np.ndarray
    """Tokens."""
    hashes: list[str]
    """Of the answers, as the bench has them."""
    rows: dict[str, DraftRows]
    """By recording; the last so many texts are the prompts'."""


def main(
    measured: Annotated[Path, typer.Option(help="JSON of tetris-sglang bench.")],
    traces: Annotated[Path, typer.Option(help="Folder of recorded drafts; what is there is not recorded again.")] = TRACES,
    max_in_flight: Annotated[int, typer.Option(min=1, help="Leave out larger loads: fewer prompts to record.")] = 16,
    retime: Annotated[bool, typer.Option(help="Time the passes again.")] = False,
    out: Annotated[Path, typer.Option(help="JSON; the Markdown and the plot go beside it.")] = RESULTS
    / "simulate_validation.json",
) -> None:
    """Predict what was measured, and print both."""
    comparison = json.loads(measured.read_text())
    try:
        settings = read_settings(comparison)
    except ValueError as error:
        raise typer.BadParameter(f"--measured {measured}: {error}") from None
    samples = [s for s in comparison["samples"] if s["concurrency"] <= max_in_flight]
    workload = find_workload(settings)
    orders = {
        (load, repeat): find_order(workload, settings, load, repeat)
        for load, repeat in {(Load.of(s), s["repeat"]) for s in samples}
    }
    earlier = json.loads(out.read_text()) if out.exists() else {}
    passes = time_passes(settings) if retime or "pass_times" not in earlier else earlier["pass_times"]
    prompts = sorted({prompt for order in orders.values() for prompt in order})
    texts = record_texts(prompts, workload, settings, traces)
    check_answers(samples, orders, texts)
    arms = {name: Arm(**described) for name, described in comparison["arms"].items()}
    command = shlex.join(["python", "scripts/validate_simulation.py", *sys.argv[1:]])
    results = {
        "provenance": collect_provenance() | {"command": command, "measured": comparison["provenance"]},
        "pass_times": passes,
    } | predict(samples, arms, orders, texts, settings, PassTimes.from_json(passes))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(results, indent=1) + "\n")
    report(results, out)


# -- what was measured ---------------------------------------------------------------------------------------------


def read_settings(comparison: dict[str, Any]) -> Settings:
    """
    Raises:
        ValueError: the simulator has no such requests.
    """
    settings = Settings(
        **{name: tuple(value) if isinstance(value, list) else value for name, value in comparison["settings"].items()}
    )
    obstacles = {
        "Poisson arrivals": settings.request_rate,
        "a model of one's own": settings.model_path,
        "a data set of one's own": settings.dataset_name,
        "sampled requests": any(settings.temperature) or settings.workload == UNLIKE,
        "prompts that share prefixes": settings.workload == SHARED_PREFIX,
    }
    if found := [obstacle for obstacle, is_there in obstacles.items() if is_there]:
        raise ValueError(f"measured with {', '.join(found)}")
    return settings


def find_order(workload: Chats, settings: Settings, load: Load, repeat: int) -> list[Prompt]:
    """The prompts of a run as sglang.bench_serving sent them: it leaves chats in their order."""
    return workload.take(load.num_prompts(settings.min_prompts, settings.waves), repeat)


def check_answers(samples: Sequence[Sample], orders: Orders, texts: Texts) -> None:
    """What was recorded is about what was measured.

    Raises:
        ValueError: no speculation answered differently.
    """
    for sample in samples:
        if sample["arm"] != REFERENCE:
            continue
        order = orders[Load.of(sample), sample["repeat"]]
        recorded = [texts.hashes[texts.index[prompt.id]] for prompt in order]
        equal = np.mean([mine == theirs for mine, theirs in zip(recorded, sample["output_hashes"], strict=True)])
        if equal < MIN_EQUAL:
            raise ValueError(
                f"concurrency {sample['concurrency']}: {equal:.0%} of the answers are those that the model writes now"
            )


# -- what the simulator needs --------------------------------------------------------------------------------------


def tetris_arguments(settings: Settings) -> list[str]:
    return [
        *("--model-path", str(ensure_target()), "--dtype", settings.dtype),
        *("--speculative-algorithm", "TETRIS", "--speculative-num-steps", str(DEPTH)),
        *("--speculative-draft-model-path", str(HEAD)),
    ]


def time_passes(settings: Settings) -> dict:
    """Of a server that starts alone, into a cache of its own."""
    with tempfile.TemporaryDirectory(prefix="validate-simulation-") as name:
        folder = Path(name)
        arguments = [*tetris_arguments(settings), "--max-running-requests", str(max(settings.concurrency))]
        environment = {"SGLANG_TETRIS_CACHE": str(folder / "cache")}
        with ServerProcess(arguments, folder / "passes.log", environment=environment, start_timeout_s=600):
            (path,) = (folder / "cache/pass_times").glob("*.json")
            return load_pass_times(path).to_json()


def record_texts(prompts: Sequence[Prompt], workload: Chats, settings: Settings, folder: Path) -> Texts:
    """Have the model answer all prompts, once for each of `RECORDINGS`.

    Raises:
        ValueError: an answer ended before anything was drafted.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lengths = [workload.choose_length(prompt) for prompt in prompts]
    head = hashlib.sha256((HEAD / "model.safetensors").read_bytes()).hexdigest()
    rows, answers = {}, []
    for name, flags in track(RECORDINGS.items(), description="recording drafts"):
        described = json.dumps([DEPTH, flags, head, prompts, lengths, settings.lengths])
        path = folder / f"{name}_{hashlib.sha256(described.encode()).hexdigest()[:16]}.trace"
        answers_path = path.with_suffix(".json")
        if not answers_path.exists():
            answers_path.write_text(json.dumps(record(flags, path, prompts, lengths, settings)))
        answers.append(json.loads(answers_path.read_text()))
        rows[name] = read_rows(path)
    hashes, prompt_lens, output_lens = zip(*answers[-1], strict=True)
    if short := [prompt.id for prompt, tokens in zip(prompts, output_lens, strict=True) if tokens < 2]:
        raise ValueError(
            f"the answers to {', '.join(short)} end with their first token: the traces lack them. Measure with "
            f"--lengths {EQUAL}."
        )
    index = {prompt.id: i for i, prompt in enumerate(prompts)}
    return Texts(index, np.array(prompt_lens), np.array(output_lens), hashes, rows)


def record(
    flags: Sequence[str], path: Path, prompts: Sequence[Prompt], lengths: Sequence[int], settings: Settings
) -> list[tuple[str, int, int]]:
    """Serve the prompts one at a time, every draft verified: the trace then numbers them as they are.

    Scheduling is synchronous: under overlap a request that has ended may ride in one more step.

    Returns:
        Of each answer the hash, its prompt's tokens and its own.
    """
    texts = render_chats(ensure_target(), [prompt.text for prompt in prompts])
    arguments = [
        *(*tetris_arguments(settings), *flags, "--max-running-requests", "1", "--disable-overlap-schedule"),
        *("--speculative-tetris-capacity-per-request", str(DEPTH)),
        *("--speculative-tetris-record", str(path)),
    ]
    # Settings in the environment are for other servers.
    for name in find_settings():
        del os.environ[name]
    with ServerProcess(arguments, path.with_suffix(".log"), start_timeout_s=600) as server:
        completions, _ = generate(
            server.url, texts, concurrency=1, max_new_tokens=lengths, ignore_eos=settings.lengths == EQUAL
        )
    return [(hash_output(c.text), c.meta_info["prompt_tokens"], c.meta_info["completion_tokens"]) for c in completions]


# -- predictions ---------------------------------------------------------------------------------------------------


def find_policy(arm: Arm) -> tuple[str, str] | None:
    """An arm as the simulator's policy and the recording of its drafts; None: the simulator has none."""
    if arm.draft != DRAFTS[0] or arm.topk > 1 or max(arm.k + arm.extra, arm.num_steps) > DEPTH:
        return None
    if arm.capacity_tokens:
        return f"tetris{arm.num_steps}@{arm.capacity_tokens}", SERVED
    return {
        REFERENCE: ("none", OWN),
        "sglang": (f"sd{arm.k}", OWN),
        "full": (f"sd{arm.k}", SERVED),
        "tetris": (f"tetris{arm.k}+{arm.extra}", SERVED),
        "uniform": (f"uniform{arm.k}+{arm.extra}", SERVED),
        "auto": ("auto", SERVED) if arm.num_steps == DEPTH else None,
    }.get(arm.family)


class Simulator:
    """Simulates runs of the comparison.

    Args:
        arms: by name. orders: the prompts of every run, by load and repeat.
    """

    def __init__(self, arms: dict[str, Arm], orders: Orders, texts: Texts, settings: Settings, passes: PassTimes) -> None:
        self._arms, self._orders, self._texts = arms, orders, texts
        self._settings, self._passes = settings, passes
        # Groups of servers share their references.
        self.run = functools.cache(self._run)
        lengths = (
            Lengths.parse(int(np.median(texts.prompt_lens)), ""),
            Lengths.parse(int(np.median(texts.output_lens)), ""),
        )
        self._classes = {name: RequestClass(name, rows, *lengths) for name, rows in texts.rows.items()}
        self._tables = {name: join_rows([one]) for name, one in self._classes.items()}

    def _run(self, arm: str, load: Load, repeat: int, calibration: Calibration) -> Outcome:
        policy, drafts = find_policy(self._arms[arm])
        order = self._orders[load, repeat]
        taken = np.array([self._texts.index[prompt.id] for prompt in order])
        one = self._classes[drafts]
        # Before the prompts' there is the request with which SGLang warms a server up.
        first_rows = one.rows.starts[:-1][-len(self._texts.index) :]
        count, max_running = len(taken), max(self._settings.concurrency)
        requests = Requests(
            np.zeros(count),
            np.zeros(count, np.int32),
            self._texts.prompt_lens[taken].astype(np.int32),
            self._texts.output_lens[taken].astype(np.int32),
            first_rows[taken],
            np.zeros((count, 2)),
        )
        costs = make_costs(
            self._passes,
            max_running=max_running,
            num_drafts=one.rows.survival.shape[1],
            chunk_tokens=CHUNK_TOKENS,
            calibration=calibration,
        )
        setup = Setup(1, 0, max_running, CHUNK_TOKENS, 10**9, load.concurrency, 0)
        plans = make_plans(policy, costs, [one], max_running=max_running)
        return simulate_setting(requests, self._tables[drafts], costs, plans, setup)

    def fit(self, samples: Sequence[Sample]) -> Calibration:
        """To runs of some arms: their speeds, and no speculation's first token with the fewest requests in flight."""
        fewest = min(s["concurrency"] for s in samples)
        firsts_s = [s["ttft_p50_ms"] / 1e3 for s in samples if (s["arm"], s["concurrency"]) == (REFERENCE, fewest)]
        scale = self._passes.target_s[1]

        def read(found: Sequence[float]) -> Calibration:
            pace, row_pace, host, prefill = map(float, found)
            return Calibration(pace=pace, row_pace=row_pace, host_s=host * scale, prefill_s=prefill * scale)

        def errors(found: np.ndarray) -> list[float]:
            calibration = read(found)
            first_s = self.run(REFERENCE, Load(fewest), samples[0]["repeat"], calibration).ttft_p50_ms / 1e3
            return [
                *(
                    self.run(s["arm"], Load.of(s), s["repeat"], calibration).total_tokens_per_s / s["output_tokens_per_s"] - 1
                    for s in samples
                ),
                first_s / mean(firsts_s) - 1,
            ]

        return read(least_squares(errors, (1.0, 1.0, 0.25, 0.25), bounds=(0.0, np.inf), diff_step=1e-3).x)


def find_fitted(arms: dict[str, Arm], measured: Collection[str]) -> list[str]:
    """No speculation, and SGLang's own with the fewest drafts: what anybody has without TETRIS."""
    own = [name for name in measured if arms[name].family == "sglang" and find_policy(arms[name])]
    return [REFERENCE, *sorted(own, key=lambda name: arms[name].k)[:1]]


def predict(
    samples: Sequence[Sample],
    arms: dict[str, Arm],
    orders: Orders,
    texts: Texts,
    settings: Settings,
    passes: PassTimes,
) -> dict[str, Any]:
    """Every measured setting with its prediction, as JSON."""
    simulator = Simulator(arms, orders, texts, settings, passes)
    fitted = find_fitted(arms, {s["arm"] for s in samples})
    calibration = simulator.fit([s for s in samples if s["arm"] in fitted])
    references = {round_key(s): s for s in samples if s["arm"] == REFERENCE}

    described = []
    keys = dict.fromkeys((s["arm"], Load.of(s)) for s in samples)
    for arm, load in track(sorted(keys, key=lambda key: (list(arms).index(key[0]), key[1])), "simulating"):
        if find_policy(arms[arm]) is None:
            continue
        mine = [s for s in samples if (s["arm"], Load.of(s)) == (arm, load)]
        outcomes = [simulator.run(arm, load, s["repeat"], calibration) for s in mine]
        without = [simulator.run(REFERENCE, load, s["repeat"], calibration) for s in mine]
        steps = sum(s["verify_steps"] for s in mine)
        measured = mean(s["output_tokens_per_s"] for s in mine)
        predicted = mean(outcome.total_tokens_per_s for outcome in outcomes)
        measured_ratio = mean(s["output_tokens_per_s"] / references[round_key(s)]["output_tokens_per_s"] for s in mine)
        predicted_ratio = mean(
            outcome.total_tokens_per_s / reference.total_tokens_per_s
            for outcome, reference in zip(outcomes, without, strict=True)
        )
        lengths = [outcome.accept_length for outcome in outcomes]
        described.append(
            {
                "arm": arm,
                "concurrency": load.concurrency,
                "measured_ratio": measured_ratio,
                "predicted_ratio": predicted_ratio,
                "ratio_error": predicted_ratio / measured_ratio - 1,
                "measured_tokens_per_s": measured,
                "predicted_tokens_per_s": predicted,
                "error": predicted / measured - 1,
                "measured_accept_length": 1 + sum(s["accepted"] for s in mine) / steps if steps else None,
                "predicted_accept_length": mean(lengths) if all(lengths) else None,
            }
        )
    return {"calibration": vars(calibration), "fitted": fitted, "settings": described}


# -- report --------------------------------------------------------------------------------------------------------


def count_within(settings: Sequence[dict], error: str) -> str:
    errors = [abs(setting[error]) for setting in settings]
    within = sum(error <= BAND for error in errors)
    return f"{within} of {len(errors)} within {BAND:.0%}, mean error {mean(errors):.1%}"


def describe(results: dict[str, Any]) -> str:
    fitted, fit = results["fitted"], results["calibration"]
    predicted = [s for s in results["settings"] if s["arm"] not in fitted]
    others = [s for s in results["settings"] if s["arm"] in fitted]
    return (
        f"Predicted speeds: {count_within(predicted, 'error')}. Ratios to no speculation: "
        f"{count_within(predicted, 'ratio_error')}. Fitted to {' and '.join(fitted)} (speeds: {count_within(others, 'error')}):"
        f" passes take {fit['pace']:.2f} of what was timed, {fit['row_pace']:.2f} of that for every row but the first, the "
        f"host {fit['host_s'] * 1e3:.1f} ms per step, a prefill {fit['prefill_s'] * 1e3:.1f} ms beyond its pass."
    )


HEADERS = (
    "arm",
    "in flight",
    "ratio to no speculation",
    "predicted",
    "error",
    "output tok/s",
    "predicted",
    "error",
    "accept length",
    "predicted",
)


def draw_error(error: float) -> str:
    return f"{error:+.1%}" if abs(error) <= BAND else f"**{error:+.1%}**"


def draw_lines(settings: Sequence[dict]) -> Iterator[tuple[str, ...]]:
    for setting in settings:
        lengths = (setting["measured_accept_length"], setting["predicted_accept_length"])
        yield (
            setting["arm"],
            str(setting["concurrency"]),
            *(
                (
                    f"{setting['measured_ratio']:.2f}",
                    f"{setting['predicted_ratio']:.2f}",
                    draw_error(setting["ratio_error"]),
                )
                if setting["arm"] != REFERENCE
                else ("1", "1", "")
            ),
            f"{setting['measured_tokens_per_s']:.1f}",
            f"{setting['predicted_tokens_per_s']:.1f}",
            draw_error(setting["error"]),
            *(f"{length:.2f}" if length else "" for length in lengths),
        )


def report(results: dict[str, Any], out: Path) -> None:
    console = Console(width=None if sys.stdout.isatty() else 130)
    lines = list(draw_lines(results["settings"]))
    table = Table(*HEADERS, box=box.SIMPLE_HEAD)
    for line in lines:
        table.add_row(*(cell.replace("**", "") for cell in line))
    console.print(table)
    console.print(describe(results), highlight=False)
    made, of = results["provenance"], results["provenance"]["measured"]
    origin = (
        f"Measured by `{of['command']}` at commit {of['commit']}, predicted at {made['commit']}; {of['cores']} cores of a "
        f"{of['cpu']}. In bold what misses {BAND:.0%}."
    )
    text = [
        "# The simulator against real servers",
        "",
        origin,
        "",
        describe(results),
        "",
        "| " + " | ".join(HEADERS) + " |",
        "|" + "---|" * len(HEADERS),
        *("| " + " | ".join(line) + " |" for line in lines),
    ]
    out.with_suffix(".md").write_text("\n".join(text) + "\n")
    plot(results["settings"], results["fitted"], out.with_suffix(".png"))


def plot(settings: Sequence[dict], fitted: Collection[str], out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(5.5, 5.5))
    predicted = [s for s in settings if s["arm"] not in fitted]
    speeds = [s[f"{kind}_tokens_per_s"] for s in predicted for kind in ("measured", "predicted")]
    line = np.array([0.9 * min(speeds), 1.1 * max(speeds)])
    axes.fill_between(line, line * (1 - BAND), line * (1 + BAND), alpha=0.15, label=f"within {BAND:.0%}")
    axes.plot(line, line, lw=0.8, color="grey")
    for arm in dict.fromkeys(s["arm"] for s in predicted):
        mine = [[s[f"{kind}_tokens_per_s"] for s in predicted if s["arm"] == arm] for kind in ("measured", "predicted")]
        axes.plot(*mine, "o", label=arm)
    axes.set(xscale="log", yscale="log", xlim=line, ylim=line)
    axes.set(xlabel="measured, output tokens/s", ylabel="predicted, output tokens/s")
    axes.legend()
    figure.savefig(out, dpi=120, bbox_inches="tight")
    plt.close(figure)


if __name__ == "__main__":
    typer.run(main)
