"""What `make dist` makes: a wheel that works where SGLang is, without the repository."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
import requests

from tests.e2e.conftest import COMMON, DRAFT
from tetris_sglang.tools.server_process import ServerProcess

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def dist(tmp_path_factory) -> Path:
    if not (REPOSITORY / ".git").exists():
        pytest.skip("a distribution is made of a commit: this is no clone")
    folder = tmp_path_factory.mktemp("dist") / "dist"
    # It compares two builds, and has twine and check-wheel-contents look at them.
    subprocess.run([REPOSITORY / "scripts" / "make_dist.sh", folder], check=True, capture_output=True, text=True)
    return folder


def test_it_carries_what_demo_and_bench_need(dist):
    (wheel,), (sdist,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    names = zipfile.ZipFile(wheel).namelist()
    for name in ("smollm2-135m-eagle3/model.safetensors", "questions.jsonl", "step.json", "explain.html"):
        assert f"tetris_sglang/data/{name}" in names
    assert not [name for name in names if name.startswith(("tests/", "scripts/", "benchmarks/"))]
    with tarfile.open(sdist) as archive:
        assert {name.partition("/")[2] for name in archive.getnames()} >= {"pyproject.toml", "LICENSE", "NOTICE", "README.md"}


def test_a_fresh_environment_with_sglang_serves(dist, tmp_path):
    """The tests' own packages, without tetris-sglang's, which the wheel brings."""
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    python = environment / "bin" / "python"
    (wheel,) = dist.glob("*.whl")
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel], check=True)
    packages = sysconfig.get_path("purelib")
    own = Path(sysconfig.get_path("purelib", vars={"base": environment, "platbase": environment}))
    # Found after the wheel's.
    (own / "sglang.pth").write_text(f"{packages}\n")

    def run(*arguments: str) -> str:
        done = subprocess.run([python, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True)
        return done.stdout

    code = "from tetris_sglang.tools.real_model import HEAD; print(HEAD.is_relative_to({!r}), (HEAD / 'config.json').exists())"
    assert run("-c", code.format(str(own))).split() == ["True", "True"]
    assert "problem" not in run("-m", "tetris_sglang", "check")
    arguments = [*COMMON, "--speculative-algorithm", "TETRIS", "--speculative-draft-model-path", str(DRAFT)]
    options = {
        "entry_point": (str(python), "-m", "sglang.launch_server"),
        # Not this folder's package.
        "environment": {"PYTHONSAFEPATH": "1"},
    }
    with ServerProcess(arguments, tmp_path / "server.log", start_timeout_s=400, **options) as server:
        body = {"text": "def read(self):", "sampling_params": {"max_new_tokens": 16, "temperature": 0, "ignore_eos": True}}
        answer = requests.post(f"{server.url}/generate", json=body, timeout=120).json()
        state = requests.get(f"{server.url}/server_info", timeout=60).json()["internal_states"][0]
    assert answer["meta_info"]["completion_tokens"] == 16 and state["tetris"]["num_steps"] > 0
