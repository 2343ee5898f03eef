"""`tetris-sglang distill` on the tests' pair: drafts get better, an interrupted run ends where a whole one does, and what does
not fit is named."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from tetris_sglang.tools.cli import app
from tetris_sglang.tools.distill.command import Options, distill, split
from tetris_sglang.tools.distill.corpus import Text
from tetris_sglang.tools.distill.students import Teacher

PAIR = Path(__file__).parents[2] / "pair"
COMMON = {"target": str(PAIR / "target"), "held_out": 6, "batch_tokens": 512, "max_tokens": 96, "chain": 3}


@pytest.fixture(scope="module")
def traffic(tmp_path_factory) -> Path:
    """What the target writes, greedily and at temperature 1."""
    teacher = Teacher(PAIR / "target", torch.device("cpu"), torch.float32)
    path = tmp_path_factory.mktemp("traffic") / "traffic.jsonl"
    lines = (PAIR / "prompts.jsonl").read_text().splitlines()
    tokenizer = AutoTokenizer.from_pretrained(PAIR / "target")
    prompts = [tokenizer(json.loads(line)["text"])["input_ids"][:8] for line in lines]
    given = torch.tensor([ids for ids in prompts if len(ids) == 8][:48])
    torch.manual_seed(0)
    with path.open("w") as out:
        for temperature in (0.0, 1.0):
            sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0} if temperature else {"do_sample": False}
            written = teacher.model.generate(
                given, attention_mask=torch.ones_like(given), max_new_tokens=40, min_new_tokens=40, pad_token_id=0, **sampling
            )
            for ids in written.tolist():
                out.write(json.dumps({"prompt": ids[:8], "output": ids[8:], "temperature": temperature}) + "\n")
    return path


def run(folder: Path, recorded: Path, **options) -> dict | None:
    made = {"out": folder / "out", "work_dir": folder / "work", "traffic": [recorded], "steps": 6}
    return distill(Options(**(COMMON | made | options)))


def mean(metrics: dict, when: str, temperature: str) -> float:
    return metrics[when][temperature]["overall"]["mean"]


@pytest.fixture
def worse_draft(tmp_path) -> Path:
    """The pair's standalone draft, disturbed."""
    folder = tmp_path / "worse"
    model = AutoModelForCausalLM.from_pretrained(PAIR / "draft", dtype=torch.float32)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * parameter.std() * torch.randn_like(parameter)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(PAIR / "draft").save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "divergence, rate, gains", [("forward-kl", 2e-3, {"0": 0.05, "1": 0.05}), ("disagreement", 5e-4, {"1": 0.01})]
)
def test_a_standalone_draft_gets_better(tmp_path, traffic, worse_draft, divergence, rate, gains):
    metrics = run(tmp_path, traffic, draft=str(worse_draft), steps=40, rate=rate, divergence=divergence)
    for temperature, gain in gains.items():
        assert mean(metrics, "after", temperature) > mean(metrics, "before", temperature) + gain
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert {t.dtype for t in weights.values()} == {torch.bfloat16}
    assert (tmp_path / "out" / "tokenizer.json").exists()
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"| 1 | after | {mean(metrics, 'after', '1'):.2f}" in card and divergence in card
    assert json.loads((tmp_path / "out" / "metrics.json").read_text()) == metrics
    assert metrics["made_with"]["target"] == "target" and metrics["peak_memory_gb"] > 0.1
    assert {"commit", "cpu"} <= metrics["provenance"].keys()


def test_what_steers_a_draft_is_learnt(tmp_path, traffic, worse_draft):
    """And training goes on with what was saved."""
    options = {"draft": str(worse_draft), "steps": 40, "rate": 2e-3, "layer_ids": [0, 2, 3]}
    steered = run(tmp_path / "steered", traffic, steer=True, **options)
    for temperature in ("0", "1"):
        assert mean(steered, "after", temperature) > mean(steered, "before", temperature) + 0.05
    assert load_file(tmp_path / "steered" / "out" / "model.safetensors")["steer.weight"].any()
    again = run(tmp_path / "again", traffic, draft=str(tmp_path / "steered" / "out"), steps=1)
    for temperature in ("0", "1"):
        assert abs(mean(again, "before", temperature) - mean(steered, "after", temperature)) < 0.05


