#!/usr/bin/env python
"""Does `tetris-sglang simulate` predict what real servers on this machine do?

    python scripts/validate_simulation.py                    # everything, some 15 minutes
    python scripts/validate_simulation.py --arms sd1,sd3     # measure these again; other samples are kept
    python scripts/validate_simulation.py --arms ""          # predict again from what was measured

1. A TETRIS server with automatic capacity starts alone and times its passes, as any does.
2. Each arm's server runs beside one without speculation, in turns, the waiting one frozen: the shipped prompts, greedy, so many in
   flight, a fixed number of tokens each. Speed is all output tokens over all seconds, with the first and the last requests in.
3. Simulated are the same requests: their prompts' lengths, their own recorded drafts, the timed passes. Fitted are two constants to
   no speculation with one request in flight, the host's time per step and what a prefill costs beyond the passes; and, since such
   machines are faster in one minute than in the next, a pace per group of servers that took turns: measured over predicted
   seconds of its runs without speculation. So these are no predictions and are not counted. Speculation's are.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from pathlib import Path
from statistics import mean
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer
from rich import box
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY / "benchmarks"), str(REPOSITORY / "scripts")]

from bench_selection import describe_run, name_commit
from fit_ngram import PAIR, write_texts
from inflate_model import ensure_inflated
from record_replay import count_positions
from replay_to_trace import main as write_trace

from tetris_sglang.capacity import PassTimes
from tetris_sglang.load import count_drafts, flush_cache, generate
from tetris_sglang.server_process import ServerProcess
from tetris_sglang.simulate.costs import Calibration, load_pass_times, make_costs
from tetris_sglang.simulate.engine import Setup
from tetris_sglang.simulate.fleet import Outcome, simulate_setting
from tetris_sglang.simulate.policies import make_plans
from tetris_sglang.simulate.traces import read_rows
from tetris_sglang.simulate.workload import Lengths, RequestClass, Requests, join_rows

RESULTS = REPOSITORY / "benchmarks/results/simulate_validation.json"
DEPTH = 6
DRAFT = ("--speculative-draft-model-path", str(PAIR / "draft"))


def standalone(k: int) -> tuple[str, ...]:
    chain = ("--speculative-num-steps", str(k), "--speculative-num-draft-tokens", str(k + 1))
    return "--speculative-algorithm", "STANDALONE", *DRAFT, *chain, "--speculative-eagle-topk", "1"


def tetris(depth: int, *capacity: str) -> tuple[str, ...]:
    return "--speculative-algorithm", "TETRIS", *DRAFT, "--speculative-num-steps", str(depth), *capacity


ARMS = {
    "none": (),
    "sd1": standalone(1),
    "sd3": standalone(3),
    "tetris2+2": tetris(4, "--speculative-tetris-capacity-per-request", "2"),
    "auto": tetris(DEPTH),
}
"""Server flags of each of the simulator's policies."""
PROMPTS = {1: 4, 4: 12, 8: 16, 16: 32}
"""Concurrency -> prompts per run."""
BAND = 0.10
CHUNK_TOKENS = 2048
"""SGLang's default for --chunked-prefill-size on such a machine."""
RECORDED_TOKENS = 96
FITTED = ("none", 1)


class Prompt(NamedTuple):
    text: str
    length: int
    """Tokens."""
    first_row: int
    """Where its recorded drafts begin."""


