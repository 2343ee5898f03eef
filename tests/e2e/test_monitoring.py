"""What a server reports, as users see it: Grafana's queries in a real Prometheus, `tetris-sglang top` in a real terminal."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import requests
from make_dashboard import PANELS, PATH, make_dashboard

from tetris_sglang.runtime.reports import metrics
from tetris_sglang.tools.server_process import find_free_port

REPOSITORY = Path(__file__).parents[2]
DEADLINE_S = 60


def wait_for(answer, deadline_s: float = DEADLINE_S):
    """What `answer` returns once that is true."""
    until = time.monotonic() + deadline_s
    while not (found := answer()):
        assert time.monotonic() < until, "nothing came"
        time.sleep(0.5)
    return found


def exported_names() -> set[str]:
    """What the code exports, as Prometheus calls it."""
    counters = [name for name, _ in metrics.COUNTERS.values()] + [metrics.ACCEPTED_AT_POSITION[0], metrics.PHASE_SECONDS[0]]
    return {f"{name}_total" for name in counters} | set(metrics.GAUGES)


def test_dashboard_docs_and_code_have_the_same_names():
    assert json.loads(PATH.read_text()) == make_dashboard(), "run: python scripts/make_dashboard.py"
    shown = set(re.findall(r"sglang\[:_\]tetris_(\w+)", PATH.read_text()))
    assert shown == exported_names()
    serving = (REPOSITORY / "docs" / "serving.md").read_text()
    table = [line.split("|")[2] for line in serving.split("In Prometheus")[1].split("\n\n")[0].splitlines()[2:]]
    assert set(re.findall(r"`(\w+)`", " ".join(table))) - {"position", "phase"} == exported_names()


@pytest.fixture(scope="module")
def prometheus(overlap, auto, tmp_path_factory):
    """Its address. It asks both servers every second."""
    command = shutil.which("prometheus") or shutil.which("prometheus", path=REPOSITORY / "build" / "test-tools" / "usr" / "bin")
    if command is None:
        pytest.skip("no prometheus: scripts/install_test_tools.sh installs it on Debian")
    folder, port = tmp_path_factory.mktemp("prometheus"), find_free_port()
    targets = [server.url.removeprefix("http://") for server in (overlap, auto)]
    config = folder / "prometheus.yaml"
    text = (REPOSITORY / "monitoring" / "prometheus.yaml").read_text()
    assert "127.0.0.1:30000" in text
    config.write_text(text.replace('["127.0.0.1:30000"]', json.dumps(targets)).replace("5s", "1s"))
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [
                command,
                f"--config.file={config}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log,
            stderr=log,
        )
    url = f"http://127.0.0.1:{port}"

    def is_ready() -> bool:
        assert process.poll() is None, (folder / "log").read_text()
        try:
            return requests.get(f"{url}/-/ready", timeout=5).ok
        except requests.ConnectionError:
            return False

    try:
        wait_for(is_ready)
        yield url
    finally:
        process.terminate()
        process.wait()


def test_every_panel_shows_something(prometheus, overlap, auto, mixed_prompts):
    """Of both servers together: one has a fixed capacity and times its phases."""

    def ask(query: str) -> list[float]:
        query = query.replace("$instance", ".*").replace("$__rate_interval", "1m")
        answer = requests.get(f"{prometheus}/api/v1/query", params={"query": query}, timeout=30).json()
        assert answer["status"] == "success", (query, answer)
        return [float(sample["value"][1]) for sample in answer["data"]["result"]]

    assert wait_for(lambda: len(ask("up == 1")) == 2)
    steps = '{__name__=~"sglang[:_]tetris_steps_total"}'
    before = ask(f"sum({steps})")
    for server in (overlap, auto):
        server.generate_all(mixed_prompts[:16], concurrency=8, max_new_tokens=48, ignore_eos=True)
    # Rates need what was before the load and what came of it.
    wait_for(lambda: ask(f"sum({steps})") > [*before, 0] and ask(f"min({steps})") > [0])
    time.sleep(2)
    for title, _, _, queries in PANELS:
        for legend, query in queries.items():
            values = ask(query)
            assert values and all(map(math.isfinite, values)), (title, legend, values)
            assert sum(values) > 0 or title in ("Plain steps", "Requests"), (title, legend, values)


def test_top_in_a_terminal(auto, mixed_prompts):
    if shutil.which("tmux") is None:
        pytest.skip("no tmux: scripts/install_test_tools.sh installs it on Debian")
    session = f"tetris-top-{find_free_port()}"

    def tmux(*arguments: str) -> str:
        return subprocess.run(["tmux", *arguments], check=True, capture_output=True, text=True).stdout

    address = auto.url.removeprefix("http://")
    command = f"{sys.executable} -m tetris_sglang top {address} --interval-s 0.5; echo ended with $?; sleep 60"
    tmux("new-session", "-d", "-s", session, "-x", "110", "-y", "40", command)
    try:

        def screen(text: str) -> str:
            return wait_for(lambda: text in (shown := tmux("capture-pane", "-p", "-t", session)) and shown)

        screen("idle")
        auto.generate_all(mixed_prompts[:16], concurrency=8, max_new_tokens=64, ignore_eos=True)
        shown = screen("draft 5")
        for text in ("tokens/s", "of plain decoding", "capacity", "plain steps", "accepted", "verified", "drafted"):
            assert text in shown
        tmux("send-keys", "-t", session, "q")
        assert "draft 5" not in screen("ended with 0"), "the screen was not given back"
    finally:
        tmux("kill-session", "-t", session)