@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
def test_a_new_draft_learns(tmp_path, traffic, kind):
    new = {"layer_ids": [0, 2], "vocabulary": 256, "intermediate": 64, "mask_token": "<|pad|>"}
    metrics = run(tmp_path, traffic, draft=kind, steps=16, **(new | {"batch_tokens": 256, "chain": 2}))
    assert metrics["before"] is None and metrics["last_loss"] < metrics["first_loss"]
    assert set(metrics["after"]) == {"0", "1"}


def test_an_interrupted_run_ends_where_a_whole_one_does(tmp_path, traffic):
    ends = {}
    for name, calls in (("whole", [{}]), ("resumed", [{"stop_after": 3}, {"resume": True}])):
        for options in calls:
            metrics = run(tmp_path / name, traffic, draft=str(PAIR / "eagle3"), **options)
        ends[name] = metrics, load_file(tmp_path / name / "out" / "model.safetensors")
    for key, value in ends["whole"][1].items():
        torch.testing.assert_close(ends["resumed"][1][key], value)
    for when in ("before", "after"):
        assert ends["whole"][0][when] == ends["resumed"][0][when]
    with pytest.raises(ValueError, match="seed was 0, is 1. Give the same options"):
        run(tmp_path / "whole", traffic, draft=str(PAIR / "eagle3"), resume=True, seed=1, out=tmp_path / "other")


def test_two_processes_train_one_draft(tmp_path, traffic):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0", "--standalone"]
    command += ["-m", "tetris_sglang", "distill", "--draft", str(PAIR / "eagle3"), "--out", str(tmp_path / "out")]
    command += ["--traffic", str(traffic), "--steps", "4"]
    for name, value in COMMON.items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert metrics["processes"] == 2 and metrics["steps"] == 4
    before, after = load_file(PAIR / "eagle3" / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert any(not torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"divergence": "l2"}, "--divergence l2: one of forward-kl"),
        ({"writer": "nobody"}, "--writer nobody: one of target"),
        ({"writer": "draft"}, "writes no texts of its own"),
        ({"writer": "draft", "draft": str(PAIR / "eagle")}, "writes no texts of its own"),
        ({"steer": True}, "--steer: .*eagle3 is no standalone draft"),
        ({"traffic": []}, "nothing to learn from"),
        ({"greedy_share": 2}, "--greedy-share 2"),
        ({"draft": "/nowhere"}, "--draft /nowhere: no such folder"),
        ({"held_out": 25}, "--held-out 25: of 96 texts 1 to 24"),
        ({"target": str(PAIR / "eagle3")}, "--target .* cannot be loaded"),
        ({"draft": "eagle3", "layer_ids": [9]}, "--layer-ids .9.: SGLang captures layers 0 to"),
        ({"draft": "dflash"}, "--mask-token None: name a token"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path, traffic, options, message):
    with pytest.raises(ValueError, match=message):
        run(tmp_path, traffic, **({"draft": str(PAIR / "eagle3")} | options))


def test_a_head_of_another_target_is_named(tmp_path, traffic):
    folder = tmp_path / "head"
    folder.mkdir()
    config = json.loads((PAIR / "eagle3" / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"hidden_size": 64}))
    with pytest.raises(ValueError, match="is a head for states of 64 values"):
        run(tmp_path, traffic, draft=str(folder))


def test_a_draft_with_another_tokenizer_is_named(tmp_path, traffic):
    from tests.other_vocabulary import make_other_vocabulary

    other = make_other_vocabulary(PAIR / "draft", tmp_path / "other")
    with pytest.raises(ValueError, match=r"is not the target's .*Train a head instead"):
        run(tmp_path, traffic, draft=str(other))


def test_the_command_says_what_was_wrong(tmp_path, traffic):
    given = ["distill", "--draft", "eagle3", "--target", str(PAIR / "target"), "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, [*given, "--traffic", str(tmp_path / "missing.jsonl")])
    assert result.exit_code == 2 and "cannot be read" in " ".join(result.output.split())


def test_texts_that_judge_are_of_every_kind_and_not_learnt_from():
    texts = [
        Text(torch.tensor([i // 2, 1, 2, 3]), 1, temperature, kind)
        for i in range(40)
        for temperature, kind in ((0.0, "a"), (1.0, "b"))
    ]
    judged, learnt = split(texts, 8)
    assert {(t.temperature, t.kind) for t in judged} == {(0.0, "a"), (1.0, "b")} and len(judged) == 8
    prompts = {int(t.token_ids[0]) for t in judged}
    assert learnt and not prompts & {int(t.token_ids[0]) for t in learnt}
