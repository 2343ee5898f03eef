"""Servers that must not start: each ends by itself, soon, with a message that names the flag, the value and the way out.

Every other bad value goes the same way and is tested in one process (tests/runtime/test_arguments.py).
"""

import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.e2e.conftest import DRAFT, FORKED, TARGET
from tetris_sglang.tools.server_process import ServerProcess

LOAD_TIMEOUT_S = 400  # of a busy machine; a server that starts instead of ending is found by its log
TETRIS = ["--model-path", str(TARGET), "--speculative-algorithm", "TETRIS"]
PAIR = [*TETRIS, "--speculative-draft-model-path", str(DRAFT)]

# Makes the installed SGLang look like another release, in every process of the server.
OTHER_RELEASE = """
from importlib import metadata
version = metadata.version
metadata.version = lambda name: "0.5.99" if name == "sglang" else version(name)
"""


class Start(NamedTuple):
    arguments: list[str]
    message: list[str]
    """Parts that its output must have."""
    variables: dict[str, str] | None = None
    entry_point: tuple[str, ...] = (sys.executable, "-m", "sglang.launch_server")


STARTS = {
    "no such draft": Start(
        [*TETRIS, "--speculative-draft-model-path", "/no/such/draft"],
        ["--speculative-draft-model-path /no/such/draft: no such folder", "Give a folder with config.json"],
        entry_point=(str(Path(sys.executable).parent / "sglang"), "serve"),
    ),
    "both capacities": Start(
        [*PAIR, "--speculative-tetris-capacity-tokens", "8"],
        [
            "--speculative-tetris-capacity-per-request=2.0",
            "--speculative-tetris-capacity-tokens=8",
            "Remove one",
        ],
        {"SGLANG_TETRIS_CAPACITY_PER_REQUEST": "2"},
        entry_point=FORKED,
    ),
    "another release": Start(
        PAIR,
        ["SGLang 0.5.99 is installed", "pip install 'sglang==0.5.23'", "Unknown speculative algorithm"],
        {"PYTHONPATH": OTHER_RELEASE},
    ),
}


class End(NamedTuple):
    code: int
    log: str


@pytest.fixture(scope="module")
def ends(tmp_path_factory):
    """All starts, two at a time; the result of each when asked for."""
    folder = tmp_path_factory.mktemp("starts")
    (folder / "sitecustomize.py").write_text(OTHER_RELEASE)

    def run(name: str, start: Start) -> End:
        server = ServerProcess(
            start.arguments,
            folder / f"{name}.log",
            environment={
                key: str(folder) if value == OTHER_RELEASE else value for key, value in (start.variables or {}).items()
            },
            entry_point=start.entry_point,
        )
        try:
            code = server.launch().wait(LOAD_TIMEOUT_S)
        finally:
            server.stop()
        return End(code, server.log_path.read_text(errors="replace"))

    with ThreadPoolExecutor(2) as pool:
        yield {name: pool.submit(run, name, start) for name, start in STARTS.items()}


@pytest.mark.parametrize("name", STARTS)
def test_a_bad_start_ends_with_a_message(ends: dict[str, Future], name):
    code, log = ends[name].result()
    assert code not in (None, 0), log[-2000:]
    for part in STARTS[name].message:
        assert part in log, log[-2000:]
    assert "Load weight begin" not in log
