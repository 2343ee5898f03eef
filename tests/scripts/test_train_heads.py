"""Draft heads: what they compute, their training end to end, and the shipped ones against their model card."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import typer
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRotaryEmbedding

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import train_heads
import train_pair
from inflate_model import InflatedShape, inflate
from mtp_checkpoint import make_mtp_checkpoint
from train_heads import PRESETS, Round, RoundsTrainer, count_accepted, make_head, write_greedily

from tetris_sglang.tools.distill.heads import BLOCKS, HEADS, MTP_PREFIX, Head, RmsNorm, load_head, read_target, save_head

PAIR = ROOT / "tests" / "pair"
TINY = PRESETS["tiny"]
KINDS = list(HEADS)
MIN_ACCEPTED = {"dflash": 1.0, "dflare": 0.3}
"""Of five, where it is not 2: blocks are harder to learn than chains, and these were trained for minutes."""


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    return train_pair.load_model(PAIR / "target")


@pytest.fixture(scope="module")
def prompts() -> list[dict]:
    return [json.loads(line) for line in (PAIR / "prompts.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def heads_metrics() -> dict:
    return json.loads((PAIR / "metrics.json").read_text())["heads"]


def random_head(target: LlamaForCausalLM, kind: str) -> Head:
    """Weights far from those a head starts with, so that every part matters."""
    head = make_head(target, kind, TINY, torch.arange(1, 2048, 2))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in head.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * 0.2 + 1 if parameter.ndim == 1 else noise * 0.06)
    return head.eval()


def some_tokens(target: LlamaForCausalLM, *sizes: int) -> Tensor:
    return torch.randint(5, target.config.vocab_size, sizes, generator=torch.Generator().manual_seed(4))


# -------------------------------------------------------------------------------------- what a head computes


def serve_one_chain(head: Head, target: LlamaForCausalLM, tokens: Tensor, last: int, steps: int) -> list[Tensor]:
    """The logits of one chain as a server computes them, on transformers' layers.

    The head's sequence is its first-step inputs at positions 0 to `last`, then one entry per drafted token with
    its own hidden state; every step attends to all entries so far.
    """
    config = LlamaConfig(**{k: v for k, v in head.config.items() if k != "architectures"})
    config.intermediate_size = head.layer.mlp.gate_proj.out_features
    config._attn_implementation = "eager"
    attention, mlp = LlamaAttention(config, 0), LlamaMLP(config)
    ours = head.layer.self_attn
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):  # eagle3's read two hidden states
        setattr(attention, name, getattr(ours, name))
    mlp.load_state_dict(head.layer.mlp.state_dict())
    rotary = LlamaRotaryEmbedding(config)
    states = read_target(target, tokens[None])

    def norm(x: Tensor, module: RmsNorm) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + head.config["rms_norm_eps"]).rsqrt() * module.weight

    if head.kind == "eagle3":
        captured = []
        hooks = [
            target.model.layers[i].register_forward_hook(lambda _m, _a, out: captured.append(out))
            for i in head.config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
        ]
        target.model(tokens[None], use_cache=False)
        for hook in hooks:
            hook.remove()
        hidden = [head.fc(torch.cat(captured, -1))[0, : last + 1]]
    else:
        hidden = [states.last[0, : last + 1]]
    found = []
    for step in range(steps):
        count = last + 1 + step
        embeds, features = target.model.embed_tokens(tokens[1 : count + 1]), torch.cat(hidden)
        if head.kind == "eagle":
            residual = x = F.linear(torch.cat((embeds, features), -1), head.fc.weight, head.fc.bias)
        elif head.kind == "eagle3":
            residual = features
            x = torch.cat((norm(embeds, head.midlayer.input_layernorm), norm(features, head.midlayer.hidden_norm)), -1)
        else:
            embeds = torch.cat((torch.zeros_like(embeds[:1]), embeds[1:]))
            parts = norm(features, head.hidden_layernorm), norm(embeds, head.token_layernorm)
            residual = F.linear(torch.cat(parts, -1), head.input_proj.weight)
            x = norm(residual, head.block.input_layernorm)
        mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
        positions = torch.arange(count)[None]
        attended = attention(x[None], position_embeddings=rotary(x, positions), attention_mask=mask)[0][0]
        residual = residual + attended
        out = (residual + mlp(norm(residual, head.layer.post_attention_layernorm)))[-1:]
        if head.kind == "eagle":
            found.append(target.lm_head(out)[0])
        elif head.kind == "eagle3":
            found.append(head.lm_head(norm(out, head.norm))[0])
        else:
            out = norm(out, head.final_layernorm)
            found.append(target.lm_head(out)[0])
        hidden.append(out)
    return found


def serve_one_block(head: Head, target: LlamaForCausalLM, tokens: Tensor, last: int, steps: int) -> list[Tensor]:
    """The logits of a block of `steps` drafts behind token `last` + 1, row by row, on transformers' rotary embedding."""
    config = LlamaConfig(**{k: v for k, v in head.config.items() if k != "architectures"})
    rotary = LlamaRotaryEmbedding(config)

    def norm(x: Tensor, module: RmsNorm) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + head.config["rms_norm_eps"]).rsqrt() * module.weight

    def heads_of(x: Tensor, linear: torch.nn.Linear, module: RmsNorm | None) -> Tensor:
        split = linear(x).view(len(x), -1, config.head_dim)
        return split if module is None else norm(split, module)

    def turn(x: Tensor, positions: Tensor) -> Tensor:
        cos, sin = rotary(x, positions[None])
        half = config.head_dim // 2
        return x * cos[0][:, None] + torch.cat((-x[..., half:], x[..., :half]), -1) * sin[0][:, None]

    inputs = read_target(target, tokens[None]).layer_inputs
    read = [inputs[i + 1][0, : last + 1] for i in head.layer_ids]
    mask = target.model.embed_tokens.weight[head.mask_token]
    x = torch.stack([target.model.embed_tokens.weight[tokens[last + 1]], *[mask] * steps])
    known, places = torch.arange(last + 1), torch.arange(last + 1, last + 2 + steps)
    for index, layer in enumerate(head.layers):
        ours, h = layer.self_attn, norm(x, layer.input_layernorm)
        if head.kind == "dflash":
            context, of_keys, of_values = head.fc(torch.cat(read, -1)), ours.k_proj, ours.v_proj
        else:
            shares = head.layer_fusion_weights[index].exp()
            context = sum(share * state for share, state in zip(shares, read, strict=True)) / shares.sum()
            of_keys, of_values = ours.k_proj_target, ours.v_proj_target
        context = norm(context, head.hidden_norm)
        q = turn(heads_of(h, ours.q_proj, ours.q_norm), places)
        own = turn(heads_of(h, ours.k_proj, ours.k_norm), places)
        k = torch.cat((turn(heads_of(context, of_keys, ours.k_norm), known), own))
        v = torch.cat((heads_of(context, of_values, None), heads_of(h, ours.v_proj, None)))
        group = ours.heads // ours.kv_heads
        rows = []
        for row in q:
            mixed = [
                (k[:, n // group] @ row[n] / config.head_dim**0.5).softmax(0) @ v[:, n // group] for n in range(ours.heads)
            ]
            rows.append(torch.cat(mixed))
        x = x + ours.o_proj(torch.stack(rows))
        x = x + layer.mlp(norm(x, layer.post_attention_layernorm))
    return [target.lm_head(row) for row in norm(x, head.norm)[1:]]


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_all_chains_at_once_are_the_chains_that_serving_drafts(target, kind):
    head, steps = random_head(target, kind), 4
    tokens = some_tokens(target, 2, 24)
    drafted = head.draft(tokens, head.features(read_target(target, tokens)), steps)
    assert drafted[0].logits.shape[:2] == (2, 20)
    for row, last in ((0, 0), (0, 1), (0, 19), (1, 11)):
        serve = serve_one_block if kind in BLOCKS else serve_one_chain
        expected = serve(head, target, tokens[row], last, steps)
        for step in range(steps):
            found = drafted[step].logits[row, last]
            assert (found - expected[step]).abs().max() <= 2e-5 * expected[step].abs().max(), (
                row,
                last,
                step,
            )
    with pytest.raises(ValueError, match="too few"):
        head.draft(tokens[:, :4], head.features(read_target(target, tokens[:, :4])), steps)


@torch.no_grad()
def test_features_are_what_sglang_captures(target):
    tokens, outputs = some_tokens(target, 1, 9), []
    hooks = [layer.register_forward_hook(lambda _m, _a, out: outputs.append(out)) for layer in target.model.layers]
    states = read_target(target, tokens)
    for hook in hooks:
        hook.remove()
    assert len(states.layer_inputs) == 5
    for index in range(4):
        assert torch.equal(states.layer_inputs[index + 1], outputs[index])
    assert torch.equal(states.last, target.model.norm(outputs[4]))
    assert torch.equal(states.logits, target(tokens).logits)
    head = random_head(target, "eagle3")
    assert torch.equal(head.features(states), torch.cat([outputs[i] for i in (0, 2, 3)], -1))


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_saved_head_is_the_same_head(target, kind, tmp_path):
    head = random_head(target, kind)
    train_pair.round_to_bfloat16(head)
    save_head(head, tmp_path)
    loaded = load_head(tmp_path, target)
    tokens = some_tokens(target, 1, 12)
    features = head.features(read_target(target, tokens))
    assert torch.equal(head.draft(tokens, features, 2)[1].logits, loaded.draft(tokens, features, 2)[1].logits)
    assert loaded.config == head.config
    names = set(load_file(tmp_path / "model.safetensors"))
    assert not any("embed" in name for name in names)  # the target's
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace(HEADS[kind].architecture, "LlamaForCausalLM"))
    with pytest.raises(ValueError, match="LlamaForCausalLM is not a head"):
        load_head(tmp_path, target)


def test_the_head_vocabulary_is_the_most_frequent_tokens_and_its_map_stores_differences(target):
    stream = torch.tensor([5] * 6 + [7] * 3 + [9] * 2 + [11], dtype=torch.int16)
    written = torch.tensor([[11, 11, 11], [9, 9, 5]], dtype=torch.int16)
    ids = train_heads.choose_draft_ids(stream, written, 16, 3)
    assert ids.tolist() == [5, 9, 11]  # shares 8/12, 6/12 and 7/12 against 3/12 of token 7
    head = make_head(target, "eagle3", TINY, torch.arange(0, 2048, 2))
    assert head.d2t.tolist()[:3] == [0, 1, 2] and head.t2d[:4].tolist() == [True, False, True, False]
    assert torch.equal(head.draft_ids, torch.arange(0, 2048, 2))
    assert torch.equal(head.lm_head.weight, target.lm_head.weight[::2])


# ------------------------------------------------------------------------------------------ heads trained here


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """The tiny preset through the command, for the shipped target and a few of its prompts."""
    folder = tmp_path_factory.mktemp("heads")
    pair = folder / "pair"
    shutil.copytree(PAIR / "target", pair / "target")
    shutil.copy(PAIR / "metrics.json", pair)
    chosen = (PAIR / "prompts.jsonl").read_text().splitlines()[::20]
    (pair / "prompts.jsonl").write_text("\n".join(chosen) + "\n")
    train_heads.train(work_dir=folder / "work", pair=pair, out=folder / "out", preset="tiny", kinds=",".join(KINDS))
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_training_lowers_the_loss_on_both_kinds_of_text(trained, kind):
    losses = torch.load(trained / "work" / f"{kind}.checkpoint", weights_only=True)["losses"]
    assert len(losses) == 12
    for first in (0, 1):  # training text and text that the target wrote take turns
        assert losses[first + 10] < losses[first] - 0.2, losses


def test_published_heads_load_and_are_recorded(trained, target):
    metrics = json.loads((trained / "out" / "metrics.json").read_text())
    heads = metrics["heads"]["heads"]
    assert list(heads) == KINDS
    assert (trained / "out" / "README.md").read_text() == train_pair.render_card(metrics)
    for kind in KINDS:
        assert set(heads[kind]["acceptance"]["mean_accepted"]) == {"overall", *train_pair.KINDS}
        head = load_head(trained / "out" / kind, target)
        assert sum(p.numel() for p in head.parameters()) == heads[kind]["parameters"]


def test_a_later_run_for_one_kind_keeps_the_others(trained, tmp_path):
    shutil.copytree(trained / "out", tmp_path / "out")
    shutil.copytree(trained / "work" / "mtp", tmp_path / "work" / "mtp")
    before = json.loads((tmp_path / "out" / "metrics.json").read_text())["heads"]
    changed = json.loads(json.dumps(before))
    changed["heads"] = {"mtp": changed["heads"]["mtp"] | {"parameters": 1}}
    train_heads.publish(tmp_path / "work", tmp_path / "out", tmp_path / "out", changed)
    after = json.loads((tmp_path / "out" / "metrics.json").read_text())["heads"]["heads"]
    assert after["eagle"] == before["heads"]["eagle"] and after["mtp"]["parameters"] == 1
    changed |= {"target_sha256": "of another target", "heads": {"mtp": changed["heads"]["mtp"]}}
    train_heads.publish(tmp_path / "work", tmp_path / "out", tmp_path / "out", changed)
    assert list(json.loads((tmp_path / "out" / "metrics.json").read_text())["heads"]["heads"]) == ["mtp"]


def test_a_resumed_head_ends_with_the_weights_of_an_uninterrupted_one(target, tmp_path):
    stream, written = some_tokens(target, 5000).to(torch.int16), some_tokens(target, 8, 70).to(torch.int16)
    text = train_heads.Text(stream, written, torch.arange(1024))
    preset = replace(
        TINY,
        batch_tokens=256,
        heads={k: replace(h, rounds=(Round(3, 2), Round(3, 1))) for k, h in TINY.heads.items()},
    )
    for kind in KINDS:
        for name in ("whole", "parts"):
            (tmp_path / name).mkdir(exist_ok=True)
        whole = train_heads.train_head(kind, target, text, preset, tmp_path / "whole")
        in_parts = (kind, target, text, preset, tmp_path / "parts")
        assert train_heads.train_head(*in_parts, stop_after=4) is None
        resumed = train_heads.train_head(*in_parts, resume=True)
        fresh = make_head(target, kind, preset, text.draft_ids).state_dict()
        for (name, a), (_, b) in zip(whole.named_parameters(), resumed.named_parameters(), strict=True):
            assert torch.equal(a, b), (kind, name)
            assert not torch.equal(a, fresh[name]), (kind, name)


def test_the_learning_rate_rises_and_falls_in_each_round(target, tmp_path):
    head = make_head(target, "eagle", TINY, torch.arange(4))
    trainer = RoundsTrainer(head, (Round(40, 5), Round(64, 2)), tmp_path / "checkpoint")
    rates, unrolled = [], []
    for step in range(104):
        trainer.step_index = step
        rates.append(trainer.rate())
        unrolled.append(trainer.locate(step)[1].unrolled)
    assert unrolled == [5] * 40 + [2] * 64
    assert rates[0] == rates[40] == 1 / 16 and rates[20] == rates[40 + 32] == 1.0
    assert rates[39] == pytest.approx(2 / 40) and rates[103] == pytest.approx(2 / 64)
    alone = train_pair.Trainer(head, 40, tmp_path / "checkpoint")
    for step in range(40):  # one round is the pair's schedule
        alone.step_index = step
        assert alone.rate() == pytest.approx(rates[step])


def test_command_refuses_what_it_cannot_do(tmp_path):
    with pytest.raises(typer.BadParameter, match="--preset huge: choose one of full, tiny"):
        train_heads.train(work_dir=tmp_path, preset="huge")
    with pytest.raises(typer.BadParameter, match="--kinds medusa: choose from eagle, eagle3, mtp, dflash, dflare"):
        train_heads.train(work_dir=tmp_path, kinds="eagle,medusa")
    (tmp_path / "eagle.checkpoint").touch()
    with pytest.raises(typer.BadParameter, match="holds a run of eagle: add --resume"):
        train_heads.train(work_dir=tmp_path, kinds="eagle")
    (tmp_path / "heads-settings.json").write_text("{}")
    with pytest.raises(typer.BadParameter, match="other settings"):
        train_heads.train(work_dir=tmp_path, kinds="eagle", resume=True)


# ---------------------------------------------------------------------------------------- the MTP checkpoint


@pytest.mark.parametrize("size", ["shipped", "inflated"])
@torch.no_grad()
def test_mtp_checkpoint_is_the_target_with_a_layer(target, prompts, tmp_path, size):
    base, shape = PAIR / "target", InflatedShape(512, 6, 8, 720)
    if size == "inflated":
        inflate(PAIR / "target", tmp_path / "large", shape)
        base = tmp_path / "large"
    make_mtp_checkpoint(base, PAIR / "mtp", tmp_path / "joined")
    config = json.loads((tmp_path / "joined" / "config.json").read_text())
    assert config["architectures"] == ["MiMoForCausalLM"] and config["num_nextn_predict_layers"] == 1
    index = json.loads((tmp_path / "joined" / "model.safetensors.index.json").read_text())["weight_map"]
    assert {(tmp_path / "joined" / name).exists() for name in index.values()} == {True}

    # SGLang serves MiMo's layers as Qwen2's.
    as_qwen = Qwen2Config(**{k: v for k, v in config.items() if k not in ("architectures", "model_type")})
    joined = Qwen2ForCausalLM.from_pretrained(tmp_path / "joined", config=as_qwen, dtype=torch.float32).eval()
    assert joined.model.layers[0].self_attn.q_proj.bias is not None
    expected_model = train_pair.load_model(base)
    tokens = some_tokens(target, 2, 40)
    torch.testing.assert_close(joined(tokens).logits, expected_model(tokens).logits, rtol=1e-6, atol=1e-5)

    tokenizers = [AutoTokenizer.from_pretrained(folder) for folder in (PAIR / "target", tmp_path / "joined")]
    one, other = (t([p["text"] for p in prompts]).input_ids for t in tokenizers)
    assert one == other

    layer = load_file(tmp_path / "joined" / "model-mtp.safetensors")
    biases = {name for name in layer if name.endswith(".bias")}
    assert len(biases) == 3 * (config["num_hidden_layers"] + 1) and not any(layer[n].any() for n in biases)
    (tmp_path / "layer").mkdir()
    save_file(
        {n: t for n, t in layer.items() if n.startswith(MTP_PREFIX) and n not in biases},
        tmp_path / "layer/a.safetensors",
    )
    shutil.copy(tmp_path / "joined" / "config.json", tmp_path / "layer")
    large, small = load_head(tmp_path / "layer", expected_model), load_head(PAIR / "mtp", target)
    expected = small.draft(tokens, small.features(read_target(target, tokens)), 3)
    found = large.draft(tokens, large.features(read_target(expected_model, tokens)), 3)
    for a, b in zip(expected, found, strict=True):
        assert (a.logits - b.logits).abs().max() <= 2e-5 * a.logits.abs().max()


def test_mtp_checkpoint_refuses_a_layer_of_another_target(tmp_path):
    shutil.copytree(PAIR / "mtp", tmp_path / "mtp")
    path = tmp_path / "mtp" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"vocab_size": 4096}))
    with pytest.raises(ValueError, match="vocab_size is 2048"):
        make_mtp_checkpoint(PAIR / "target", tmp_path / "mtp", tmp_path / "out")
    path.write_text(json.dumps(config | {"num_key_value_heads": 4}))
    with pytest.raises(ValueError, match="other head groups"):
        make_mtp_checkpoint(PAIR / "target", tmp_path / "mtp", tmp_path / "out")
    with pytest.raises(FileExistsError, match="not empty"):
        make_mtp_checkpoint(PAIR / "target", PAIR / "mtp", tmp_path / "mtp")
    with pytest.raises(ValueError, match="only MiMoForCausalLM"):
        make_mtp_checkpoint(PAIR / "target", PAIR / "eagle", tmp_path / "out")
    assert not (tmp_path / "out").exists()


