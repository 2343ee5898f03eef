"""The kernels' tests on a machine without a CUDA device (and, on one with, a second time)."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="this is the interpreting process")
def test_every_kernel_in_the_interpreter():
    """Only what names the device, the compiler or this process itself as its reason may be skipped there."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-rs", "-p", "no:cacheprovider", str(Path(__file__).parent)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    skipped = [line for line in done.stdout.splitlines() if line.startswith("SKIPPED")]
    reasons = ("needs a CUDA device", "needs the compiler", "this is the interpreting process")
    assert all(any(reason in line for reason in reasons) for line in skipped), skipped
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed and int(passed[1]) >= 30, done.stdout[-1000:]