def main(
    arms: Annotated[
        str, typer.Option(help="To measure, beside none; empty: none.")
    ] = "sd1,sd3,tetris2+2,auto",
    repeats: Annotated[
        int, typer.Option(min=1, help="Runs per arm and concurrency, each of other prompts.")
    ] = 2,
    output_len: Annotated[int, typer.Option(min=2, help="Tokens per request.")] = 64,
    shape: Annotated[str, typer.Option(help="What the target is inflated to.")] = "cpu-100m",
    retime: Annotated[bool, typer.Option(help="Time the passes again.")] = False,
    out: Annotated[Path, typer.Option(help="JSON; the Markdown and the plot go beside it.")] = RESULTS,
) -> None:
    """Measure real servers, predict them, and print both."""
    chosen = [arm for arm in arms.split(",") if arm]
    if unknown := [arm for arm in chosen if arm not in ARMS]:
        raise typer.BadParameter(f"--arms: no such {', '.join(unknown)}; there are {', '.join(ARMS)}")
    results: dict[str, Any] = {"samples": [], "pass_times": None}
    if out.exists():
        results = json.loads(out.read_text())
    if "prompts" not in results:
        results["prompts"] = find_prompts()
    texts = [json.loads(line)["text"] for line in (PAIR / "prompts.jsonl").read_text().splitlines()]
    prompts = [Prompt(texts[line], length, row) for line, length, row in results["prompts"]]
    with tempfile.TemporaryDirectory(prefix="validate-simulation-") as name:
        folder = Path(name)
        base = (
            *("--model-path", str(ensure_inflated(PAIR / "target", shape, "float32")), "--dtype", "float32"),
            *("--random-seed", "0", "--max-running-requests", str(max(PROMPTS))),
        )
        if retime or results["pass_times"] is None:
            results["pass_times"] = time_passes(base, folder)
            write(results, out)
        for arm in tqdm(chosen, unit="arm"):
            kept = [s for s in results["samples"] if s["group"] != arm]
            results["samples"] = kept + measure_group(arm, base, folder, prompts, repeats, output_len)
            results["provenance"] = describe_run("cpu", 0) | {
                "command": "python scripts/validate_simulation.py",
                "clock": "wall clock",
                "commit": "of each sample",
                "shape": shape,
                "output_len": output_len,
            }
            write(results, out)
        write_trace(folder / "pair.trace", "standalone")
        one = RequestClass(
            "pair", read_rows(folder / "pair.trace"), Lengths.parse(10, ""), Lengths.parse(output_len, "")
        )
        predict(results, one, prompts, output_len)
    write(results, out)
    report(results, out)


def write(results: dict[str, Any], out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(results, indent=1) + "\n")


def find_prompts() -> list[tuple[int, int, int]]:
    """(line in prompts.jsonl, tokens, first recorded row) of those whose continuation was recorded to its full length.

    Kinds in turn. The target writes all of them once more, a few minutes on two cores, since what was recorded does not say
    which prompt it belongs to.
    """
    texts = write_texts(PAIR / "target", PAIR / "prompts.jsonl", RECORDED_TOKENS)
    first_row, kinds = 0, {}
    for line, text in enumerate(texts):
        positions = count_positions(text, DEPTH)
        if positions == RECORDED_TOKENS - DEPTH:
            kinds.setdefault(text.kind, []).append((line, text.prompt_len, first_row))
        first_row += positions
    return [prompt for in_turn in zip(*kinds.values(), strict=False) for prompt in in_turn]


def take_prompts(prompts: list[Prompt], concurrency: int, repeat: int) -> list[Prompt]:
    count = PROMPTS[concurrency]
    return [prompts[(repeat * count + i) % len(prompts)] for i in range(count)]


# -- real servers --------------------------------------------------------------------------------------------------


def time_passes(base: tuple[str, ...], folder: Path) -> dict:
    """Started alone, into a cache of its own."""
    environment = {"SGLANG_TETRIS_CACHE": str(folder / "cache")}
    with ServerProcess([*base, *ARMS["auto"]], folder / "passes.log", environment=environment):
        (path,) = (folder / "cache/pass_times").glob("*.json")
        return load_pass_times(path).to_json()


def measure_group(
    arm: str, base: tuple[str, ...], folder: Path, prompts: list[Prompt], repeats: int, output_len: int
) -> list[dict]:
    samples, servers = [], {}
    commit = name_commit(["tetris_sglang", "scripts/validate_simulation.py"])
    with contextlib.ExitStack() as stack:
        for name in dict.fromkeys(("none", arm)):
            servers[name] = stack.enter_context(
                ServerProcess([*base, *ARMS[name]], folder / f"{arm}-{name}.log", start_timeout_s=600)
            )
            generate(servers[name].url, [p.text for p in prompts[-8:]], concurrency=4, max_new_tokens=16)
            servers[name].pause()
        for repeat in range(repeats):
            for concurrency in PROMPTS:
                names = list(servers)[:: -1 if repeat % 2 else 1]
                for name in names:
                    taken = take_prompts(prompts, concurrency, repeat)
                    sample = measure(servers[name], name, taken, concurrency, output_len)
                    samples.append({"group": arm, "repeat": repeat, **sample, "commit": commit})
    return samples


