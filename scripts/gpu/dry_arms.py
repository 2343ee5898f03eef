"""The servers of the dry run."""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cases import DRAWN, FILTERED_BY_UPSTREAM, GREEDY, LONG, OF_TETRIS, PLAIN, PREFIX_HITS, STANDARD, WANTED, Case

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "scripts")]

from mtp_checkpoint import make_mtp_checkpoint

from tests.e2e.plugins import SWITCHING_PLANS, UNLIKE_RANKS, write_plugin

PAIR = REPOSITORY / "tests" / "pair"
TARGET = PAIR / "target"
MTP_CHECKPOINT, TARGET_128 = "MTP_CHECKPOINT", "TARGET_128"
"""These stand for folders that are made when an arm needs them."""
BATCH_SIZES = (1, 2, 4)
NUM_STEPS = 4


@dataclass(frozen=True)
class Arm:
    """A server.

    Attributes:
        flags: of the server.
        cases: what it is asked.
        min_success: of the drafts verified for greedy requests, the share that has to be accepted.
        plugin: the body of a plugin that bends it.
        must_log: what its log has to say, for else nothing was tested.
        has_streams_checked: whether accesses of several streams are held against an order between them, which takes time.
        may_wait: whether a step may wait for the device: it plans on the host, or nothing overlaps.
        has_twin: whether the CPU platform with these flags must accept no more per step, one request at a time. Automatic
            capacity goes by measured times, which mean nothing here.
        max_launches: operators and kernels outside of graphs that a decode step may take.
    """

    flags: Sequence[str]
    cases: tuple[Case, ...] = STANDARD
    min_success: float = 0.0
    plugin: str = ""
    must_log: str = ""
    has_twin: bool = False
    has_streams_checked: bool = False
    may_wait: bool = False
    max_launches: float = math.inf


def serve(target: Path | str, attention: str = "flashinfer", pool: int = 4096) -> list[str]:
    return [
        *("--model-path", str(target), "--dtype", "bfloat16", "--device", "cuda"),
        *("--attention-backend", attention, "--sampling-backend", "flashinfer"),
        *("--max-running-requests", "8", "--max-total-tokens", str(pool)),
        *("--cuda-graph-bs-decode", *map(str, BATCH_SIZES), "--disable-prefill-cuda-graph"),
        *("--mem-fraction-static", "0.5", "--sleep-on-idle", "--random-seed", "7", "--watchdog-timeout", "3600"),
    ]


ON_GPU_ALONE = {
    "--device": 1, "--attention-backend": 1, "--sampling-backend": 1, "--cuda-graph-bs-decode": len(BATCH_SIZES),
    "--disable-prefill-cuda-graph": 0, "--mem-fraction-static": 1, "--speculative-tetris-verify-plan": 1,
}  # fmt: skip
"""Flags that the CPU platform does without, and how many values each has."""


def on_cpu(flags: Sequence[str]) -> list[str]:
    """The same server on the CPU platform."""
    left, kept = list(flags), []
    while left:
        flag = left.pop(0)
        if flag in ON_GPU_ALONE:
            del left[: ON_GPU_ALONE[flag]]
        else:
            kept.append(flag)
    return kept


COMMON = serve(TARGET)
TETRIS = ["--speculative-algorithm", "TETRIS", "--speculative-num-steps", str(NUM_STEPS)]


def _draft(name: str) -> list[str]:
    return ["--speculative-draft-model-path", str(PAIR / name)]


def _capacity(per_request: int) -> list[str]:
    return ["--speculative-tetris-capacity-per-request", str(per_request)]


def _upstream(algorithm: str, topk: int, num_tokens: int) -> list[str]:
    return [
        *("--speculative-algorithm", algorithm, "--speculative-num-steps", "3"),
        *("--speculative-eagle-topk", str(topk), "--speculative-num-draft-tokens", str(num_tokens)),
    ]


