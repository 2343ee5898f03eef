"""Inflated models are the small model's function, to the last bits, at any larger shape."""

from __future__ import annotations

import json
import multiprocessing
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import inflate_model
from inflate_model import InflatedShape, ensure_inflated, inflate, parse_shape

from tetris_sglang.tools.distill.head_files import load_head
from tetris_sglang.tools.distill.heads import Head, read_target

PAIR = ROOT / "tests" / "pair"


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    """A random Llama whose norm weights are far from 1 and whose eps matters, so that mistakes show."""
    return write_small(tmp_path_factory.mktemp("small") / "tied", tied=True)


def write_small(folder: Path, tied: bool) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=101, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=128, tie_word_embeddings=tied,
        rms_norm_eps=1e-2,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.rand_like(parameter) + 0.5 if "norm" in name else torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    return folder


def load(folder: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def assert_same_function(small: Path, large: Path, prompts: list[list[int]], new_tokens: int = 8) -> float:
    """The same greedy continuation for each prompt, and logits within 1e-5 of the largest one.

    Returns: the largest relative difference.
    """
    one, other = load(small), load(large)
    largest = 0.0
    for prompt in prompts:
        tokens = torch.tensor([prompt])
        with torch.no_grad():
            expected = one(tokens).logits
            difference = (other(tokens).logits - expected).abs().max() / expected.abs().max().clamp(min=1)
        largest = max(largest, difference.item())
        assert largest <= 1e-5, f"logits differ by {largest} of the largest"
        kept = {
            "max_new_tokens": new_tokens,
            "do_sample": False,
            "pad_token_id": 0,
            "attention_mask": torch.ones_like(tokens),
        }
        assert one.generate(tokens, **kept).tolist() == other.generate(tokens, **kept).tolist()
    return largest


def random_prompts(count: int = 3) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(101, (7 * i + 1,), generator=generator).tolist() for i in range(count)]


@pytest.mark.parametrize(
    "shape",
    [
        InflatedShape(48, 2, 4, 80),  # the same size
        InflatedShape(192, 2, 4, 80),  # width alone
        InflatedShape(48, 5, 4, 80),  # layers alone
        InflatedShape(48, 2, 12, 80),  # heads alone
        InflatedShape(48, 2, 4, 81),  # MLP alone
        InflatedShape(66, 3, 6, 97),
        InflatedShape(154, 4, 14, 333),
        InflatedShape(1000, 3, 4, 80),
    ],
)
def test_inflated_model_is_the_same_function(small, tmp_path, shape):
    inflate(small, tmp_path / "large", shape)
    assert_same_function(small, tmp_path / "large", random_prompts())
    config = json.loads((tmp_path / "large" / "config.json").read_text())
    assert (config["hidden_size"], config["num_hidden_layers"]) == (shape.hidden, shape.layers)
    assert (config["num_attention_heads"], config["intermediate_size"]) == (shape.heads, shape.intermediate)
    assert config["num_key_value_heads"] * 2 == shape.heads and config["head_dim"] == 16


def test_untied_head_is_embedded_too(tmp_path):
    small = write_small(tmp_path / "untied", tied=False)
    inflate(small, tmp_path / "large", InflatedShape(96, 3, 6, 100))
    assert_same_function(small, tmp_path / "large", random_prompts())