def measure(
    server: ServerProcess, arm: str, prompts: list[Prompt], concurrency: int, output_len: int
) -> dict[str, Any]:
    texts = [prompt.text for prompt in prompts]
    server.resume()
    try:
        # Brings its weights back into the caches.
        generate(server.url, texts[:1], concurrency=1, max_new_tokens=8)
        first_token_s = None
        if (arm, concurrency) == FITTED:
            flush_cache(server.url)
            _, seconds = generate(server.url, texts, concurrency=1, max_new_tokens=1)
            first_token_s = seconds / len(texts)
        flush_cache(server.url)
        completions, seconds = generate(server.url, texts, concurrency=concurrency, max_new_tokens=output_len)
    finally:
        server.pause()
    counts = count_drafts(completion.meta_info for completion in completions)
    return {
        "arm": arm,
        "concurrency": concurrency,
        "seconds": seconds,
        "tokens": sum(completion.meta_info["completion_tokens"] for completion in completions),
        "first_token_s": first_token_s,
        "verify_steps": counts.verify_steps,
        "selected": counts.selected,
        "accepted": counts.accepted,
    }


# -- predictions ---------------------------------------------------------------------------------------------------


def predict(results: dict[str, Any], one: RequestClass, prompts: list[Prompt], output_len: int) -> None:
    passes, samples = PassTimes.from_json(results["pass_times"]), results["samples"]
    calibration = calibrate(samples, passes, one, prompts, output_len)
    outcomes = [
        simulate(s["arm"], s["concurrency"], s["repeat"], passes, calibration, one, prompts, output_len)
        for s in samples
    ]
    seconds = np.array([s["tokens"] / o.total_tokens_per_s for s, o in zip(samples, outcomes, strict=True)])
    measured_s = np.array([s["seconds"] for s in samples])
    tokens = np.array([s["tokens"] for s in samples])
    paces = {}
    for group in dict.fromkeys(s["group"] for s in samples):
        of_none = [i for i, s in enumerate(samples) if (s["group"], s["arm"]) == (group, "none")]
        paces[group] = float(np.exp(np.log(measured_s[of_none] / seconds[of_none]).mean()))
    paced_s = seconds * [paces[s["group"]] for s in samples]
    results |= {"calibration": vars(calibration), "paces": paces, "settings": []}
    keys = dict.fromkeys((s["arm"], s["concurrency"]) for s in samples)
    for arm, concurrency in sorted(keys, key=lambda key: (list(ARMS).index(key[0]), key[1])):
        runs = [i for i, s in enumerate(samples) if (s["arm"], s["concurrency"]) == (arm, concurrency)]
        mine = [samples[i] for i in runs]
        speeds = tokens[runs] / measured_s[runs]
        measured = float(tokens[runs].sum() / measured_s[runs].sum())
        predicted, unpaced = (float(tokens[runs].sum() / of[runs].sum()) for of in (paced_s, seconds))
        steps = sum(s["verify_steps"] for s in mine)
        lengths = [outcomes[i].accept_length for i in runs]
        results["settings"].append(
            {
                "arm": arm,
                "concurrency": concurrency,
                "runs": len(runs),
                "measured_tokens_per_s": measured,
                "measured_range": [float(speeds.min()), float(speeds.max())],
                "predicted_tokens_per_s": predicted,
                "error": predicted / measured - 1,
                "error_without_pace": unpaced / measured - 1,
                "measured_accept_length": 1 + sum(s["accepted"] for s in mine) / steps if steps else None,
                "predicted_accept_length": mean(lengths) if all(lengths) else None,
                "is_fitted": arm == "none",
            }
        )


def simulate(arm, concurrency, repeat, passes, calibration, one, prompts, output_len) -> Outcome:
    taken = take_prompts(prompts, concurrency, repeat)
    count = len(taken)
    requests = Requests(
        np.zeros(count),
        np.zeros(count, np.int32),
        np.array([prompt.length for prompt in taken], np.int32),
        np.full(count, output_len, np.int32),
        np.array([prompt.first_row for prompt in taken]),
        np.zeros((count, 2)),
    )
    max_running = max(PROMPTS)
    costs = make_costs(
        passes, max_running=max_running, num_drafts=DEPTH, chunk_tokens=CHUNK_TOKENS, calibration=calibration
    )
    setup = Setup(1, 0, max_running, CHUNK_TOKENS, 10**9, concurrency, 0)
    return simulate_setting(
        requests, join_rows([one]), costs, make_plans(arm, costs, [one], max_running=max_running), setup
    )


def calibrate(samples, passes, one, prompts, output_len) -> Calibration:
    """From requests one at a time without speculation, with one token and with all of them."""
    fitted = [s for s in samples if (s["arm"], s["concurrency"]) == FITTED]
    first_token_s = mean(s["first_token_s"] for s in fitted)
    step_s = mean(s["seconds"] / PROMPTS[1] - s["first_token_s"] for s in fitted) / (output_len - 1)
    free = Calibration(host_s=0.0)
    alone = simulate("none", 1, 0, passes, free, one, prompts, output_len)
    host_s = step_s - alone.tpot_p50_ms / 1e3
    return Calibration(host_s=host_s, prefill_s=first_token_s - host_s - alone.ttft_p50_ms / 1e3)


