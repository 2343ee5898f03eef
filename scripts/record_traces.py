#!/usr/bin/env python
"""Record what real servers draft, verify and accept on real prompts, for `tetris-sglang replay`.

    python scripts/record_traces.py                       # all; writes benchmarks/traces/NAME.trace.gz
    python scripts/record_traces.py --names eagle3,ngram

SmolLM2-135M-Instruct answers ShareGPT's and HumanEval's prompts and the project's own, with every kind of draft. A trace holds
probabilities and what became of them, no token of any text. The drafts beside the shipped head are trained first:

    scripts/train_drafts.sh head-code pruned dflash

Every draft is verified, so that what the target says about each is known. Calibration is on and starts from nothing: a
trace's calibrated survivals are those that the server had at that moment, and it learns from every draft, which is more
than a server sees that verifies a few of them. Scheduling is synchronous: under overlap a request that has ended may ride
in one more step.
"""

from __future__ import annotations

import gzip
import json
import os
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from rich.console import Console
from rich.progress import track

from tetris_sglang.config import find_settings
from tetris_sglang.tools.bench.results import describe_commit
from tetris_sglang.tools.bench.workloads import MAX_CHARS
from tetris_sglang.tools.load import generate
from tetris_sglang.tools.prompts import (
    RESULTS,
    Prompt,
    read_human_eval,
    read_questions,
    read_sharegpt,
    render_chats,
)
from tetris_sglang.tools.real_model import HEAD, ensure_target
from tetris_sglang.tools.server_process import ServerProcess
from tetris_sglang.trace import read_trace

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "benchmarks/traces"
TRAINED = ROOT / "build/drafts"
"""Where scripts/train_drafts.sh puts them."""


class Recording(NamedTuple):
    """One server."""

    draft: Path | None = HEAD
    """None: n-grams."""
    num_steps: int = 6
    temperature: float = 0.0
    num_runners_up: int = 0
    """Beside each token of a chain."""
    acceptance: str = "coupled"
    capacity_per_request: float | None = None
    """None: every node is verified."""

    @property
    def num_nodes(self) -> int:
        return self.num_steps * (1 + self.num_runners_up)


RECORDINGS = {
    "eagle3": Recording(),
    "eagle3_comb": Recording(num_runners_up=1),
    "eagle3_sampled": Recording(temperature=1.0),
    "eagle3_comb_sampled": Recording(num_runners_up=1, temperature=1.0),
    "ngram": Recording(draft=None),
    "standalone": Recording(draft=TRAINED / "pruned"),
    "dflash": Recording(draft=TRAINED / "dflash", num_steps=5),
}


def mixed_prompts(count: int) -> list[Prompt]:
    """ShareGPT (of the split for results), HumanEval and the project's questions in turn; `count` of them at most."""
    kinds = [read_sharegpt(RESULTS), read_human_eval(), read_questions()]
    short = [[prompt for prompt in kind if len(prompt.text) <= MAX_CHARS] for kind in kinds]
    return [prompt for in_turn in zip(*short, strict=False) for prompt in in_turn][:count]


def main(
    names: Annotated[str, typer.Option(help="which ones")] = ",".join(RECORDINGS),
    out: Annotated[Path, typer.Option(help="folder to write to")] = OUT,
    new_tokens: Annotated[int, typer.Option(min=1, help="tokens written per prompt, at most")] = 128,
    count: Annotated[int, typer.Option("--prompts", min=1, help="prompts answered")] = 32,
    concurrency: Annotated[int, typer.Option(min=1, help="running requests")] = 8,
    seed: Annotated[int, typer.Option(help="of sampling")] = 0,
) -> None:
    chosen = names.split(",")
    if unknown := set(chosen) - RECORDINGS.keys():
        raise typer.BadParameter(f"{', '.join(sorted(unknown))}; known: {', '.join(RECORDINGS)}")
    drafts = {draft for name in chosen if (draft := RECORDINGS[name].draft)}
    if missing := [draft.name for draft in sorted(drafts) if not draft.exists()]:
        raise typer.BadParameter(f"these drafts are missing; scripts/train_drafts.sh makes them: {', '.join(missing)}")
    out.mkdir(parents=True, exist_ok=True)
    texts = [prompt.text for prompt in mixed_prompts(count)]
    console = Console()
    for name in track(chosen, description="recording", console=console):
        path = out / f"{name}.trace.gz"
        with tempfile.TemporaryDirectory() as folder:
            recorded = Path(folder) / "recorded"
            record(RECORDINGS[name], recorded, texts, new_tokens, concurrency, seed)
            described = {
                "model": ensure_target().name,
                "prompts": len(texts),
                "new_tokens": new_tokens,
                "concurrency": concurrency,
                "temperature": RECORDINGS[name].temperature,
                "seed": seed,
                "commit": describe_commit(),
                "date": datetime.now(UTC).isoformat(timespec="seconds"),
            }
            compress(recorded, path, described)
        trace = read_trace(path)
        console.print(
            f"{name}: {len(set(trace.steps.tolist()))} steps, {len(trace.steps)} rows, "
            f"{trace.accepted.sum() / len(trace.steps):.2f} of {RECORDINGS[name].num_nodes} accepted, "
            f"{path.stat().st_size} bytes"
        )


def record(
    recording: Recording,
    path: Path,
    texts: Sequence[str],
    new_tokens: int,
    concurrency: int,
    seed: int,
) -> None:
    """Answer all questions once; one at a time, requests are numbered as the questions are."""
    target = ensure_target()
    draft = ["--speculative-draft-model-path", str(recording.draft)] if recording.draft else []
    arguments = [
        "--model-path", str(target), "--dtype", "float32", "--random-seed", str(seed), "--max-running-requests",
        str(concurrency), "--disable-overlap-schedule", "--speculative-algorithm", "TETRIS", *draft,
        "--speculative-num-steps", str(recording.num_steps), "--speculative-num-draft-tokens", str(recording.num_nodes + 1),
        "--speculative-tetris-capacity-per-request", str(recording.capacity_per_request or recording.num_nodes),
        "--speculative-tetris-acceptance", recording.acceptance, "--speculative-tetris-record", str(path),
    ]  # fmt: skip
    # Settings in the environment are for other servers.
    for name in find_settings():
        del os.environ[name]
    with ServerProcess(arguments, path.with_suffix(".log")) as server:
        generate(
            server.url,
            render_chats(target, texts),
            concurrency=concurrency,
            max_new_tokens=new_tokens,
            temperature=recording.temperature,
            ignore_eos=False,
        )


def compress(recorded: Path, path: Path, described: dict) -> None:
    """Add to what the trace says about itself, and pack it; the same trace gives the same bytes."""
    header, _, rows = recorded.read_bytes().partition(b"\n")
    line = json.dumps(json.loads(header) | described).encode() + b"\n"
    path.write_bytes(gzip.compress(line + rows, mtime=0))


if __name__ == "__main__":
    typer.run(main)
