"""Training a pair end to end, and the shipped pair against what its model card says."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import typer
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import train_pair
from train_pair import KINDS, PRESETS, Run, is_held_out, load_model, measure_acceptance, measure_agreement

PAIR = ROOT / "tests" / "pair"
TINY = PRESETS["tiny"]


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# --------------------------------------------------------------------------------------- a pair trained here


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """The tiny preset through the command, from the corpus to the model card."""
    folder = tmp_path_factory.mktemp("trained")
    train_pair.train(out=folder / "pair", work_dir=folder / "work", preset="tiny")
    return folder


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Run:
    return train_pair.prepare(TINY, tmp_path_factory.mktemp("prepared"))


def test_training_lowers_both_losses(trained):
    for name, fall in (("target", 1.5), ("draft", 1.5)):
        losses = torch.load(trained / "work" / f"{name}.checkpoint", weights_only=True)["losses"]
        assert len(losses) == 60
        assert sum(losses[-5:]) / 5 < losses[0] - fall, (name, losses[0], losses[-5:])


def test_distillation_teaches_the_draft_to_agree_with_the_target(trained, prepared):
    target, draft = load_model(trained / "pair" / "target"), load_model(trained / "pair" / "draft")
    held_out = train_pair.encode_documents(prepared.tokenizer, [d for d in prepared.documents if is_held_out(d.source)])
    batches = [train_pair.batch_at(held_out, step, 2048, 128, seed=1) for step in range(2)]
    untrained = train_pair.build_model(TINY.draft, TINY, seed=5).eval()
    assert measure_agreement(target, draft, batches) > measure_agreement(target, untrained, batches) + 0.3


def test_published_pair_loads_and_its_tokenizer_keeps_text(trained):
    for role in ("target", "draft"):
        folder = trained / "pair" / role
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        assert model.config.eos_token_id == train_pair.STOP_IDS and model.dtype == torch.float32
        tokenizer = AutoTokenizer.from_pretrained(folder)
        assert len(tokenizer) == model.config.vocab_size == TINY.vocab_size
        for text in ("", " ", "def f(x):\n\treturn x  \r\n", "naïve — 漢字 \u0000 🙂", "\n\n\n        pass"):
            assert tokenizer.decode(tokenizer(text).input_ids) == text
    record = json.loads((trained / "pair" / "metrics.json").read_text())
    assert record["preset"] == "tiny" and set(record["acceptance"]["mean_accepted"]) == {"overall", *KINDS}
    assert (trained / "pair" / "README.md").read_text() == train_pair.render_card(record)


def test_chat_template_is_what_training_chats_look_like(trained):
    tokenizer = AutoTokenizer.from_pretrained(trained / "pair" / "target")
    messages = [
        {"role": "user", "content": "Explain os.path."},
        {"role": "assistant", "content": "It joins\npaths."},
    ]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == train_pair.render_chat(
        "Explain os.path.", "It joins\npaths."
    )
    prompt = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    assert prompt == train_pair.render_chat("Explain os.path.")
    ids = tokenizer(prompt).input_ids
    assert ids[0] == train_pair.IM_START_ID and ids.count(train_pair.IM_END_ID) == 1


def test_a_resumed_run_ends_with_the_weights_of_an_uninterrupted_one(prepared, tmp_path):
    preset = replace(TINY, target_steps=6, draft_steps=6, written_sequences=16, written_tokens=16, batch_tokens=1024)

    def run_in(name: str) -> Run:
        (tmp_path / name).mkdir()
        return replace(prepared, work_dir=tmp_path / name)

    whole, parts = run_in("whole"), run_in("parts")
    target = train_pair.train_target(preset, whole)
    draft = train_pair.train_draft(preset, whole, target)

    assert train_pair.train_target(preset, parts, stop_after=3) is None
    resumed_target = train_pair.train_target(preset, parts, resume=True)
    assert train_pair.train_draft(preset, parts, resumed_target, stop_after=4) is None
    resumed_draft = train_pair.train_draft(preset, parts, resumed_target, resume=True)
    for one, other in ((target, resumed_target), (draft, resumed_draft)):
        for (name, a), (_, b) in zip(one.named_parameters(), other.named_parameters(), strict=True):
            assert torch.equal(a, b), name
    fresh = train_pair.build_model(preset.target, preset, preset.seed)
    assert not torch.equal(fresh.model.embed_tokens.weight, target.model.embed_tokens.weight)


def test_measured_acceptance_is_that_of_real_speculation(trained, prepared):
    target, draft = load_model(trained / "pair" / "target"), load_model(trained / "pair" / "draft")

    def next_token(model, ids: list[int]) -> int:
        with torch.no_grad():
            return model(torch.tensor([ids])).logits[0, -1].argmax().item()

    for prompt in prepared.prompts[::5]:
        ids = prepared.tokenizer.encode(prompt["text"]).ids
        context, end = [*ids, next_token(target, ids)], len(ids) + 20
        accepted = verifications = 0
        while len(context) + 5 <= end and context[-1] not in train_pair.STOP_IDS:
            chain: list[int] = []
            for _ in range(5):
                chain.append(next_token(draft, context + chain))
            verified: list[int] = []
            for position in range(6):
                verified.append(next_token(target, context + chain[:position]))
                if position == 5 or verified[-1] != chain[position]:
                    break
            if set(verified[:-1]) & set(train_pair.STOP_IDS):
                break
            accepted, verifications, context = (
                accepted + len(verified) - 1,
                verifications + 1,
                context + verified,
            )
        counted = measure_acceptance(target, draft, ids, new_tokens=20)
        assert verifications > 0 and counted == (accepted, verifications), prompt["id"]


# ------------------------------------------------------------------------------------------------- its parts


def test_split_is_by_source_and_prompts_are_held_out(prepared):
    trained_text = "\0".join(d.text for d in prepared.documents if not is_held_out(d.source))
    assert {p["kind"] for p in prepared.prompts} == set(KINDS) and len(prepared.prompts) == TINY.prompts
    for prompt in prepared.prompts:
        assert is_held_out(prompt["source"]) and prompt["text"] not in trained_text
    assert 0.02 < sum(is_held_out(f"module_{i}.py") for i in range(2000)) / 2000 < 0.12


def test_corpus_is_the_same_each_time_and_names_no_build_path(prepared):
    again = train_pair.collect_documents(TINY.corpus_bytes, TINY.seed)
    assert again == prepared.documents
    assert not any("sysconfigdata" in d.source or "/test/" in f"/{d.source}" for d in again)
    assert {d.kind for d in again} == set(KINDS)


def test_each_epoch_visits_every_window_once_in_another_order():
    stream = torch.arange(1000, dtype=torch.int16)
    epochs = []
    for epoch in range(2):
        batches = [train_pair.batch_at(stream, epoch * 24 + i, 40, 10, seed=3) for i in range(24)]
        starts = torch.cat([b[:, 0] for b in batches])
        assert len(set(starts.tolist())) == 96 and len(set((starts % 10).tolist())) == 1
        assert all((b.diff(dim=1) == 1).all() for b in batches)
        epochs.append(starts.tolist())
    assert epochs[0] != epochs[1]
    assert torch.equal(train_pair.batch_at(stream, 7, 40, 10, 3), train_pair.batch_at(stream, 7, 40, 10, 3))
    with pytest.raises(ValueError, match="cannot fill a batch"):
        train_pair.batch_at(stream[:30], 0, 40, 10, 3)


@pytest.mark.parametrize("sizes", [(256, 64), (64, 256), (96, 96)])
def test_orthogonalize_pushes_singular_values_towards_one(sizes):
    torch.manual_seed(0)
    matrix = torch.randn(sizes) @ torch.diag(torch.logspace(0, -1, sizes[1]))
    values = torch.linalg.svdvals(train_pair.orthogonalize(matrix))
    assert values.max() < 1.3 and values.median() > 0.6
    cosine = torch.nn.functional.cosine_similarity(matrix.flatten(), train_pair.orthogonalize(matrix).flatten(), dim=0)
    assert cosine > 0.5


def test_distillation_loss_is_lowest_where_draft_and_target_agree():
    target = train_pair.build_model(TINY.target, TINY, seed=0).eval()
    other = train_pair.build_model(TINY.target, TINY, seed=1).eval()
    with torch.no_grad():
        target.model.embed_tokens.weight.mul_(20)  # a distribution that is far from flat
        tokens = torch.randint(TINY.vocab_size, (2, 33), generator=torch.Generator().manual_seed(0))
        log_probs = target(tokens[:, :-1]).logits.log_softmax(-1)
        expected = -0.5 * log_probs.max(-1).values.mean()  # no divergence, only what remains of the cross-entropy
        torch.testing.assert_close(train_pair.distillation_loss(target, target, tokens), expected)
        assert train_pair.distillation_loss(other, target, tokens) > expected + 0.5


def test_command_refuses_what_it_cannot_do(tmp_path):
    with pytest.raises(typer.BadParameter, match="--preset huge: choose one of full, quick, tiny"):
        train_pair.train(out=tmp_path, work_dir=tmp_path, preset="huge")
    (tmp_path / "target.checkpoint").touch()
    with pytest.raises(typer.BadParameter, match="add --resume"):
        train_pair.train(out=tmp_path, work_dir=tmp_path, preset="tiny")
    (tmp_path / "settings.json").write_text("{}")
    with pytest.raises(typer.BadParameter, match="other settings"):
        train_pair.train(out=tmp_path, work_dir=tmp_path, preset="tiny", resume=True)


# ------------------------------------------------------------------------------------------ the shipped pair


@pytest.fixture(scope="module")
def metrics() -> dict:
    return json.loads((PAIR / "metrics.json").read_text())


@pytest.fixture(scope="module")
def prompts() -> list[dict]:
    return [json.loads(line) for line in (PAIR / "prompts.jsonl").read_text().splitlines()]


def test_shipped_pair_has_the_shapes_that_serving_needs(metrics):
    total_bytes = 0
    for role in ("target", "draft"):
        config = json.loads((PAIR / role / "config.json").read_text())
        assert config["architectures"] == ["LlamaForCausalLM"] and config["head_dim"] == 64
        assert config["num_attention_heads"] == 2 * config["num_key_value_heads"]
        with safe_open(PAIR / role / "model.safetensors", "pt") as opened:
            tensors = [opened.get_tensor(name) for name in opened.keys()]  # noqa: SIM118 - not a dict
        assert {t.dtype for t in tensors} == {torch.bfloat16}
        assert sum(t.numel() for t in tensors) == metrics["parameters"][role]
        total_bytes += (PAIR / role / "model.safetensors").stat().st_size
    assert total_bytes <= 16e6
    assert 4e6 < metrics["parameters"]["target"] < 6e6 and 0.4e6 < metrics["parameters"]["draft"] < 0.65e6
    assert (PAIR / "target/tokenizer.json").read_bytes() == (PAIR / "draft/tokenizer.json").read_bytes()


def test_shipped_prompts_are_mixed_and_held_out(prompts, metrics):
    tokenizer = AutoTokenizer.from_pretrained(PAIR / "target")
    assert len(prompts) >= 128 and len({p["id"] for p in prompts}) == len(prompts)
    assert {p["kind"] for p in prompts} == set(KINDS)
    assert {p["source"] for p in prompts} == set(metrics["prompts"]["sources"])
    lengths = [len(tokenizer(p["text"]).input_ids) for p in prompts]
    assert min(lengths) < 20 and max(lengths) > 300 and max(lengths) <= 450
    for prompt in prompts:
        assert is_held_out(prompt["source"])
        if prompt["kind"] == "chat":
            rendered = tokenizer.apply_chat_template(prompt["messages"], tokenize=False, add_generation_prompt=True)
            assert rendered == prompt["text"]


def test_model_card_is_rendered_from_metrics(metrics):
    assert (PAIR / "README.md").read_text() == train_pair.render_card(metrics)


def test_shipped_pair_accepts_what_its_card_says(prompts, metrics):
    recorded = metrics["acceptance"]["accepted_and_verifications"]
    assert train_pair.summarize_acceptance(prompts, recorded) == metrics["acceptance"]["mean_accepted"]
    mean_accepted = dict(metrics["acceptance"]["mean_accepted"])
    assert mean_accepted.pop("overall") >= 2.0
    assert max(mean_accepted.values()) - min(mean_accepted.values()) > 0.3, "selection lives from differences"

    target, draft = load_model(PAIR / "target"), load_model(PAIR / "draft")
    tokenizer = AutoTokenizer.from_pretrained(PAIR / "target")
    same, chosen = 0, prompts[:: len(prompts) // 8]
    for prompt in chosen:
        ids = tokenizer(prompt["text"]).input_ids
        counted = measure_acceptance(target, draft, ids, metrics["acceptance"]["new_tokens"])
        same += list(counted) == recorded[prompt["id"]]
    # Another CPU sums in another order: a near-tie may fall the other way and change the rest of that text.
    assert same >= 0.8 * len(chosen), f"{same} of {len(chosen)} prompts as recorded"


def test_shipped_pair_is_trained_and_not_only_agreeing(metrics):
    for name in ("target", "draft"):
        history = metrics["training"][name]
        assert history["last_loss"] < history["first_loss"] - 1.5
    uniform = torch.tensor(float(metrics["settings"]["vocab_size"])).log().item()
    target_loss, draft_loss = metrics["held_out_loss"]["target"], metrics["held_out_loss"]["draft"]
    assert target_loss < draft_loss < uniform - 1