# -- report --------------------------------------------------------------------------------------------------------


def report(results: dict[str, Any], out: Path) -> None:
    console = Console(width=None if sys.stdout.isatty() else 120)
    headers = (
        "policy",
        "in flight",
        "measured tok/s",
        "predicted",
        "error",
        "accept length",
        "predicted",
        "",
    )
    lines = []
    for setting in results["settings"]:
        within = "within" if abs(setting["error"]) <= BAND else "**outside**"
        lengths = (setting["measured_accept_length"], setting["predicted_accept_length"])
        low, high = setting["measured_range"]
        lines.append(
            (
                setting["arm"],
                str(setting["concurrency"]),
                f"{setting['measured_tokens_per_s']:.1f} ({low:.1f}..{high:.1f})",
                f"{setting['predicted_tokens_per_s']:.1f}",
                f"{setting['error']:+.1%}",
                f"{setting['error_without_pace']:+.1%}",
                *(f"{length:.2f}" if length else "" for length in lengths),
                "fitted" if setting["is_fitted"] else within,
            )
        )
    table = Table(*headers, box=box.SIMPLE_HEAD)
    for line in lines:
        table.add_row(*(cell.replace("**", "") for cell in line))
    console.print(table)
    predicted = [setting for setting in results["settings"] if not setting["is_fitted"]]

    def count(error: str, settings: list[dict]) -> str:
        within = sum(abs(setting[error]) <= BAND for setting in settings)
        mean_error = mean(abs(setting[error]) for setting in settings)
        return f"{within} of {len(settings)} settings within {BAND:.0%}, mean error {mean_error:.1%}"

    unfitted = [s for s in results["settings"] if (s["arm"], s["concurrency"]) != FITTED]
    verdict = (
        f"Predicted: {count('error', predicted)}. Without paces, no speculation included: "
        f"{count('error_without_pace', unfitted)}."
    )
    console.print(verdict, highlight=False)
    fit, where = results["calibration"], results["provenance"]
    commits = ", ".join(sorted({s["commit"] for s in results["samples"]}))
    made = (
        f"{where['device']}; commits {commits}; target `{where['shape']}`, float32, greedy, "
        f"{where['output_len']} tokens per request; range over runs in brackets."
    )
    fitted = (
        f"Fitted to no speculation with one request in flight: {fit['host_s'] * 1e3:.1f} ms of host time per step, "
        f"{fit['prefill_s'] * 1e3:.1f} ms per prefill beyond the passes. Paces of the groups: "
        f"{', '.join(f'{group} {pace:.2f}' for group, pace in results['paces'].items())}. {verdict}"
    )
    text = [
        "# The simulator against real servers",
        "",
        made,
        "",
        fitted,
        "",
        "| " + " | ".join(headers) + " |",
        "|" + "---|" * len(headers),
        *("| " + " | ".join(line) + " |" for line in lines),
    ]
    out.with_suffix(".md").write_text("\n".join(text) + "\n")
    plot(results["settings"], out.with_suffix(".png"))


def plot(settings: list[dict], out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(5, 5))
    speeds = [s["measured_tokens_per_s"] for s in settings] + [s["predicted_tokens_per_s"] for s in settings]
    line = np.array([0.8 * min(speeds), 1.2 * max(speeds)])
    axes.fill_between(line, line * (1 - BAND), line * (1 + BAND), alpha=0.15, label=f"within {BAND:.0%}")
    axes.plot(line, line, lw=0.8, color="grey")
    for arm in dict.fromkeys(s["arm"] for s in settings):
        mine = [s for s in settings if s["arm"] == arm and not s["is_fitted"]]
        if not mine:
            continue
        axes.plot(
            [s["measured_tokens_per_s"] for s in mine],
            [s["predicted_tokens_per_s"] for s in mine],
            "o",
            label=arm,
        )
    axes.set(xscale="log", yscale="log", xlim=line, ylim=line)
    axes.set(xlabel="measured, output tokens/s", ylabel="predicted, output tokens/s")
    axes.legend()
    figure.savefig(out, dpi=120, bbox_inches="tight")


if __name__ == "__main__":
    typer.run(main)
