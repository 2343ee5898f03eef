"""Training on a model's own answers, on the tiny target: what is written, what is learnt from it, and how it is judged."""

import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM
from typer.testing import CliRunner

ROOT = Path(__file__).parents[2]
TARGET = ROOT / "tests" / "pair" / "target"
sys.path.insert(0, str(ROOT / "scripts"))

import answers
import train_eagle3

from tetris_sglang.tools.distill.heads import Eagle3Head, load_head, make_eagle3_keys, make_head_config

LAYER_IDS, MAX_TOKENS = [0, 2, 3], 48


@pytest.fixture(scope="module")
def target():
    return LlamaForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()


def make_prompts(count: int, temperature: float = 0.0, seed: int = 0) -> list[answers.Prompt]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(4, 20, (count,), generator=generator).tolist()
    ids = [torch.randint(5, 2048, (n,), generator=generator).tolist() for n in lengths]
    return [answers.Prompt(f"p{seed}-{i}", "kind", tokens, temperature) for i, tokens in enumerate(ids)]


def write(target, prompts, slots=3, **options) -> list[answers.Answer]:
    inputs = [i + 1 for i in LAYER_IDS]
    writer = answers.Writer(target, slots, MAX_TOKENS, inputs, dtype=torch.float32, **options)
    return list(writer.write(prompts))


@torch.no_grad()
def test_answers_and_states_are_the_models_own(target):
    prompts = make_prompts(7)
    too_long = answers.Prompt("long", "kind", [5] * (MAX_TOKENS // 2 + 1), 0.0)
    written = write(target, [too_long, *prompts])
    assert sorted(a.prompt.id for a in written) == sorted(p.id for p in prompts)
    for answer in written:
        given = torch.tensor([answer.prompt.token_ids])
        expected = target.generate(
            given,
            attention_mask=torch.ones_like(given),
            max_length=MAX_TOKENS,
            do_sample=False,
            pad_token_id=0,
        )
        assert answer.token_ids.tolist() == expected[0].tolist()
        assert answer.prompt_tokens == given.shape[1]
        output = target.model(expected[:, :-1], output_hidden_states=True, use_cache=False)
        states = [*(output.hidden_states[i + 1] for i in LAYER_IDS), output.last_hidden_state]
        torch.testing.assert_close(answer.states, torch.stack(states, 2)[0], rtol=1e-3, atol=1e-3)
        normalizers = target.lm_head(output.last_hidden_state)[0].logsumexp(-1)[answer.prompt_tokens - 1 :]
        torch.testing.assert_close(answer.log_normalizers, normalizers, rtol=1e-4, atol=1e-4)


def test_tokens_are_drawn_at_the_prompts_own_temperature(target):
    writer = answers.Writer(target, 1, MAX_TOKENS, [1], seed=3)
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0]).expand(40_000, -1)
    for temperature in (0.5, 1.0):
        drawn = writer._draw(logits, torch.full((40_000,), temperature))
        shares = torch.bincount(drawn, minlength=4) / 40_000
        torch.testing.assert_close(shares, (logits[0] / temperature).softmax(-1), rtol=0, atol=0.01)
    mixed = writer._draw(logits, torch.tensor([0.0, 1.0]).repeat(20_000))
    assert (mixed[::2] == 2).all() and not (mixed[1::2] == 2).all()


