"""`python -m sglang.launch_server` whose processes are forks of one that has imported everything.

    forked_server.py ARGUMENTS                  imports once for the three processes of a server
    forked_server.py --listen SOCKET            a fork server: imports once for all servers to come
    forked_server.py --from SOCKET ARGUMENTS    a server that it forks; this process stands for it

A start is half the time of three imports, or less. As users start a server, each of its processes imports everything again:
that is what the tests of start-up, of the front ends and of fresh environments do.
"""

import importlib
import json
import multiprocessing
import os
import random
import signal
import socket
import sys
import threading
import time
import traceback
from contextlib import suppress
from typing import NoReturn

COMMAND = (sys.executable, __file__)
"""What the arguments of a server follow."""
LISTEN, FROM = "--listen", "--from"
_OF_THE_OTHER_PROCESSES = ("sglang.srt.managers.scheduler", "sglang.srt.managers.detokenizer_manager", "sglang.launch_server")
_MAX_MESSAGE_BYTES = 1 << 17
_CONNECT_TIMEOUT_S, _KILL_AFTER_S, _POLL_S = 60, 10, 2
_set_start_method = multiprocessing.set_start_method


def serve(arguments: list[str]) -> None:
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    multiprocessing.set_start_method = lambda method, force=False: _set_start_method("fork", force=True)
    load_plugins()
    run_server(prepare_server_args(arguments))


def import_all() -> None:
    for name in _OF_THE_OTHER_PROCESSES:
        importlib.import_module(name)


def listen(path: str) -> None:
    """Fork servers until the process that started this one is gone."""
    parent, before = os.getppid(), set(os.environ)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)  # clients wait from now on
        listener.listen(8)
        import_all()
        # Of a process that imports everything itself: the CPU platform's, for one.
        made = {name: value for name, value in os.environ.items() if name not in before}
        listener.settimeout(_POLL_S)
        while os.getppid() == parent:
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                connection = None
            if connection is not None:
                message, files, _, _ = socket.recv_fds(connection, _MAX_MESSAGE_BYTES, 2)
                if os.fork() == 0:
                    listener.close()
                    _become_server(connection, json.loads(message), files, made)
                for file in (*files, connection.fileno()):
                    os.close(file)
                connection.detach()
            _reap()


def _become_server(connection: socket.socket, asked: dict, files: list[int], made: dict[str, str]) -> NoReturn:
    """Args: asked: arguments, environment and folder. files: its output. made: variables that imports have made."""
    os.setsid()
    for standard, file in zip((1, 2), files, strict=True):
        os.dup2(file, standard)
        os.close(file)
    os.chdir(asked["folder"])
    os.environ.clear()
    os.environ.update(made | asked["environment"])
    sys.path[:0] = [f for f in os.environ.get("PYTHONPATH", "").split(os.pathsep) if f and f not in sys.path]
    random.seed()  # ports and seeds are drawn
    connection.settimeout(None)
    connection.send(str(os.getpid()).encode())
    # Whoever stands for the server was killed: so is the server.
    threading.Thread(target=lambda: (connection.recv(1), os.killpg(0, signal.SIGKILL)), daemon=True).start()
    try:
        serve(asked["arguments"])
    except BaseException:
        traceback.print_exc()
    finally:  # never into the loop of the fork server
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(0)


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def stand_for(path: str, arguments: list[str]) -> None:
    """Ask for a server and end when all of its processes have; ending this one ends them."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        for attempt in range(_CONNECT_TIMEOUT_S * 10):
            try:
                connection.connect(path)
                break
            except (FileNotFoundError, ConnectionRefusedError):
                if attempt == _CONNECT_TIMEOUT_S * 10 - 1:
                    raise
                time.sleep(0.1)
        asked = {"arguments": arguments, "environment": dict(os.environ), "folder": os.getcwd()}
        socket.send_fds(connection, [json.dumps(asked).encode()], [1, 2])
        group = int(connection.recv(32))

        def end(number: int, _) -> None:
            signal.alarm(_KILL_AFTER_S)
            with suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL if number == signal.SIGALRM else signal.SIGTERM)

        signal.signal(signal.SIGTERM, end)
        signal.signal(signal.SIGALRM, end)
        connection.recv(1)  # the end of the last process that has the other end
    sys.exit(1)


def main() -> None:
    match sys.argv[1:]:
        case [mode, path] if mode == LISTEN:
            listen(path)
        case [mode, path, *arguments] if mode == FROM:
            stand_for(path, arguments)
        case arguments:
            import_all()
            serve(arguments)


if __name__ == "__main__":
    main()
