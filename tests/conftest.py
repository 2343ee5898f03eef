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
