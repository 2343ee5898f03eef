"""Ports of the servers that the demo, the benchmarks and the tests start."""

import socket
from pathlib import Path

import pytest

from tetris_sglang.tools import server_process
from tetris_sglang.tools.server_process import ServerFailed, ServerProcess


def test_no_port_that_an_outgoing_connection_can_be_given(tmp_path):
    ports = [ServerProcess([], tmp_path / "server.log").port for _ in range(20)]
    ephemeral = Path("/proc/sys/net/ipv4/ip_local_port_range")
    first = int(ephemeral.read_text().split()[0]) if ephemeral.exists() else 49_152
    assert max(ports) < first
    # SGLang looks for its own between these.
    assert not any(22_000 <= port <= 29_999 for port in ports)
    assert len(set(ports)) > 1


def test_a_port_in_use_is_passed_over(tmp_path, monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", server_process.find_free_port()))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setattr(server_process, "_PORTS", range(port, port + 40))
        assert all(ServerProcess([], tmp_path / "server.log").port > port for _ in range(80))
        monkeypatch.setattr(server_process, "_PORTS", range(port, port + 1))
        with pytest.raises(ServerFailed, match=f"no port from {port} to {port} is free"):
            ServerProcess([], tmp_path / "server.log")
