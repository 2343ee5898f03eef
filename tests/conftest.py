"""What every test can rely on."""

import os
import re
import warnings
from unittest import mock

import pytest
import torch
from hypothesis import settings

settings.register_profile("tetris", deadline=None, max_examples=100)
settings.load_profile("tetris")

# Nothing is on a hub: asking for it, and again after a pause, takes a minute.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# Workers of pytest-xdist share the cores.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def environment():
    """The process's variables without TETRIS's own, restored afterwards (flags are passed on as variables)."""
    with mock.patch.dict(os.environ):
        for name in [name for name in os.environ if name.startswith(("SGLANG_TETRIS_", "SGLANG_PLUGINS"))]:
            del os.environ[name]
        yield os.environ


@pytest.fixture(scope="session")
def plugins() -> None:
    """SGLang's plugins, loaded into this process as a server does before it parses its arguments."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of SGLang's dependencies, while they are imported
        from sglang.srt.plugins import load_plugins

        load_plugins()


_REPLAYS = "tests/estimates/test_replayed.py"


_TOOLS = ("benchmarks", "scripts", "tools")
_HEADS = re.compile(r"\[(eagle|mtp|dflash|dflare|parallel|rejection|block)")
"""Of tests/e2e, by what is in brackets: the servers of heads, and of some others."""


def pytest_collection_modifyitems(items) -> None:
    """Marks by folder: e2e, kernels, tools; what else is slow marks itself. What takes longest begins first, so that no process
    waits at the end."""
    items.sort(key=lambda item: not item.nodeid.startswith("tests/e2e/"))
    for item in items:
        folder = item.nodeid.removeprefix("tests/").split("/")[0]
        if folder in ("e2e", "kernels"):
            item.add_marker(folder)
        elif folder in _TOOLS:
            item.add_marker("tools")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Tests that share servers, or replays, in one process each; those with servers of their own, and the rest, go to whichever
    is free."""
    from xdist.scheduler import LoadScopeScheduling

    class ServersTogether(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            if not nodeid.startswith("tests/e2e/"):
                return _REPLAYS if nodeid.startswith(_REPLAYS) else nodeid
            if "[perfect" in nodeid or nodeid.startswith(("tests/e2e/test_bad_start.py", "tests/e2e/test_random")):
                return "their own servers"
            # Two groups, about as long; both compare with a server of their own without speculation.
            return "heads' servers" if _HEADS.search(nodeid) else "shared servers"

    return ServersTogether(config, log)
