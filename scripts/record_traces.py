#!/usr/bin/env python
"""Record what real servers draft, verify and accept on the shipped pair, for `tetris-sglang replay`.

    python scripts/record_traces.py                       # all; writes benchmarks/traces/NAME.trace.gz
    python scripts/record_traces.py --names eagle,ngram

Every draft is verified, so that what the target says about each is known. Calibration is on and starts from nothing: a
trace's calibrated survivals are those that the server had at that moment, and it learns from every draft, which is more
than a server sees that verifies a few of them. Scheduling is synchronous: under overlap a request that has ended may ride
in one more step.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from mtp_checkpoint import make_mtp_checkpoint
from rich.console import Console
from rich.progress import track

from tetris_sglang.config import find_settings
from tetris_sglang.load import Completion, generate
from tetris_sglang.server_process import ServerProcess
from tetris_sglang.trace import read_trace

ROOT = Path(__file__).resolve().parent.parent
PAIR = ROOT / "tests/pair"
OUT = ROOT / "benchmarks/traces"
MTP = "mtp"


class Recording(NamedTuple):
    """One server."""

    draft: str | None
    """A folder of the pair; None: no model."""
    num_steps: int = 6
    topk: int = 1
    temperature: float = 0.0
    num_continued: int = 0
    """Tokens with which chains go on from the request's own text."""
    calibration: bool = True
    """Off: the draft's own tokens and probabilities, as SGLang's speculation has them."""

    @property
    def num_nodes(self) -> int:
        return self.num_steps * self.topk + self.num_continued


RECORDINGS = {
    "standalone": Recording("draft"),
    "standalone_continued": Recording("draft", num_continued=6),
    "standalone_tree": Recording("draft", num_steps=5, topk=3),
    "standalone_sampled": Recording("draft", temperature=1.0),
    "eagle": Recording("eagle"),
    "eagle3": Recording("eagle3"),
    "mtp": Recording(MTP),
    "ngram": Recording(None),
}


def main(
    names: Annotated[str, typer.Option(help="which ones")] = ",".join(RECORDINGS),
    out: Annotated[Path, typer.Option(help="folder to write to")] = OUT,
    new_tokens: Annotated[int, typer.Option(min=1, help="tokens written per prompt")] = 96,
    concurrency: Annotated[int, typer.Option(min=1, help="running requests")] = 16,
    seed: Annotated[int, typer.Option(help="of the order of prompts, and of sampling")] = 0,
) -> None:
    chosen = names.split(",")
    if unknown := set(chosen) - RECORDINGS.keys():
        raise typer.BadParameter(f"{', '.join(sorted(unknown))}; known: {', '.join(RECORDINGS)}")
    out.mkdir(parents=True, exist_ok=True)
    prompts = [json.loads(line)["text"] for line in (PAIR / "prompts.jsonl").read_text().splitlines()]
    # The file lists them kind by kind.
    random.Random(seed).shuffle(prompts)
    console = Console()
    for name in track(chosen, description="recording", console=console):
        path = out / f"{name}.trace.gz"
        with tempfile.TemporaryDirectory() as folder:
            recorded = Path(folder) / "recorded"
            record(RECORDINGS[name], recorded, prompts, new_tokens, concurrency, seed)
            described = {
                "prompts": len(prompts),
                "new_tokens": new_tokens,
                "concurrency": concurrency,
                "temperature": RECORDINGS[name].temperature,
                "seed": seed,
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
    recording: Recording, path: Path, prompts: Sequence[str], new_tokens: int, concurrency: int, seed: int
) -> list[Completion]:
    """Serve all prompts once; one at a time, requests are numbered as the prompts are."""
    target, draft = PAIR / "target", []
    if recording.draft == MTP:
        target = path.parent / "mtp_checkpoint"
        make_mtp_checkpoint(PAIR / "target", PAIR / "mtp", target)
    elif recording.draft is not None:
        draft = ["--speculative-draft-model-path", str(PAIR / recording.draft)]
    arguments = [
        "--model-path", str(target), "--dtype", "float32", "--random-seed", str(seed), "--max-running-requests",
        str(concurrency), "--disable-overlap-schedule", "--speculative-algorithm", "TETRIS", *draft,
        "--speculative-num-steps", str(recording.num_steps), "--speculative-eagle-topk", str(recording.topk),
        "--speculative-tetris-capacity-per-request", str(recording.num_nodes), "--speculative-tetris-record", str(path),
        "--speculative-tetris-calibration", "true" if recording.calibration else "false",
    ]  # fmt: skip
    if recording.num_continued:
        arguments += ["--speculative-num-draft-tokens", str(recording.num_nodes + 1)]
    # Settings in the environment are for other servers.
    for name in find_settings():
        del os.environ[name]
    with ServerProcess(arguments, path.with_suffix(".log")) as server:
        completions, _ = generate(
            server.url,
            prompts,
            concurrency=concurrency,
            max_new_tokens=new_tokens,
            temperature=recording.temperature,
        )
    return completions


def compress(recorded: Path, path: Path, described: dict) -> None:
    """Add to what the trace says about itself, and pack it; the same trace gives the same bytes."""
    header, _, rows = recorded.read_bytes().partition(b"\n")
    line = json.dumps(json.loads(header) | described).encode() + b"\n"
    path.write_bytes(gzip.compress(line + rows, mtime=0))


if __name__ == "__main__":
    typer.run(main)
