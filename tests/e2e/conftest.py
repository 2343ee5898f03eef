"""Shared real servers. Each costs tens of seconds to start, so all tests here use a few of them; other folders' tests, which
follow in the same process, need the memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from tests.e2e.client import Client, Reference
from tests.e2e.plugins import SWITCHING_PLANS, UNLIKE_RANKS, write_plugin
from tests.other_vocabulary import make_other_vocabulary
from tetris_sglang.portable_cpu.defaults import OVERLAP_VARIABLE
from tetris_sglang.tools.server_process import ServerProcess, start_all

REPOSITORY = Path(__file__).parents[2]
sys.path.insert(0, str(REPOSITORY / "scripts"))

import forked_server
from mtp_checkpoint import make_mtp_checkpoint

# A path of few characters, as sockets want it.
FORK_SERVER = Path(tempfile.gettempdir(), f"tetris-forks-{os.getpid()}")
FORKED = (*forked_server.COMMAND, forked_server.FROM, str(FORK_SERVER))

PAIR = REPOSITORY / "tests" / "pair"
TARGET, DRAFT = PAIR / "target", PAIR / "draft"
NUM_STEPS = 5
MTP_CHECKPOINT = "MTP_CHECKPOINT"
TOKEN_MAP = "TOKEN_MAP"
OTHER_VOCABULARY = "OTHER_VOCABULARY"
"""These stand for files that are made when a server needs them."""

COMMON = [
    "--model-path", str(TARGET), "--dtype", "float32", "--random-seed", "7", "--sleep-on-idle", "--enable-metrics",
    "--max-running-requests", "16", "--enable-cache-report",
]  # fmt: skip
# As most servers are started: SGLang chooses a seed.
UNSEEDED = [argument for argument in COMMON if argument not in ("--random-seed", "7")]
TETRIS = ["--speculative-algorithm", "TETRIS", "--speculative-num-steps", str(NUM_STEPS)]
# A tiny pool and short chunks force retraction, resumption and chunked prefill.
CRAMPED = [
    "--max-total-tokens", "2048", "--chunked-prefill-size", "64", "--schedule-conservativeness", "0.1",
]  # fmt: skip

ARGUMENTS = {
    # Without overlap scheduling: with it SGLang's own penalties lag by a token (patches/README.md).
    "plain": [*COMMON, "--disable-overlap-schedule"],
    # Overlap scheduling, an average capacity of half the drafts: the ordinary case.
    "overlap": [
        *COMMON, *TETRIS, "--speculative-draft-model-path", str(DRAFT),
        "--speculative-tetris-capacity-per-request", "2.5", "--speculative-tetris-phase-times", "true",
    ],
    # Synchronous scheduling, pages, an absolute capacity below the batch size: most requests get 0 drafts in most steps. The
    # draft's tokens are not the target's.
    "synchronous": [
        *COMMON, *TETRIS, "--speculative-draft-model-path", OTHER_VOCABULARY, "--disable-overlap-schedule",
        "--speculative-tetris-capacity-tokens", "10", "--page-size", "16", "--speculative-num-draft-tokens", "8",
    ],
    # The draft is the target, so every draft of it must be accepted: a stale, shifted or missing draft KV entry shows
    # as a rejection.
    "perfect": [
        *COMMON, *TETRIS, *CRAMPED, "--speculative-draft-model-path", str(TARGET),
        "--speculative-tetris-capacity-per-request", str(NUM_STEPS),
    ],
    # The same with runners-up, all of which are verified; none of them is ever right.
    "perfect_comb": [
        *COMMON, *TETRIS, *CRAMPED, "--speculative-draft-model-path", str(TARGET),
        "--speculative-num-draft-tokens", "11", "--speculative-tetris-capacity-per-request", "10",
    ],
    # What users get without further flags.
    "auto": [*COMMON, *TETRIS, "--speculative-draft-model-path", str(DRAFT)],
    # Plain steps in between, after which the draft's KV of what they emitted is caught up on.
    "perfect_switching": [
        *COMMON, *TETRIS, *CRAMPED, "--speculative-draft-model-path", str(TARGET),
        "--speculative-num-draft-tokens", str(NUM_STEPS + 1),
    ],
    "comb": [
        *COMMON, *TETRIS, "--speculative-draft-model-path", str(DRAFT),
        "--speculative-num-draft-tokens", "13", "--speculative-tetris-capacity-per-request", "4",
    ],
    # Alone, a text of four sampled tokens repeats nothing; other requests' do.
    "ngram": [
        *COMMON, *TETRIS, *CRAMPED, "--speculative-tetris-capacity-per-request", "3",
        "--speculative-tetris-shared-texts", "on",
    ],
    "eagle": [
        *COMMON, *TETRIS, *CRAMPED, "--speculative-draft-model-path", str(PAIR / "eagle"),
        "--speculative-tetris-capacity-per-request", "2.5", "--speculative-token-map", TOKEN_MAP,
        "--speculative-num-draft-tokens", "16",
    ],
    "eagle3": [
        *COMMON, *TETRIS, *CRAMPED, "--speculative-draft-model-path", str(PAIR / "eagle3"),
        "--speculative-num-draft-tokens", "13", "--disable-overlap-schedule",
    ],
    # Two ranks that disagree about everything that ranks may disagree about, and make random plans.
    "parallel": [
        *UNSEEDED, *TETRIS, "--speculative-draft-model-path", str(DRAFT), "--tp-size", "2",
    ],
    "parallel_comb": [
        *UNSEEDED, *TETRIS, *CRAMPED, "--speculative-draft-model-path", str(PAIR / "eagle3"),
        "--speculative-num-draft-tokens", "13", "--speculative-tetris-capacity-per-request", "4", "--tp-size", "2",
    ],
    # After plain steps the target's states become keys and values of the draft, on both ranks.
    "parallel_dflash": [
        *UNSEEDED, *TETRIS, *CRAMPED, "--speculative-draft-model-path", str(PAIR / "dflash"),
        "--speculative-num-draft-tokens", "13", "--tp-size", "2",
    ],
    # Trees from one pass.
    "dflash": [
        *COMMON, *TETRIS, *CRAMPED, "--speculative-draft-model-path", str(PAIR / "dflash"),
        "--speculative-num-draft-tokens", "13", "--speculative-tetris-capacity-per-request", "4",
    ],
    "mtp": [
        "--model-path", MTP_CHECKPOINT, *COMMON[2:], *TETRIS, *CRAMPED,
    ],
    # Drafts from the draft's own law: a head of a shortened vocabulary with runners-up, and whole chains.
    "rejection": [
        *COMMON, *TETRIS, "--speculative-draft-model-path", str(PAIR / "eagle3"), "--speculative-num-draft-tokens", "11",
        "--speculative-tetris-acceptance", "rejection", "--speculative-tetris-capacity-per-request", "4",
    ],
    "block": [
        *COMMON, *TETRIS, "--speculative-draft-model-path", str(DRAFT), "--speculative-tetris-acceptance", "block",
        "--speculative-tetris-capacity-per-request", "3",
    ],
}  # fmt: skip
AS_USERS_HAVE_THEM = ("auto",)
SWITCHING = ("perfect_switching", "eagle3", "mtp", "parallel", "parallel_dflash")
"""Those with plugins.SWITCHING_PLANS."""
PARALLEL = ("parallel", "parallel_comb", "parallel_dflash")
"""Those with plugins.UNLIKE_RANKS."""
# Kept to the end, because other tests than those of one fixture use them.
SHARED = ("plain", "overlap", "auto")
ROOMY = ("overlap", "synchronous", "comb")
"""Those without `CRAMPED`: the `perfect` ones stand for them."""
TETRIS_SERVERS = ("overlap", "synchronous", "comb", "ngram", "eagle", "eagle3", "dflash", "mtp")
"""Those of the fixture `tetris`."""
RECORDING = (*TETRIS_SERVERS, "perfect", "perfect_switching")
FEATURED = ("overlap", "comb", "ngram", "eagle3")
"""Chains and combs, with a model, a head and neither, with overlap scheduling and without."""
# Of the drafts verified; a draft that is fed the wrong tokens, positions or states gets nearly none accepted.
MIN_SUCCESS = {
    "overlap": 0.5, "synchronous": 0.5, "comb": 0.3, "ngram": 0.08, "eagle": 0.35, "eagle3": 0.15,
    "dflash": 0.2, "mtp": 0.35, "parallel": 0.3, "parallel_comb": 0.3, "parallel_dflash": 0.1,
}  # fmt: skip


class Servers:
    """Starts the servers asked for, at most two at a time, and keeps them."""

    def __init__(self, log_folder: Path) -> None:
        self._log_folder = log_folder
        self._processes: dict[str, ServerProcess] = {}

    def get(self, *names: str) -> list[Client]:
        wanted = {name: self._make(name) for name in names if name not in self._processes}
        # Known before they start: one that fails leaves none of the others behind.
        self._processes |= wanted
        for failure in start_all(list(wanted.values()), lambda server: None):
            if failure is not None:
                raise failure
        return [Client(self._processes[name].url, self._processes[name].log_path) for name in names]

    def stop_one(self, name: str) -> None:
        if name in self._processes and name not in SHARED:
            self._processes.pop(name).stop()

    def trace_path(self, name: str) -> Path:
        """What a server of RECORDING records of its steps."""
        return self._log_folder / f"{name}.trace"

    def text_path(self, name: str) -> Path:
        """And of its requests."""
        return self._log_folder / f"{name}.jsonl"

    def _make(self, name: str) -> ServerProcess:
        made = {
            MTP_CHECKPOINT: lambda: self._mtp_checkpoint,
            TOKEN_MAP: lambda: self._token_map,
            OTHER_VOCABULARY: lambda: self._other_vocabulary,
        }
        arguments = [str(made[argument]()) if argument in made else argument for argument in ARGUMENTS[name]]
        if name in RECORDING:
            arguments += ["--speculative-tetris-record", str(self.trace_path(name))]
            arguments += ["--speculative-tetris-record-text", str(self.text_path(name))]
        environment, options = {"SGLANG_TETRIS_CACHE": str(self._log_folder)}, {}
        if name not in AS_USERS_HAVE_THEM:
            options["entry_point"] = FORKED
            environment |= {OVERLAP_VARIABLE: "1"}  # what a GPU serves with by default
        plugins = self._log_folder / "plugins"
        if name in SWITCHING:
            environment |= write_plugin(plugins / "switching", "switching_plans", SWITCHING_PLANS)
        if name in PARALLEL:
            unlike = write_plugin(plugins / "unlike", "unlike_ranks", UNLIKE_RANKS)
            folders = [each["PYTHONPATH"] for each in (environment, unlike) if "PYTHONPATH" in each]
            environment["PYTHONPATH"] = os.pathsep.join(folders)
            # SGLang wants to know where ranks run that share a NUMA node. Its own CPU build alone would bind them.
            environment["SGLANG_CPU_OMP_THREADS_BIND"] = "0|0"
        log_path = self._log_folder / f"{name}.log"
        return ServerProcess(arguments, log_path, environment=environment, start_timeout_s=400, **options)

    @cached_property
    def _mtp_checkpoint(self) -> Path:
        """The target's own weights as another architecture, with a prediction layer in it."""
        folder = self._log_folder / "mtp_checkpoint"
        if not folder.exists():
            make_mtp_checkpoint(TARGET, PAIR / "mtp", folder)
        return folder

    @cached_property
    def _other_vocabulary(self) -> Path:
        folder = self._log_folder / "other_vocabulary"
        return folder if folder.exists() else make_other_vocabulary(DRAFT, folder)

    @cached_property
    def _token_map(self) -> Path:
        """The frequent tokens: those that the EAGLE3 head can draft."""
        with safe_open(PAIR / "eagle3" / "model.safetensors", "pt") as opened:
            differences = opened.get_tensor("d2t")
        path = self._log_folder / "token_map.pt"
        torch.save(differences + torch.arange(len(differences)), path)
        return path

    def stop(self) -> None:
        for process in self._processes.values():
            process.stop()


