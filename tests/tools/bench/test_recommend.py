"""What `tetris-sglang bench --recommend` says, of invented measurements."""

from __future__ import annotations

from dataclasses import asdict
from io import StringIO

import pytest
from rich.console import Console

from tests.tools.bench.samples import make_sample
from tetris_sglang.tools.bench.arms import Arm
from tetris_sglang.tools.bench.recommend import choose, list_candidates, print_recommendation

DRAFTS = {"eagle3": "my head", "ngram": None}
AUTO = Arm("auto", num_steps=6)
CHAINS = Arm("auto", num_steps=6, num_draft_tokens=7)
OWN = Arm("sglang", 1)
NGRAM = Arm("auto", num_steps=12, draft="ngram")


def make_results(gains: dict[Arm, tuple[float, float]]) -> dict:
    """Arms with their throughput over no speculation at 1 and 4 requests."""
    arms = {arm.name: asdict(arm) for arm in (Arm("none"), *gains)}
    samples = [
        make_sample(name, concurrency=load, tokens_per_s=100.0 * ratio, repeat=repeat)
        for repeat in (1, 2)
        for i, load in enumerate((1, 4))
        for name, ratio in (("none", 1.0), *((arm.name, each[i]) for arm, each in gains.items()))
    ]
    return {"samples": samples, "arms": arms, "settings": {"model_path": "my model"}}


def test_the_fastest_over_all_loads_is_chosen():
    results = make_results({AUTO: (1.2, 1.0), OWN: (1.4, 1.3), NGRAM: (1.1, 1.1)})
    candidates = list_candidates(results, DRAFTS)
    assert [c.arm for c in candidates] == [OWN.name, NGRAM.name, AUTO.name]
    assert candidates[0].gain == pytest.approx((1.4 * 1.3) ** 0.5) and candidates[2].worst.load.concurrency == 4
    assert choose(candidates).arm == OWN.name


def test_of_equals_the_one_with_fewer_flags():
    candidates = list_candidates(make_results({AUTO: (1.2, 1.19), CHAINS: (1.21, 1.2), OWN: (1.2, 1.2)}), DRAFTS)
    assert choose(candidates).arm == AUTO.name


def test_where_nothing_gains_there_is_no_speculation():
    results = make_results({AUTO: (0.99, 1.0), OWN: (0.9, 0.8)})
    assert choose(list_candidates(results, DRAFTS)) is None and choose([]) is None
    console = Console(file=StringIO(), width=100)
    print_recommendation(results, DRAFTS, console)
    assert "Serve without speculation" in console.file.getvalue()


def test_an_arm_that_was_not_measured_everywhere_is_none():
    results = make_results({AUTO: (1.2, 1.2), OWN: (1.5, 1.5)})
    results["samples"] = [s for s in results["samples"] if s["arm"] != OWN.name or s["concurrency"] == 1]
    assert [c.arm for c in list_candidates(results, DRAFTS)] == [AUTO.name]


def test_flags_can_be_pasted_and_a_loss_is_named():
    console = Console(file=StringIO(), width=100)
    print_recommendation(make_results({AUTO: (1.4, 0.9)}), DRAFTS, console)
    text = console.file.getvalue()
    assert (
        "--model-path 'my model' --speculative-algorithm TETRIS --speculative-draft-model-path 'my head' "
        "--speculative-num-steps 6\n"
    ) in text
    assert "It loses at temperature 0, concurrency 4: 0.90" in text
