"""The CUDA path of real servers, on a CUDA that computes on the host: `make gpu-dry-run` for every change, asked for little."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tetris_sglang.portable_cpu.activate import (
    COMPILE_VARIABLE,
    ENGINE_VARIABLE,
    MOVE_VARIABLE,
    NCCL_VARIABLE,
    SPIN_VARIABLE,
)

CPU_VARIABLES = (COMPILE_VARIABLE, ENGINE_VARIABLE, MOVE_VARIABLE, NCCL_VARIABLE, SPIN_VARIABLE)
REPOSITORY = Path(__file__).resolve().parents[2]

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++ to build the libraries"),
]


@pytest.mark.timeout(960)  # eight minutes and more where a process has half a core
def test_a_server_on_the_cuda_path_writes_the_targets_text(tmp_path):
    command = [sys.executable, str(REPOSITORY / "scripts" / "gpu" / "dry_run.py"), "--quick", "--out", str(tmp_path)]
    # Other tests of this process may have made the CPU platform's settings.
    variables = {name: value for name, value in os.environ.items() if name not in CPU_VARIABLES}
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False, env=variables)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    rows = json.loads((tmp_path / "summary.json").read_text())
    assert [row["arm"] for row in rows] == ["eagle3"]
    assert all(case["accepted"] > 0 for row in rows for case in row["cases"])