@pytest.mark.parametrize("role", ["target", "draft"])
def test_shipped_models_survive_inflation_on_real_prompts(tmp_path, role):
    source = PAIR / role
    config = json.loads((source / "config.json").read_text())
    shape = InflatedShape(
        2 * config["hidden_size"], config["num_hidden_layers"] + 1, 2 * config["num_attention_heads"],
        config["intermediate_size"] + 100,
    )  # fmt: skip
    inflate(source, tmp_path / "large", shape)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "large")
    lines = (PAIR / "prompts.jsonl").read_text().splitlines()
    prompts = [tokenizer(json.loads(line)["text"]).input_ids for line in lines[:: len(lines) // 4]]
    assert_same_function(source, tmp_path / "large", prompts)


def test_scaling_by_a_power_of_four_is_exact_in_bfloat16(tmp_path):
    source = PAIR / "draft"
    config = json.loads((source / "config.json").read_text())
    shape = InflatedShape(4 * config["hidden_size"], 2, config["num_attention_heads"], config["intermediate_size"])
    inflate(source, tmp_path / "large", shape, dtype="bfloat16")
    assert_same_function(source, tmp_path / "large", [list(range(5, 60))])


def draft_on(target: LlamaForCausalLM, head: Head, tokens: torch.Tensor) -> list[torch.Tensor]:
    """The logits of chains of five from every position, and at the end the features they began with."""
    with torch.no_grad():
        features = head.features(read_target(target, tokens))
        return [*head.draft(tokens, features, 5), features]


@pytest.mark.parametrize("hidden", [384, 1024])
def test_an_inflated_head_drafts_the_same_for_the_inflated_target(tmp_path, hidden):
    shape = InflatedShape(hidden, 6, 8, 720)
    inflate(PAIR / "target", tmp_path / "target", shape)
    inflate(PAIR / "eagle3", tmp_path / "head", shape)
    small, large = load(PAIR / "target"), load(tmp_path / "target")
    small_head, large_head = load_head(PAIR / "eagle3", small), load_head(tmp_path / "head", large)
    lines = (PAIR / "prompts.jsonl").read_text().splitlines()
    tokenizer = AutoTokenizer.from_pretrained(PAIR / "target")
    tokens = torch.tensor([tokenizer(json.loads(lines[30])["text"]).input_ids])
    *expected, features = draft_on(small, small_head, tokens)
    *found, large_features = draft_on(large, large_head, tokens)
    for one, other in zip(expected, found, strict=True):
        assert (one - other).abs().max() <= 2e-5 * one.abs().max()
        assert torch.equal(one.argmax(-1), other.argmax(-1))
    # The real dimensions come first in each hidden state, and the added ones say nothing.
    parts = large_features.unflatten(-1, (-1, hidden))
    assert not parts[..., 256:].any()
    torch.testing.assert_close(parts[..., :256].flatten(-2), features, rtol=1e-4, atol=1e-4)
    assert torch.equal(small_head.draft_ids, large_head.draft_ids)
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    assert config["hidden_size"] == hidden and config["num_hidden_layers"] == 1
    for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "head_dim"):
        assert config[key] == small_head.config[key]
    record = json.loads((tmp_path / "head" / "inflation.json").read_text())
    assert record["parameters"] == sum(p.numel() for p in large_head.parameters())


def _with_an_added_dimension_of_fc(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.index_fill(0, torch.tensor([len(tensor) - 1]), 0.1) if name == "fc.weight" else tensor


def _with_swapped_parts_of_fc(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.roll(tensor.shape[0], dims=1) if name == "fc.weight" else tensor


@pytest.mark.parametrize("break_it", [_with_an_added_dimension_of_fc, _with_swapped_parts_of_fc])
def test_a_broken_inflation_of_a_head_is_noticed(tmp_path, break_it):
    shape = InflatedShape(512, 5, 4, 704)
    inflate(PAIR / "target", tmp_path / "target", shape)
    inflate(PAIR / "eagle3", tmp_path / "head", shape)
    _rewrite(tmp_path / "head", break_it)
    small, large = load(PAIR / "target"), load(tmp_path / "target")
    tokens = torch.arange(5, 60)[None]
    expected = draft_on(small, load_head(PAIR / "eagle3", small), tokens)[:5]
    found = draft_on(large, load_head(tmp_path / "head", large), tokens)[:5]
    assert max((a - b).abs().max().item() for a, b in zip(expected, found, strict=True)) > 1e-2


def test_heads_that_cannot_be_widened_are_refused(tmp_path):
    head = tmp_path / "head"
    shutil.copytree(PAIR / "eagle3", head)
    config = json.loads((head / "config.json").read_text())
    (head / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    with pytest.raises(ValueError, match="only heads of one layer"):
        inflate(head, tmp_path / "large", InflatedShape(512, 5, 4, 704))
    (head / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="hidden=128 is smaller than the source's 256"):
        inflate(head, tmp_path / "large", InflatedShape(128, 5, 4, 704))
    tensors = load_file(head / "model.safetensors")
    save_file(tensors | {"extra.weight": torch.ones(1)}, head / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"no place for extra\.weight"):
        inflate(head, tmp_path / "large", InflatedShape(512, 5, 4, 704))


def _rewrite(folder: Path, change) -> None:
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        save_file({name: change(name, tensor) for name, tensor in tensors.items()}, path, metadata={"format": "pt"})


def _without_norm_scaling(folder: Path) -> None:
    _rewrite(folder, lambda name, t: t * 2 if "norm" in name else t)


def _with_the_small_eps(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["rms_norm_eps"] *= 4
    (folder / "config.json").write_text(json.dumps(config))


def _with_an_added_head_that_speaks(folder: Path) -> None:
    _rewrite(
        folder,
        lambda name, t: t.index_fill(1, torch.tensor([t.shape[1] - 1]), 0.1) if "layers.0.self_attn.o_" in name else t,
    )


def _with_an_added_layer_that_speaks(folder: Path) -> None:
    _rewrite(folder, lambda name, t: torch.full_like(t, 0.01) if "layers.2.mlp.down" in name else t)


@pytest.mark.parametrize(
    "break_it",
    [
        _without_norm_scaling,
        _with_the_small_eps,
        _with_an_added_head_that_speaks,
        _with_an_added_layer_that_speaks,
    ],
)
def test_a_broken_inflation_is_noticed(small, tmp_path, break_it):
    inflate(small, tmp_path / "large", InflatedShape(192, 3, 6, 100))
    assert_same_function(small, tmp_path / "large", random_prompts())
    break_it(tmp_path / "large")
    with pytest.raises(AssertionError):
        assert_same_function(small, tmp_path / "large", random_prompts())


def test_weights_without_effect_are_random_and_the_rest_is_deterministic(small, tmp_path):
    shape = InflatedShape(96, 3, 6, 100)
    for name in "ab":
        inflate(small, tmp_path / name, shape)
    a, b = ({k: v for p in sorted((tmp_path / n).glob("*.safetensors")) for k, v in load_file(p).items()} for n in "ab")
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
    added = a["model.layers.2.mlp.up_proj.weight"]
    assert (added != 0).all()
    widened = a["model.layers.0.self_attn.q_proj.weight"]
    assert (widened[:, 48:] != 0).all() and (widened[64:] != 0).all()
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        assert (a[f"model.layers.2.{name}.weight"] == 0).all()
        assert (a[f"model.layers.0.{name}.weight"][48:] == 0).all()


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (InflatedShape(47, 2, 4, 80), "hidden=47 is smaller than the source's 48"),
        (InflatedShape(48, 1, 4, 80), "layers=1 is smaller than the source's 2"),
        (InflatedShape(48, 2, 3, 80), "heads=3 is smaller than the source's 4"),
        (InflatedShape(48, 2, 7, 80), "heads=7 does not divide into groups of 2"),
        (InflatedShape(50, 2, 4, 80), "hidden=50 is not a multiple of heads=4"),
        (InflatedShape(48, 2, 4, 79), "intermediate=79 is smaller than the source's 80"),
    ],
)
def test_impossible_shapes_are_refused(small, tmp_path, shape, message):
    with pytest.raises(ValueError, match=message):
        inflate(small, tmp_path / "large", shape)
    assert not (tmp_path / "large").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("smollm2-1t", "'smollm2-1t'"),
        ("hidden=96", "layers, heads, intermediate missing"),
        ("hidden=96,layers=2,heads=4,intermediate=-1", "intermediate=-1"),
        ("hidden=96,layers=2,heads=4,intermediate=1e3", "intermediate=1e3"),
        ("hidden=96,hidden=96", "hidden=96"),
        ("width=96", "width=96"),
        ("", "''"),
    ],
)
def test_shape_texts_that_cannot_be_read_are_refused(text, message):
    with pytest.raises(ValueError, match=message) as error:
        parse_shape(text)
    assert "smollm2-8b" in str(error.value) and "intermediate=N" in str(error.value)


def test_other_bad_input_is_refused(small, tmp_path):
    with pytest.raises(ValueError, match="no config.json"):
        inflate(tmp_path, tmp_path / "large", InflatedShape(96, 2, 4, 80))
    with pytest.raises(ValueError, match="dtype float8"):
        inflate(small, tmp_path / "large", InflatedShape(96, 2, 4, 80), dtype="float8")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(FileExistsError, match="not empty"):
        inflate(small, tmp_path / "full", InflatedShape(96, 2, 4, 80))
    other = tmp_path / "qwen"
    shutil.copytree(small, other)
    config = json.loads((other / "config.json").read_text()) | {"architectures": ["Qwen2ForCausalLM"]}
    (other / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="only LlamaForCausalLM"):
        inflate(other, tmp_path / "large", InflatedShape(96, 2, 4, 80))


def test_the_named_shape_costs_what_it_says():
    shape, head_dim, vocab_size = parse_shape("smollm2-8b"), 64, 49152
    attention = 2 * shape.hidden * head_dim * (shape.heads + shape.heads // 3)
    total = shape.layers * (attention + 3 * shape.hidden * shape.intermediate) + vocab_size * shape.hidden
    assert 7e9 < total < 8.5e9


CACHED = InflatedShape(96, 3, 6, 100)


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("SGLANG_TETRIS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def _ensure(small: str) -> str:
    return str(ensure_inflated(small, CACHED))


def test_cache_is_keyed_on_content_shape_and_dtype(small, cache, tmp_path, monkeypatch):
    first = ensure_inflated(small, CACHED)
    assert first.parent == cache
    assert_same_function(small, first, random_prompts(2))

    with monkeypatch.context() as patch:
        patch.setattr(inflate_model, "inflate", lambda *_: pytest.fail("made again"))
        assert ensure_inflated(small, "hidden=96,layers=3,heads=6,intermediate=100") == first

    changed = tmp_path / "changed"
    shutil.copytree(small, changed)
    _rewrite(changed, lambda name, t: t + 1e-3 if name == "model.norm.weight" else t)
    others = {
        ensure_inflated(small, InflatedShape(96, 3, 6, 101)),
        ensure_inflated(small, CACHED, dtype="bfloat16"),
        ensure_inflated(changed, CACHED),
    }
    assert len(others) == 3 and first not in others
    assert_same_function(changed, ensure_inflated(changed, CACHED), random_prompts(2))


def test_processes_that_race_for_the_cache_get_the_same_complete_model(small, cache):
    with multiprocessing.get_context("fork").Pool(3) as pool:
        folders = pool.map(_ensure, [str(small)] * 3, chunksize=1)
    assert len(set(folders)) == 1
    assert [p.name for p in cache.iterdir()] == [Path(folders[0]).name], "nothing half-made is left"
    assert_same_function(small, Path(folders[0]), random_prompts(2))


def test_a_failed_inflation_leaves_no_entry_in_the_cache(small, cache, monkeypatch):
    def fail_midway(folder, out, *_):
        (Path(out) / "model-00001-of-00002.safetensors").touch()
        raise OSError("disk full")

    monkeypatch.setattr(inflate_model, "inflate", fail_midway)
    with pytest.raises(OSError, match="disk full"):
        ensure_inflated(small, CACHED)
    assert list(cache.iterdir()) == []