@pytest.fixture(scope="package", autouse=True)
def fork_server(tmp_path_factory) -> Iterator[None]:
    """What `FORKED` servers are forks of. Two processes run tests, with servers each: threads would wait for each other."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    log_path = tmp_path_factory.mktemp("fork_server") / "log"
    with log_path.open("w") as log:
        command = [*forked_server.COMMAND, forked_server.LISTEN, str(FORK_SERVER)]
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
    try:
        yield
    finally:
        process.terminate(), process.wait()
        FORK_SERVER.unlink(missing_ok=True)


@pytest.fixture(scope="package")
def servers(tmp_path_factory):
    folder = Path(os.environ.get("TETRIS_TEST_LOGS") or tmp_path_factory.mktemp("servers"))
    servers = Servers(folder)
    try:
        yield servers
    finally:
        servers.stop()


@pytest.fixture(scope="package")
def plain(servers) -> Client:
    server = servers.get("plain")[0]
    return Reference(server.url, server.log_path)


@pytest.fixture(scope="package", params=TETRIS_SERVERS)
def tetris(servers, request):
    """The ordinary TETRIS server, with and without overlap scheduling, and one for every kind of draft."""
    yield servers.get(request.param)[0]
    servers.stop_one(request.param)


@pytest.fixture
def featured(tetris, request) -> Client:
    """`tetris`, for what does not depend on more than `FEATURED` tells apart."""
    if request.node.callspec.params["tetris"] not in FEATURED:
        pytest.skip(f"{', '.join(FEATURED)} have every part of this server; its output is compared elsewhere")
    return tetris


@pytest.fixture(scope="package")
def overlap(servers) -> Client:
    return servers.get("overlap")[0]


@pytest.fixture(scope="package")
def auto(servers) -> Client:
    return servers.get("auto")[0]


@pytest.fixture(scope="module", params=["perfect", "perfect_comb", "perfect_switching"])
def perfect(servers, request):
    yield servers.get(request.param)[0]
    servers.stop_one(request.param)


@pytest.fixture(scope="session")
def prompts() -> list[dict]:
    """Held-out prompts of every kind, none trained on."""
    return [json.loads(line) for line in (PAIR / "prompts.jsonl").read_text().splitlines()]


@pytest.fixture(scope="session")
def mixed_prompts(prompts) -> list[str]:
    """64 prompts, kinds and lengths interleaved (the file lists each kind from short to long)."""
    by_kind: dict[str, list[str]] = {}
    for prompt in prompts:
        by_kind.setdefault(prompt["kind"], []).append(prompt["text"])
    spread = [group[:: len(group) // 16][:16] for group in by_kind.values()]
    mixed = [text for group in zip(*spread, strict=True) for text in group]
    # Short and long ones in flight together: 37 and 64 share no factor.
    return [mixed[37 * i % 64] for i in range(64)]
