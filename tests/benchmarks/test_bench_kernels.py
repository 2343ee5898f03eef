"""The kernels' benchmark where there is nothing to time."""

import os
import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "bench_kernels.py"


def test_without_a_device_it_says_why_and_exits_2():
    done = subprocess.run(
        [sys.executable, str(BENCHMARK)],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "COLUMNS": "110"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("bench_kernels: torch ") and "CUDA device" in done.stderr