@pytest.fixture(scope="module")
def work_dir(target, tmp_path_factory) -> Path:
    """Answers of the tiny target, written in two calls, and held-out ones."""
    folder = tmp_path_factory.mktemp("work")
    prompts = make_prompts(20) + make_prompts(12, temperature=1.0, seed=1)
    common = ["--work-dir", str(folder), "--target", str(TARGET), "--threads", "1", "--layer-ids", "0,2,3"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MALLOC_MMAP_THRESHOLD_", "1"), patch.setenv("MALLOC_TRIM_THRESHOLD_", "1")
        patch.setattr(train_eagle3, "SHARD_ANSWERS", 8)
        patch.setattr(train_eagle3, "training_prompts", lambda _: prompts)
        patch.setattr(train_eagle3, "held_out_prompts", lambda _: make_prompts(6, seed=2))
        for more in (["--minutes", "0"], [], ["--held-out"]):
            result = CliRunner().invoke(
                train_eagle3.app,
                ["write", *common, "--slots", "4", "--max-tokens", str(MAX_TOKENS), *more],
                catch_exceptions=False,
            )
            assert result.exit_code == 0
    return folder


def test_writing_goes_on_where_it_stopped(work_dir):
    shards = sorted((work_dir / "answers").glob("*.safetensors"))
    names = [[name["id"] for name in train_eagle3._read_names(shard)] for shard in shards]
    assert [len(shard) for shard in names] == [8, 8, 8, 8]
    assert len({name for shard in names for name in shard}) == 32


@pytest.fixture(scope="module")
def texts(work_dir):
    return train_eagle3.Texts(work_dir / "answers")


@pytest.fixture
def head(target):
    torch.manual_seed(0)
    config = make_head_config(target.config, Eagle3Head.architecture, 64) | make_eagle3_keys(512, LAYER_IDS)
    made = Eagle3Head(config, target.model.embed_tokens.weight.detach(), target.lm_head.weight.detach())
    made.set_draft_ids(torch.arange(0, 2048, 4))
    return made


def test_an_epoch_holds_every_text_once_and_can_be_entered_anywhere(texts):
    batches = texts.batches(1, 256)
    assert sorted(id(t) for batch in batches for t in batch) == sorted(id(t) for t in texts.items)
    assert all(len(b) == 1 or max(len(t.token_ids) for t in b) * len(b) <= 256 for b in batches)
    first, second = texts.batches(0, 256), batches
    later = list(train_eagle3._rest_of_epoch(texts, len(first) + 2, 256))
    assert [[id(t) for t in b] for b in later] == [[id(t) for t in b] for b in second[2:]]


@torch.no_grad()
def test_the_loss_is_that_of_the_targets_own_distribution(target, texts, head):
    """Against one text at a time, with the target run anew."""
    chosen, steps = texts.items[:3], 2
    rows = target.lm_head.weight[head.draft_ids].bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses, right = train_eagle3.chain_loss(head, rows, train_eagle3.pad(chosen), steps)
    soft, hard, hits = [[] for _ in range(steps)], [[] for _ in range(steps)], [[] for _ in range(steps)]
    for text in chosen:
        output = target(text.token_ids[None], output_hidden_states=True, use_cache=False)
        probs = output.logits[0].softmax(-1)
        features = text.states[None, :, :-1].flatten(2).float()
        drafted = head.draft(text.token_ids[None, :-1], features, steps)
        for step, (logits, _) in enumerate(drafted):
            log_probs = logits[0].float().log_softmax(-1)
            for chain in range(log_probs.shape[0]):
                position = chain + 1 + step  # whose next token the chain drafts
                if position + 1 < text.prompt_tokens:
                    continue
                own = probs[position, head.draft_ids]
                soft[step].append(-(own * log_probs[chain]).sum())
                if own.max() >= 1 - own.sum():
                    hard[step].append(-log_probs[chain, own.argmax()])
                    hits[step].append(float(log_probs[chain].argmax() == own.argmax()))
                else:
                    hits[step].append(0.0)
    expected = [
        0.5 * torch.stack(s).mean() + 0.5 * (torch.stack(h).mean() if h else 0) for s, h in zip(soft, hard, strict=True)
    ]
    decay = train_eagle3.STEP_DECAY
    total = (expected[0] + decay * expected[1]) / (1 + decay)
    # The states were kept in bfloat16.
    torch.testing.assert_close(losses, total, rtol=0.03, atol=0.01)
    for found, hit in zip(right, hits, strict=True):
        assert found == pytest.approx(sum(hit) / len(hit), abs=0.05)


@torch.no_grad()
def test_acceptance_is_counted_as_serving_would(work_dir, head):
    judged = train_eagle3.Texts(work_dir / "held-out")
    found = train_eagle3.evaluate(head, judged, 512)["overall"]
    accepted = passes = 0
    for text in judged.items:
        position = text.prompt_tokens + 1
        while position + 5 <= len(text.token_ids):
            # The head knows the text up to the token before `position`, and drafts from there on alone.
            known = text.token_ids[:position]
            for kept in range(6):
                if kept == 5:
                    break
                tokens = text.token_ids[: position + kept]
                features = text.states[None, :, :-1].flatten(2)
                padded = torch.nn.functional.pad(tokens, (0, 1))
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    chains = head.draft(padded[None], features[:, : len(padded)], kept + 1)
                token = head.draft_ids[chains[kept].logits[0, len(known) - 2].argmax()]
                if token != text.token_ids[position + kept]:
                    break
            accepted, passes, position = accepted + kept, passes + 1, position + kept + 1
    assert passes > 20 and found == pytest.approx(accepted / passes, abs=0.02)


@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
def test_a_resumed_run_ends_where_an_uninterrupted_one_does(work_dir, tmp_path, target, monkeypatch, kind):
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "1"), monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1")
    monkeypatch.setattr(train_eagle3, "EVALUATE_EVERY", 3)
    monkeypatch.setattr(train_eagle3, "MASK_TOKEN", "<|pad|>")
    common = ["train", "--kind", kind, "--target", str(TARGET), "--threads", "1", "--steps", "6", "--vocabulary", "512"]
    common += ["--intermediate", "64", "--batch-tokens", "512", "--layer-ids", "0,2,3"]
    saved = {}
    for name, calls in (("whole", [[]]), ("resumed", [["--stop-after", "4"], ["--resume"]])):
        folder = tmp_path / name
        folder.mkdir()
        for part in ("answers", "held-out"):
            (folder / part).symlink_to(work_dir / part)
        for more in calls:
            result = CliRunner().invoke(train_eagle3.app, [*common, "--work-dir", str(folder), *more], catch_exceptions=False)
            assert result.exit_code == 0
        saved[name] = load_head(folder / kind, target).state_dict()
        state = torch.load(folder / f"{kind}.checkpoint", weights_only=True)
        assert len(state["losses"]) == 6 and [e["step"] for e in state["evaluations"]] == [3, 6]
        assert sum(state["losses"][-3:]) < sum(state["losses"][:3])
    for key, value in saved["whole"].items():
        torch.testing.assert_close(saved["resumed"][key], value)
    again = CliRunner().invoke(train_eagle3.app, [*common, "--work-dir", str(tmp_path / "whole")])
    assert again.exit_code == 2 and "add --resume to go on" in " ".join(again.output.split())


def test_the_shipped_card_is_rendered_from_its_figures():
    metrics = json.loads((train_eagle3.HEAD / "metrics.json").read_text())
    assert (train_eagle3.HEAD / "README.md").read_text() == train_eagle3.render_card(metrics)
    assert (train_eagle3.HEAD / "model.safetensors").stat().st_size == metrics["bytes"] <= 16e6