# ----------------------------------------------------------------------------------------- the shipped heads


def test_shipped_heads_are_small_and_belong_to_the_shipped_target(heads_metrics):
    assert heads_metrics["target_sha256"] == train_heads.hash_file(PAIR / "target" / "model.safetensors")
    assert list(heads_metrics["heads"]) == KINDS
    for kind, recorded in heads_metrics["heads"].items():
        weights = PAIR / kind / "model.safetensors"
        assert weights.stat().st_size == recorded["bytes"] <= 1.6e6
        dtypes = {name: t.dtype for name, t in load_file(weights).items()}
        assert {d for name, d in dtypes.items() if name not in ("d2t", "t2d")} == {torch.bfloat16}
    assert sum(path.stat().st_size for path in PAIR.rglob("*.safetensors")) <= 16e6


def test_shipped_configs_say_what_sglang_needs():
    configs = {kind: json.loads((PAIR / kind / "config.json").read_text()) for kind in KINDS}
    target = json.loads((PAIR / "target" / "config.json").read_text())
    for kind, config in configs.items():
        assert config["architectures"] == [HEADS[kind].architecture]
        for key in ("hidden_size", "head_dim", "vocab_size", "rope_parameters", "rms_norm_eps"):
            assert config[key] == target[key], (kind, key)
    # SGLang deletes and replaces embedding and head one after the other, which fails where they are one.
    assert not configs["eagle"]["tie_word_embeddings"] and not configs["eagle3"]["tie_word_embeddings"]
    layer_ids = configs["eagle3"]["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    # Captured before layer i + 1, so the last layer's output never is; in ascending order, each once.
    assert len(layer_ids) == 3 and layer_ids == sorted(set(layer_ids))
    assert max(layer_ids) + 1 < target["num_hidden_layers"]


def test_shipped_heads_accept_what_their_card_says(target, prompts, heads_metrics):
    recorded = {k: h["acceptance"]["accepted_and_verifications"] for k, h in heads_metrics["heads"].items()}
    heads = {kind: load_head(PAIR / kind, target) for kind in KINDS}
    tokenizer = Tokenizer.from_file(str(PAIR / "target" / "tokenizer.json"))
    same, chosen = dict.fromkeys(KINDS, 0), prompts[3 :: len(prompts) // 8]
    for prompt in chosen:
        ids = tokenizer.encode(prompt["text"]).ids
        text = write_greedily(target, ids, heads_metrics["new_tokens"])
        for kind, head in heads.items():
            same[kind] += list(count_accepted(target, head, text, len(ids))) == recorded[kind][prompt["id"]]
    # Another CPU sums in another order: a near-tie may fall the other way and change the rest of that text.
    assert all(count >= 0.8 * len(chosen) for count in same.values()), (same, len(chosen))
    for kind in KINDS:
        mean = heads_metrics["heads"][kind]["acceptance"]["mean_accepted"]
        assert train_pair.summarize_acceptance(prompts, recorded[kind]) == mean
        assert mean["overall"] >= MIN_ACCEPTED.get(kind, 2.0), kind


@torch.no_grad()
def test_counted_acceptance_is_that_of_drafting_and_verifying_in_turn(target, prompts):
    heads = [load_head(PAIR / kind, target) for kind in KINDS]
    tokenizer = Tokenizer.from_file(str(PAIR / "target" / "tokenizer.json"))
    for prompt in prompts[5::80]:
        ids = tokenizer.encode(prompt["text"]).ids[-60:]
        text = write_greedily(target, ids, 24)
        for head in heads:
            position, accepted, verifications = len(ids) + 1, 0, 0
            while position + 5 <= text.shape[1]:
                context = text[0, :position].tolist()
                for _ in range(5):  # the head's own tokens this time
                    tokens = torch.tensor(context)
                    steps = len(context) - position + 1
                    if head.kind in BLOCKS:
                        logits = serve_one_block(head, target, tokens, position - 2, 5)[steps - 1]
                    else:
                        logits = serve_one_chain(head, target, tokens, position - 2, steps)[-1]
                    token = logits.argmax()
                    context.append(int(token if head.draft_ids is None else head.draft_ids[token]))
                agrees = [a == b for a, b in zip(context[position:], text[0, position:].tolist(), strict=False)]
                kept = agrees.index(False) if False in agrees else 5
                accepted, verifications, position = accepted + kept, verifications + 1, position + kept + 1
            assert count_accepted(target, head, text, len(ids)) == (accepted, verifications), prompt["id"]
