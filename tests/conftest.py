"""What every test can rely on."""

import os
import warnings
from unittest import mock

import pytest


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


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Tests of servers all in one process, so that they share these; another runs the rest meanwhile."""
    from xdist.scheduler import LoadScopeScheduling

    class ServersTogether(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "servers" if nodeid.startswith("tests/e2e/") else nodeid

    return ServersTogether(config, log)
