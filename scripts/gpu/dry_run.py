"""The CUDA path of real servers on a machine without a GPU: `make gpu-dry-run`.

A no-op CUDA (noop_cuda/) looks like one H100: memory and copies work, kernels do nothing, captured graphs are empty. torch's
own operators are computed on the host (noop_cuda/noop_plugin.py), so lengths, indices and plans are real ones.

Shown: imports, start-up, memory planning, shapes, FlashInfer's plans on the host, CUDA graph capture for every size, replay,
compilation for sm_90a by the real nvcc and Triton, decoding without a crash, shutdown.
Not shown: what FlashInfer's, sgl_kernel's and Triton's kernels compute (so neither text nor acceptance means anything),
torch.compile, streams that run side by side, speed, memory that graphs take.

Needs g++ and, for what FlashInfer and SGLang compile, nvcc and ninja; the first run compiles for minutes.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

REPOSITORY = Path(__file__).resolve().parents[2]
HERE = REPOSITORY / "scripts" / "gpu"
NOOP = HERE / "noop_cuda"
sys.path[:0] = [str(REPOSITORY), str(HERE), str(NOOP)]

from noop_plugin import BAD_INDEX
from precompile import jit_environment

from tetris_sglang.tools.load import generate
from tetris_sglang.tools.server_process import ServerFailed, ServerProcess

PAIR = REPOSITORY / "tests" / "pair"
BUILD = REPOSITORY / "build"
BATCH_SIZES = (1, 2, 4, 8)
NUM_STEPS = 4
START_TIMEOUT_S = 1800.0  # nvcc on few cores

COMMON = [
    *("--model-path", str(PAIR / "target"), "--dtype", "bfloat16", "--device", "cuda"),
    *("--attention-backend", "flashinfer", "--sampling-backend", "flashinfer"),
    *("--max-running-requests", str(max(BATCH_SIZES)), "--max-total-tokens", "8192"),
    *("--cuda-graph-bs-decode", *map(str, BATCH_SIZES), "--disable-prefill-cuda-graph"),
    *("--mem-fraction-static", "0.5", "--sleep-on-idle", "--random-seed", "7"),
    *("--watchdog-timeout", "3600"),  # the first prefill compiles for minutes
]
DRAFT = [
    *("--speculative-draft-model-path", str(PAIR / "draft")),
    *("--speculative-num-steps", str(NUM_STEPS)),
]
ARMS = {
    "none": COMMON,
    "standalone": [
        *COMMON, *DRAFT, "--speculative-algorithm", "STANDALONE",
        "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", str(NUM_STEPS + 1),
    ],
    "tetris": [
        *COMMON, *DRAFT, "--speculative-algorithm", "TETRIS", "--speculative-tetris-capacity-per-request", "2",
        "--speculative-tetris-phase-times", "true",
    ],
    "auto": [*COMMON, *DRAFT, "--speculative-algorithm", "TETRIS"],
    "tree": [
        *COMMON, *DRAFT, "--speculative-algorithm", "TETRIS", "--speculative-tetris-capacity-per-request", "3",
        "--speculative-eagle-topk", "2",
    ],
    "eagle3": [
        *COMMON, "--speculative-draft-model-path", str(PAIR / "eagle3"), "--speculative-num-steps", str(NUM_STEPS),
        "--speculative-algorithm", "TETRIS", "--speculative-tetris-capacity-per-request", "3",
        "--speculative-eagle-topk", "2",
    ],
    "ngram": [
        *COMMON, "--speculative-algorithm", "TETRIS", "--speculative-num-steps", str(NUM_STEPS),
        "--speculative-tetris-capacity-per-request", "2",
    ],
}  # fmt: skip


def build_noop_cuda(out: Path) -> None:
    """Compile the no-op libraries when their sources changed, and describe the plugin to SGLang."""
    sources = [NOOP / name for name in ("build.sh", "runtime.cpp", "driver.cpp", "cublas.cpp")]
    built = out / "libcublasLt.so.13"
    if not built.exists() or any(source.stat().st_mtime > built.stat().st_mtime for source in sources):
        site_packages = Path(next(iter(find_spec("nvidia").submodule_search_locations))).parent
        subprocess.run([NOOP / "build.sh", site_packages, out], check=True)
    described = out / "noop_cuda-0.dist-info"
    described.mkdir(parents=True, exist_ok=True)
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: noop-cuda\nVersion: 0\n")
    (described / "entry_points.txt").write_text("[sglang.srt.plugins]\nnoop = noop_plugin:load\n")


def noop_environment(folder: Path, jit: Path) -> dict[str, str]:
    """Variables under which a process sees the no-op GPU."""
    libraries = ("libcuda.so.1", "libcudart.so.13", "libcublasLt.so.13", "libcublas.so.13")

    def first(name: str, *paths: Path) -> str:
        return os.pathsep.join([*map(str, paths), *filter(None, [os.environ.get(name)])])

    return {
        **jit_environment(jit),
        "LD_PRELOAD": " ".join(str(folder / library) for library in libraries),
        "LD_LIBRARY_PATH": first("LD_LIBRARY_PATH", folder),
        "LIBRARY_PATH": first("LIBRARY_PATH", folder),
        "TRITON_LIBCUDA_PATH": str(folder),
        "PYTHONPATH": first("PYTHONPATH", folder, NOOP),
        "NOOP_CUDA": "1",
        # CuTe DSL kernels look deeper into the driver than a no-op goes; a bundle has none either.
        "FLASHINFER_USE_CUDA_NORM": "1",
        # As on the host (install_bundle.sh): FlashInfer's other prefill kernels would be compiled for minutes.
        "SGLANG_FLASHINFER_USE_PAGED": "1",
        # Compiled functions would do nothing, too.
        "TORCH_COMPILE_DISABLE": "1",
    }


def run_arm(name: str, folder: Path, environment: Mapping[str, str]) -> dict[str, object]:
    """Start a server, let it decode batches of every captured size and between, stop it; what was seen."""
    prompts = [json.loads(line)["text"] for line in (PAIR / "prompts.jsonl").read_text().splitlines()[:16]]
    log = folder / f"{name}.log"
    server = ServerProcess(ARMS[name], log, environment=environment, start_timeout_s=START_TIMEOUT_S)
    seen: dict[str, object] = {"arm": name, "error": None}
    started_at = time.monotonic()
    try:
        with server:
            seen["start_s"] = round(server.start_seconds, 1)
            # Without top-k, top-p and min-p: what FlashInfer's sampler draws is used as an index, and is nothing here.
            for temperature, concurrency in itertools.product((0, 1), (1, 3, 8)):
                generate(server.url, prompts, concurrency=concurrency, max_new_tokens=12, temperature=temperature)
            seen["decoded"] = True
    except (ServerFailed, OSError) as error:
        seen["error"] = last_error(str(error)) or last_error(log.read_text(errors="replace")) or str(error)
    text = log.read_text(errors="replace")
    seen["graphs"] = re.findall(r"Capture ([\w ]+?) CUDA graph end", text)
    seen["tracebacks"] = text.count("Traceback (most recent call last)")
    # STANDALONE's own kernels choose its drafts, and do nothing here.
    seen["bad_indices"] = 0 if name == "standalone" else text.count(BAD_INDEX)
    if seen["bad_indices"]:
        seen["error"] = seen["error"] or f"{seen['bad_indices']} times {BAD_INDEX} (see the log)"
    seen["seconds"] = round(time.monotonic() - started_at, 1)
    return seen


def last_error(text: str) -> str | None:
    """The last line of a log that names an exception."""
    found = re.findall(r"^(?:.*\s)?((?:\w+\.)*\w*(?:Error|Exception)\b: .*)$", text, re.MULTILINE)
    return found[-1] if found else None


def run_check(folder: Path, environment: Mapping[str, str]) -> dict[str, object]:
    """The stages of check.py that need no server. Wrong values are expected of them here, exceptions are not."""
    out = folder / "check"
    shutil.rmtree(out, ignore_errors=True)
    command = [sys.executable, str(HERE / "check.py"), "--stages", "a,c", "--out", str(out)]
    started_at = time.monotonic()
    with (folder / "check.log").open("w") as log:
        subprocess.run(command, check=False, env={**os.environ, **environment}, stdout=log, stderr=subprocess.STDOUT)
    stages = {path.stem: json.loads(path.read_text()) for path in sorted(out.glob("*.json"))}
    crashed = [
        f"{name}: {error}"
        for name, stage in stages.items()
        for error in [*stage.get("exceptions", []), *filter(None, [stage.get("error")])]
    ]
    return {
        "arm": "check",
        "error": "; ".join(crashed) or (None if stages else "no stage ran: see check.log"),
        "decoded": None,
        "graphs": [],
        "tracebacks": 0,
        "seconds": round(time.monotonic() - started_at, 1),
    }


def main(
    arms: Annotated[str, typer.Option(help=f"Of {', '.join(ARMS)} and check (its stages a and c).")] = ",".join(
        [*ARMS, "check"]
    ),
    out: Annotated[Path, typer.Option(help="Logs and a summary.")] = BUILD / "gpu-dry-run",
    jit: Annotated[Path, typer.Option(help="What FlashInfer and SGLang compile.")] = BUILD / "gpu-jit",
) -> None:
    """Run the CUDA path of real servers on a machine without a GPU."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # leaves `with` blocks, and so ends the server
    console = Console(width=None if sys.stdout.isatty() else 160)
    chosen = arms.split(",")
    if unknown := set(chosen) - {*ARMS, "check"}:
        raise typer.BadParameter(f"no such arm: {', '.join(sorted(unknown))}", param_hint="--arms")
    out.mkdir(parents=True, exist_ok=True)
    build_noop_cuda(BUILD / "noop-cuda")
    environment = noop_environment(BUILD / "noop-cuda", jit.resolve())
    seen = []
    for name in chosen:
        console.print(f"{name}: {out / f'{name}.log'}", highlight=False, soft_wrap=True)
        seen.append(run_check(out, environment) if name == "check" else run_arm(name, out, environment))
        (out / "summary.json").write_text(json.dumps(seen, indent=1) + "\n")
    table = Table(title="On the no-op CUDA", title_justify="left", box=None, pad_edge=False)
    for column in ("arm", "came up", "graphs captured", "decoded", "tracebacks", "error"):
        table.add_column(column, overflow="fold")
    for row in seen:
        came_up = f"{row['start_s']} s" if "start_s" in row else ""
        decoded = "yes" if row.get("decoded") else ""
        table.add_row(row["arm"], came_up, ", ".join(row["graphs"]), decoded, str(row["tracebacks"]), row["error"] or "")
    console.print(table)
    console.print("Kernels did nothing here: text, acceptance and speed mean nothing (see docs/gpu.md).")
    raise typer.Exit(any(row["error"] or row["tracebacks"] for row in seen))


if __name__ == "__main__":
    typer.run(main)
