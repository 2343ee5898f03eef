"""The faults that the dry run must find are still in the code that they bend."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts" / "gpu"))

from mutations import MUTATIONS


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_has_its_line(name):
    mutation = MUTATIONS[name]
    bent = mutation.bend()
    assert mutation.new in bent and compile(bent, name, "exec")
