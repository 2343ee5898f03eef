"""A real SGLang server in a child process, for the demo, the benchmarks and the tests."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self

DEFAULT_START_TIMEOUT_S = 300.0
_STOP_TIMEOUT_S = 20.0
_POLL_S = 0.25
_PORTS = range(10_000, 22_000)


class ServerFailed(RuntimeError):
    """The server ended, or did not answer in time; carries the end of its log."""


@contextlib.contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """SIGTERM ends this process's servers as Ctrl-C does; for a command's main thread."""
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


class ServerProcess:
    """`python -m sglang.launch_server` on loopback, ready when entered and gone when left.

    Args:
        arguments: everything after `launch_server`, without --host and --port.
        log_path: receives the server's output.
        environment: variables added to this process's own.
        entry_point: the command that the arguments follow; `sglang serve` is another.
        start_timeout_s: seconds until ServerFailed is raised.
    Example:
        with ServerProcess(["--model-path", "tests/pair/target"], Path("server.log")) as server:
            print(server.url)
    """

    def __init__(
        self,
        arguments: Sequence[str],
        log_path: Path,
        *,
        environment: Mapping[str, str] | None = None,
        entry_point: Sequence[str] = (sys.executable, "-m", "sglang.launch_server"),
        start_timeout_s: float = DEFAULT_START_TIMEOUT_S,
    ) -> None:
        self.port = find_free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log_path = Path(log_path)
        self.command = [*entry_point, "--host", "127.0.0.1", "--port", str(self.port), *arguments]
        self._environment = {**os.environ, **(environment or {})}
        # Byte-compiled modules halve the start-up time.
        self._environment.pop("PYTHONDONTWRITEBYTECODE", None)
        self._start_timeout_s = start_timeout_s
        self._process: subprocess.Popen | None = None
        self.start_seconds = float("nan")

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_) -> None:
        self.stop()

    def start(self) -> None:
        """Start the server and wait until it answers a generation.

        Raises:
            ServerFailed: it ended first, or start_timeout_s passed.
        """
        process = self.launch()
        started_at = time.monotonic()
        try:
            while not self._is_healthy():
                if process.poll() is not None:
                    raise ServerFailed(f"the server ended with code {process.returncode}.\n{self.log_tail()}")
                if time.monotonic() - started_at > self._start_timeout_s:
                    raise ServerFailed(f"no answer after {self._start_timeout_s:.0f} s.\n{self.log_tail()}")
                time.sleep(_POLL_S)
        except BaseException:
            self.stop()
            raise
        self.start_seconds = time.monotonic() - started_at

    def launch(self) -> subprocess.Popen:
        """Start the process without waiting for it."""
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("w") as log:
            # A process group of its own, so that stop() ends the scheduler and the detokenizer with it.
            self._process = subprocess.Popen(
                self.command,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=self._environment,
                start_new_session=True,
            )
        return self._process

    def pause(self) -> None:
        """Freeze the server and its children: they keep their memory and use no processor time."""
        os.killpg(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Go on after `pause`; does nothing to a server that runs."""
        os.killpg(self._process.pid, signal.SIGCONT)

    def stop(self) -> None:
        """End the server and its children, paused or not; does nothing when it never started."""
        if self._process is None:
            return
        if self.is_running:
            self.resume()  # a frozen process handles no SIGTERM
        for signal_number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self._process.pid, signal_number)
            except ProcessLookupError:
                break
            try:
                self._process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                continue
            if not _group_is_alive(self._process.pid):
                break
        self._process = None

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def log_tail(self, num_lines: int = 40) -> str:
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-num_lines:])

    def _is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health_generate", timeout=20) as response:
                return response.status == 200
        except (urllib.error.URLError, ConnectionError, TimeoutError, OSError):
            return False


def start_all(
    servers: Sequence[ServerProcess], prepare: Callable[[ServerProcess], None], *, at_once: int = 2
) -> list[Exception | None]:
    """Start servers side by side and call `prepare` on each once it answers.

    Args:
        prepare: may raise ServerFailed or OSError (as `requests` does); that server is then stopped.
    Returns:
        For each server None, or why it is not running. Those that run are the caller's to stop; an
        interruption stops all.
    """

    def start(server: ServerProcess) -> Exception | None:
        try:
            server.start()
            prepare(server)
        except (ServerFailed, OSError) as error:
            server.stop()
            return error
        return None

    with ThreadPoolExecutor(at_once) as pool:
        futures = [pool.submit(start, server) for server in servers]
        try:
            return [future.result() for future in futures]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for server in servers:
                server.stop()
            raise


def find_free_port() -> int:
    """A port that is still free when the server binds it, which is up to a minute later.

    So none of those that systems give to outgoing connections (32768 and above on Linux, 49152 elsewhere): waiting for
    an answer makes hundreds of these, and one that is given the server's port as its own connects to itself. SGLang
    takes further ports from 22000 on (upstream: srt/utils/network.py, get_free_port_below_ephemeral).
    """
    for port in random.sample(_PORTS, len(_PORTS)):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    raise ServerFailed(f"no port from {_PORTS.start} to {_PORTS.stop - 1} is free.")


def _group_is_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
