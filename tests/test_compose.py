"""The compose files: what they name is there, and nobody beyond this machine is served."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
FILES = [ROOT / "docker" / "compose.yaml", ROOT / "monitoring" / "compose.yaml"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.parent.name)
def test_what_a_compose_file_names_is_there(path):
    compose = yaml.safe_load(path.read_text())
    for name in compose.get("include", []):
        assert (path.parent / name).is_file()
    for service in compose["services"].values():
        if "build" in service:
            assert (path.parent / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
        for volume in service["volumes"]:
            assert volume.startswith("${") or (path.parent / volume.split(":")[0]).exists(), volume


def test_everything_listens_on_loopback():
    docker, monitoring = (yaml.safe_load(path.read_text())["services"] for path in FILES)
    for server in docker.values():
        assert server["command"][:2] == ["--host", "127.0.0.1"]
    assert any("127.0.0.1" in argument for argument in monitoring["prometheus"]["command"])
    assert monitoring["grafana"]["environment"]["GF_SERVER_HTTP_ADDR"] == "127.0.0.1"
    # On the host's network nothing is published beside it.
    for service in (*docker.values(), *monitoring.values()):
        assert service["network_mode"] == "host" and "ports" not in service
