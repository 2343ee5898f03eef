"""`mtp_checkpoint.py` joins the pair's target and prediction layer to a model with the target's function."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from mtp_checkpoint import MTP_FILE, make_mtp_checkpoint

from tetris_sglang.tools.distill.head_files import MTP_PREFIX, load_head
from tetris_sglang.tools.distill.heads import read_target

PAIR = ROOT / "tests" / "pair"


@torch.no_grad()
def test_it_is_the_target_with_a_layer(tmp_path):
    joined_folder, layer_folder = tmp_path / "joined", tmp_path / "layer"
    make_mtp_checkpoint(PAIR / "target", PAIR / "mtp", joined_folder)
    config = json.loads((joined_folder / "config.json").read_text())
    assert config["architectures"] == ["MiMoForCausalLM"] and config["num_nextn_predict_layers"] == 1
    index = json.loads((joined_folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert {(joined_folder / name).exists() for name in index.values()} == {True}

    # SGLang serves MiMo's layers as Qwen2's.
    as_qwen = Qwen2Config(**{k: v for k, v in config.items() if k not in ("architectures", "model_type")})
    joined = Qwen2ForCausalLM(as_qwen).eval()
    files = [load_file(joined_folder / name) for name in set(index.values())]
    found = joined.load_state_dict({name: t.float() for file in files for name, t in file.items()}, strict=False)
    assert found.missing_keys == ["lm_head.weight"] and all(name.startswith(MTP_PREFIX) for name in found.unexpected_keys)
    target = LlamaForCausalLM.from_pretrained(PAIR / "target", dtype=torch.float32).eval()
    assert joined.model.layers[0].self_attn.q_proj.bias is not None
    tokens = torch.randint(5, target.config.vocab_size, (2, 40), generator=torch.Generator().manual_seed(4))
    torch.testing.assert_close(joined(tokens).logits, target(tokens).logits, rtol=1e-6, atol=1e-5)

    layer = load_file(joined_folder / MTP_FILE)
    biases = {name for name in layer if name.endswith(".bias")}
    assert len(biases) == 3 * (config["num_hidden_layers"] + 1) and not any(layer[n].any() for n in biases)
    layer_folder.mkdir()
    own = {name: tensor for name, tensor in layer.items() if name.startswith(MTP_PREFIX) and name not in biases}
    save_file(own, layer_folder / "model.safetensors")
    shutil.copy(joined_folder / "config.json", layer_folder)
    wide, narrow = (load_head(folder, target) for folder in (layer_folder, PAIR / "mtp"))
    features = narrow.features(read_target(target, tokens))
    for one, other in zip(narrow.draft(tokens, features, 3), wide.draft(tokens, features, 3), strict=True):
        assert (one - other).abs().max() <= 2e-5 * one.abs().max()


def test_a_layer_of_another_target_is_refused(tmp_path):
    other = tmp_path / "mtp"
    shutil.copytree(PAIR / "mtp", other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"vocab_size": 4096}))
    with pytest.raises(ValueError, match="vocab_size 4096, 2048"):
        make_mtp_checkpoint(PAIR / "target", other, tmp_path / "out")
    with pytest.raises(ValueError, match="only MiMoForCausalLM"):
        make_mtp_checkpoint(PAIR / "target", PAIR / "eagle", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(FileExistsError):
        make_mtp_checkpoint(PAIR / "target", PAIR / "mtp", other)
