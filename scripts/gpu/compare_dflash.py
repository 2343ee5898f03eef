"""SGLang's own DFLASH beside TETRIS with the same draft, on real prompts: drafts accepted, by servers on the computing CUDA.

    python scripts/gpu/compare_dflash.py     # half an hour on one core; wants build/drafts/dflash (scripts/train_drafts.sh)

SGLang's DFLASH wants a GPU and bfloat16. Times mean nothing here.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from cases import DRAWN, TIMEOUT_S
from dry_arms import REPOSITORY, TETRIS, serve
from host_cuda.environment import build, environment

from tetris_sglang.tools.load import count_drafts
from tetris_sglang.tools.prompts import RESULTS, read_sharegpt, render_chats
from tetris_sglang.tools.real_model import ensure_target
from tetris_sglang.tools.server_process import ServerProcess

BUILD = REPOSITORY / "build"
NUM_DRAFTS, MAX_CHARS, NUM_IN_FLIGHT = 5, 600, 4
BLOCK = [*TETRIS[:2], "--speculative-num-steps", str(NUM_DRAFTS), "--speculative-tetris-capacity-per-request", str(NUM_DRAFTS)]
ARMS = {"SGLang's DFLASH": ["--speculative-algorithm", "DFLASH"], "TETRIS, the whole block": BLOCK}


def main(
    draft: Annotated[Path, typer.Option(help="Of the real model.")] = BUILD / "drafts" / "dflash",
    prompts: Annotated[int, typer.Option(min=1, help="Of ShareGPT's.")] = 6,
    new_tokens: Annotated[int, typer.Option(min=1, help="Per prompt.")] = 20,
) -> None:
    """Count what is accepted at temperature 0 and 1."""
    build(BUILD / "host-cuda")
    target = ensure_target()
    texts = render_chats(target, [prompt.text for prompt in read_sharegpt(RESULTS) if len(prompt.text) <= MAX_CHARS][:prompts])
    for name, flags in ARMS.items():
        command = [*serve(target), *flags, "--speculative-draft-model-path", str(draft)]
        log = BUILD / "compare-dflash" / f"{flags[1]}.log"
        with ServerProcess(command, log, environment=environment(BUILD / "host-cuda"), start_timeout_s=TIMEOUT_S) as server:
            for temperature in (0, 1):
                sampling = {"temperature": temperature, "max_new_tokens": new_tokens}
                answers = replace(DRAWN, load=NUM_IN_FLIGHT, sampling=sampling).ask(server.url, texts)
                counts = count_drafts(answer.meta_info for answer in answers)
                rate = counts.accepted / counts.verify_steps
                print(f"{name}, temperature {temperature}: {rate:.2f} of {NUM_DRAFTS}, {counts.verify_steps} steps", flush=True)


if __name__ == "__main__":
    typer.run(main)
