"""scripts/validate_simulation.py, without servers: what it makes of a comparison's JSON."""

import json
import random
import sys
from pathlib import Path

import numpy as np
import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "scripts"))

import validate_simulation as script
from validate_simulation import OWN, SERVED, find_order, find_policy, read_settings

from tetris_sglang.bench.arms import Arm
from tetris_sglang.bench.workloads import Load
from tetris_sglang.capacity import PassTimes
from tetris_sglang.simulate.costs import Calibration, make_costs

MEASURED = json.loads((REPOSITORY / "benchmarks/results/capacity_loads.json").read_text())


@pytest.mark.parametrize(
    "arm,policy",
    [
        (Arm("none"), ("none", OWN)),
        (Arm("standalone", 3), ("sd3", OWN)),
        (Arm("tetris", 3, 2), ("tetris3+2", SERVED)),
        (Arm("tetris", capacity_tokens=8, num_steps=6), ("tetris6@8", SERVED)),
        (Arm("uniform", 2, 1), ("uniform2+1", SERVED)),
        (Arm("full", 4), ("sd4", SERVED)),
        (Arm("auto", num_steps=6, continued=6), ("auto", SERVED)),
        (Arm("auto", num_steps=6), None),
        (Arm("tetris", 5, 2), None),
        (Arm("random", 2, 1), None),
        (Arm("standalone", 3, draft="eagle"), None),
        (Arm("tetris", 4, 2, num_steps=3, topk=2), None),
    ],
)
def test_arms_as_the_simulators_policies(arm, policy):
    assert find_policy(arm) == policy


def test_prompts_in_the_order_in_which_they_were_sent(tmp_path):
    """As sglang.bench_serving reads and shuffles them."""
    pytest.importorskip("sglang")
    from sglang.benchmark.datasets.custom import sample_custom_requests

    from tetris_sglang.bench.workloads import write_dataset

    class Letters:
        def encode(self, text):
            return list(text)

    settings = read_settings(MEASURED)
    load = Load(concurrency=4)
    count = load.num_prompts(settings.min_prompts, settings.waves)
    prompts = script.find_workload(settings, script.PAIR).take(count, 1)
    path = write_dataset(prompts, tmp_path / "prompts.jsonl")
    random.seed(settings.seed + 1)
    sent = sample_custom_requests(str(path), count, Letters(), fixed_output_len=16)
    assert find_order(settings, load, 1) == [row.prompt for row in sent] != prompts


@pytest.mark.parametrize(
    "changes,message",
    [
        ({"request_rate": [1.0]}, "Poisson"),
        ({"temperature": [0.0, 1.0]}, "sampled"),
        ({"workload": "unlike"}, "sampled"),
        ({"workload": "shared-prefix"}, "share prefixes"),
        ({"model_path": "m"}, "one's own"),
    ],
)
def test_what_cannot_be_simulated_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        read_settings({"settings": MEASURED["settings"] | changes})


def test_fitted_is_what_anybody_has_without_tetris():
    arms = {name: script.read_arm(arm) for name, arm in MEASURED["arms"].items()}
    measured = {"none", "tetris k=5+1", "standalone k=5", "standalone k=4"}
    assert script.find_fitted(arms, measured) == ["none", "standalone k=4"]
    assert script.find_fitted(arms, {"none"}) == ["none"]


def test_paces_scale_passes_and_nothing_else():
    passes = PassTimes({1: 10.0, 2: 14.0, 4: 20.0}, {1: 3.0}, {1: 1.0}, context_s=0.5)
    sizes = {"max_running": 1, "num_drafts": 3, "chunk_tokens": 4}
    costs = make_costs(passes, **sizes, calibration=Calibration(pace=2.0, row_pace=3.0, host_s=7.0))
    np.testing.assert_allclose(costs.target_s[[1, 2, 4]], [20.0, 44.0, 80.0])
    assert (costs.window_s[1], costs.branch_s[1], costs.context_s, costs.host_s[1]) == (6.0, 2.0, 1.0, 7.0)