COMB = ["--speculative-num-draft-tokens", str(2 * NUM_STEPS + 1)]
FIXED = [*TETRIS, *_draft("draft"), *_capacity(2)]
PERFECT = [*TETRIS, *_draft("target"), *_capacity(NUM_STEPS), "--speculative-num-draft-tokens", str(NUM_STEPS + 1)]
CONTROLLED = (*STANDARD, FILTERED_BY_UPSTREAM)
ARMS: Mapping[str, Arm] = {
    "none": Arm(COMMON, (*STANDARD, *WANTED)),
    # Upstream's: if their text is wrong, this CUDA is.
    "STANDALONE": Arm([*COMMON, *_upstream("STANDALONE", 1, 4), *_draft("draft")], CONTROLLED, has_streams_checked=True),
    "EAGLE3": Arm([*COMMON, *_upstream("EAGLE3", 2, 6), *_draft("eagle3")], CONTROLLED),
    "NGRAM": Arm([*COMMON, "--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "4"], CONTROLLED),
    "DFLASH": Arm([*COMMON, "--speculative-algorithm", "DFLASH", *_draft("dflash")]),
    "fixed": Arm([*COMMON, *FIXED], (*STANDARD, *OF_TETRIS), has_twin=True),
    "host plan": Arm([*COMMON, *FIXED, "--speculative-tetris-verify-plan", "host"], has_twin=True, may_wait=True),
    "eager": Arm([*COMMON, *FIXED, "--speculative-tetris-verify-plan", "eager"], has_twin=True, may_wait=True),
    "no overlap": Arm([*COMMON, *FIXED, "--disable-overlap-schedule"], has_twin=True, may_wait=True),
    "auto": Arm([*COMMON, *TETRIS, *_draft("draft")], (*STANDARD, *OF_TETRIS), has_streams_checked=True),
    "plain": Arm([*COMMON, *TETRIS, *_draft("draft")], (PLAIN,)),
    "switching": Arm([*COMMON, *TETRIS, *_draft("draft")], plugin=SWITCHING_PLANS, has_streams_checked=True),
    "comb": Arm([*COMMON, *TETRIS, *_draft("draft"), *COMB, *_capacity(3)], (*STANDARD, *OF_TETRIS), has_twin=True),
    "eagle": Arm([*COMMON, *TETRIS, *_draft("eagle"), *_capacity(2)], has_twin=True),
    "eagle3": Arm(
        [*COMMON, *TETRIS, *_draft("eagle3"), *COMB, *_capacity(3)], (*STANDARD, *OF_TETRIS), has_twin=True,
        has_streams_checked=True, max_launches=44,
    ),
    "dflash": Arm(
        [*COMMON, *TETRIS, *_draft("dflash"), *COMB, *_capacity(3)], has_twin=True, has_streams_checked=True, may_wait=True
    ),
    "dflare": Arm([*COMMON, *TETRIS, *_draft("dflare"), *_capacity(2)], has_twin=True, may_wait=True),
    "mtp": Arm([*serve(MTP_CHECKPOINT), *TETRIS, *_capacity(2)], has_twin=True),
    "ngram": Arm([*COMMON, *TETRIS, *_capacity(2)], (*STANDARD, *OF_TETRIS), has_twin=True, has_streams_checked=True),
    # The draft is the target, and all it drafts is verified: a wrong, stale or missing entry of its cache shows as a rejection.
    "perfect": Arm(
        [*COMMON, *PERFECT, "--chunked-prefill-size", "16"], (*STANDARD, PREFIX_HITS), min_success=0.95,
        has_streams_checked=True,
    ),
    "small pool": Arm(
        [*serve(TARGET, pool=192), *PERFECT, "--schedule-conservativeness", "0.1"], (LONG,), min_success=0.9,
        must_log="Retract requests",
    ),
    # The second one's own plans, selections and draws are wrong.
    "two ranks": Arm(
        [*COMMON, *TETRIS, *_draft("draft"), *COMB, *_capacity(3), "--tp-size", "2"], (GREEDY[1], DRAWN),
        plugin=UNLIKE_RANKS, min_success=0.3, has_streams_checked=True,
    ),
    "heads of 128": Arm([*serve(TARGET_128), *FIXED], has_twin=True),
    "fa3": Arm([*serve(TARGET, "fa3"), *FIXED], has_twin=True),
}  # fmt: skip
QUICK = {name: replace(ARMS[name], cases=(GREEDY[1], DRAWN), has_twin=False) for name in ("eagle3",)}
"""For every change, in some minutes: a head's combs, graphs, plans and masks."""


def prepare(arm: Arm, folder: Path, plugins: Path) -> tuple[list[str], dict[str, str]]:
    """Make what an arm needs in `folder`, and its plugin in `plugins`. Returns its flags, and variables for its server."""
    makers: dict[str, Callable[[Path], None]] = {
        MTP_CHECKPOINT: lambda out: make_mtp_checkpoint(TARGET, PAIR / "mtp", out),
        TARGET_128: lambda out: widen_heads(TARGET, out),
    }
    flags = list(arm.flags)
    for number, flag in enumerate(flags):
        if flag in makers:
            flags[number] = str(folder / flag.lower())
            if not (folder / flag.lower()).exists():
                makers[flag](folder / flag.lower())
    variables = write_plugin(plugins, "bent_plans", arm.plugin) if arm.plugin else {}
    return flags, variables


def widen_heads(small: Path, out: Path) -> None:
    """The same function with heads of twice the size: zeros in between, queries larger by what the attention divides by.

    A head's pairs turn by theta^(-2 i / dim), so pair i of the small head is pair 2 i of the large one.
    """
    import json

    from safetensors.torch import load_file, save_file

    config = json.loads((small / "config.json").read_text())
    dim, weights = config["head_dim"], load_file(small / "model.safetensors")
    # Pair i of a head of 2 dim numbers holds i and i + dim.
    places = [2 * i for i in range(dim // 2)] + [dim + 2 * i for i in range(dim // 2)]

    def widen(weight, axis: int, factor: float = 1.0):
        heads = weight.shape[axis] // dim
        weight = weight.float().movedim(axis, 0)  # the root of 2 is no number of bfloat16
        wide = weight.new_zeros(heads, 2 * dim, *weight.shape[1:])
        wide[:, places] = weight.view(heads, dim, *weight.shape[1:]) * factor
        return wide.flatten(0, 1).movedim(0, axis).contiguous()

    for name, weight in weights.items():
        for kind, axis, factor in (("q_proj", 0, math.sqrt(2)), ("k_proj", 0, 1.0), ("v_proj", 0, 1.0), ("o_proj", 1, 1.0)):
            if f".{kind}." in name:
                weights[name] = widen(weight, axis, factor)
    shutil.copytree(small, out)
    (out / "config.json").write_text(json.dumps(config | {"head_dim": 2 * dim}, indent=1) + "\n")
    save_file(weights, out / "model.safetensors", {"format": "pt"})
