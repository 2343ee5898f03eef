"""scripts/validate_simulation.py, without servers: what it makes of a comparison's JSON."""

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tests.tools.bench.samples import make_prompts, make_settings

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "scripts"))

import validate_simulation as script
from validate_simulation import OWN, SERVED, find_order, find_policy, read_settings

from tetris_sglang.capacity import PassTimes
from tetris_sglang.tools.bench.arms import Arm
from tetris_sglang.tools.bench.workloads import Chats, Load
from tetris_sglang.tools.simulate.costs import Calibration, make_costs

SETTINGS = make_settings(concurrency="1,4", lengths="drawn")
MEASURED = json.loads(json.dumps({"settings": asdict(SETTINGS)}))


@pytest.mark.parametrize(
    "arm,policy",
    [
        (Arm("none"), ("none", OWN)),
        (Arm("sglang", 3), ("sd3", OWN)),
        (Arm("tetris", 3, 2), ("tetris3+2", SERVED)),
        (Arm("tetris", capacity_tokens=8, num_steps=6), ("tetris6@8", SERVED)),
        (Arm("uniform", 2, 1), ("uniform2+1", SERVED)),
        (Arm("full", 4), ("sd4", SERVED)),
        (Arm("auto", num_steps=6), ("auto", SERVED)),
        (Arm("auto", num_steps=5), None),
        (Arm("tetris", 5, 2), None),
        (Arm("random", 2, 1), None),
        (Arm("sglang", 3, draft="eagle"), None),
        (Arm("sglang", 3, draft="ngram"), None),
        (Arm("sglang", 4, num_steps=3, topk=2), None),
    ],
)
def test_arms_as_the_simulators_policies(arm, policy):
    assert find_policy(arm) == policy


def test_prompts_in_the_order_in_which_they_were_sent(plugins, tmp_path):
    """As sglang.bench_serving reads them."""
    from sglang.benchmark.datasets.openai_dataset import sample_openai_requests
    from transformers import AutoTokenizer

    settings, workload, load = (
        read_settings(MEASURED),
        Chats(make_prompts("chat"), 0, 96),
        Load(concurrency=4),
    )
    assert settings == SETTINGS
    arguments = workload.arguments(16, 1, 0.0, tmp_path)
    path = arguments[arguments.index("--dataset-path") + 1]
    tokenizer = AutoTokenizer.from_pretrained(REPOSITORY / "tests/pair/target")
    sent = [row.prompt[0]["content"] for row in sample_openai_requests(path, 16, tokenizer)]
    assert [prompt.text for prompt in find_order(workload, settings, load, 1)] == sent


@pytest.fixture
def recorded(monkeypatch):
    """Answers that no server wrote: of as many tokens as were asked for, less one. Notes what is recorded."""
    recordings = []

    def record(flags, path, prompts, lengths, settings):
        recordings.append(flags)
        return [(prompt.id, 7, length - 1) for prompt, length in zip(prompts, lengths, strict=True)]

    monkeypatch.setattr(script, "record", record)
    monkeypatch.setattr(script, "read_rows", lambda path: path)
    monkeypatch.setattr(script, "HEAD", REPOSITORY / "tests/pair/eagle3")
    return recordings


def test_texts_have_the_lengths_of_their_own_answers(recorded, tmp_path):
    prompts, workload = make_prompts("chat", 5), Chats(make_prompts("chat"), 0, 96)
    texts = script.record_texts(prompts, workload, SETTINGS, tmp_path)
    assert texts.output_lens.tolist() == [workload.choose_length(prompt) - 1 for prompt in prompts]
    assert texts.index[prompts[3].id] == 3 and texts.hashes[3] == prompts[3].id
    assert recorded == list(script.RECORDINGS.values())
    # What is there is not recorded again, unless something of it has changed.
    script.record_texts(prompts, workload, SETTINGS, tmp_path)
    assert len(recorded) == 2
    script.record_texts(prompts, workload, replace(SETTINGS, lengths="equal"), tmp_path)
    assert len(recorded) == 4


def test_an_answer_without_a_step_is_named(recorded, tmp_path):
    with pytest.raises(ValueError, match="the answers to chat/0, chat/1 end with their first token"):
        script.record_texts(make_prompts("chat", 2), Chats([], 0, 2, "equal"), SETTINGS, tmp_path)


def test_answers_are_recorded_as_the_comparison_asked_for_them(tmp_path, monkeypatch):
    started, asked = [], []

    class Server:
        url = "http://x"

        def __init__(self, arguments, log_path, **options):
            started.append(arguments)

        def __enter__(self):
            return self

        def __exit__(self, *given):
            pass

    def generate(url, texts, **options):
        asked.append((texts, options))
        return [SimpleNamespace(text="a", meta_info={"prompt_tokens": 9, "completion_tokens": 3}) for _ in texts], 1.0

    monkeypatch.setattr(script, "ServerProcess", Server)
    monkeypatch.setattr(script, "generate", generate)
    monkeypatch.setattr(script, "ensure_target", lambda: REPOSITORY / "tests/pair/target")
    monkeypatch.setattr(script, "HEAD", Path("head"))
    answers = script.record(script.RECORDINGS[SERVED], tmp_path / "t", make_prompts("chat", 2), [40, 50], SETTINGS)
    assert answers == [(script.hash_output("a"), 9, 3)] * 2
    ((texts, options),) = asked
    assert options == {"concurrency": 1, "max_new_tokens": [40, 50], "ignore_eos": False}
    assert all(prompt.text in text != prompt.text for prompt, text in zip(make_prompts("chat", 2), texts, strict=True))
    (arguments,) = started
    for flag, value in (
        *(("--speculative-num-steps", "6"), ("--speculative-tetris-capacity-per-request", "6")),
        *(("--speculative-draft-model-path", "head"), ("--speculative-tetris-record", str(tmp_path / "t"))),
    ):
        assert arguments[arguments.index(flag) + 1] == value


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
    arms = make_settings(arms="none,sglang,tetris", k="4,5", drafts="eagle3,ngram").build_arms()
    named = {arm.name: arm for arm in arms}
    measured = {"none", "tetris eagle3 k=4+2", "EAGLE3 k=5", "EAGLE3 k=4", "NGRAM k=4"}
    assert script.find_fitted(named, measured) == ["none", "EAGLE3 k=4"]
    assert script.find_fitted(named, {"none"}) == ["none"]


def test_paces_scale_passes_and_nothing_else():
    passes = PassTimes({1: 10.0, 2: 14.0, 4: 20.0}, {1: 3.0}, {1: 1.0}, context_s=0.5)
    sizes = {"max_running": 1, "num_drafts": 3, "chunk_tokens": 4}
    costs = make_costs(passes, **sizes, calibration=Calibration(pace=2.0, row_pace=3.0, host_s=7.0))
    np.testing.assert_allclose(costs.target_s[[1, 2, 4]], [20.0, 44.0, 80.0])
    assert (costs.window_s[1], costs.branch_s[1], costs.context_s, costs.host_s[1]) == (6.0, 2.0, 1.0, 7.0)
