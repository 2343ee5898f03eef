"""A draft that takes another one's place: who is asked, what does not fit, and what happens when it cannot be loaded."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tetris_sglang.portable_cpu.activate import activate

activate()  # as SGLang does, before its modules are imported
from tetris_sglang.runtime.drafts.replacement import DraftReplacer, keep_model_path, read_served, update_draft, why_unlike

PAIR = Path(__file__).parents[2] / "pair"
FOR_DRAFT = SimpleNamespace(model_path="new", load_format="auto", manifest={"selector": "draft"})
FOR_ALL = SimpleNamespace(model_path="new", load_format="auto", manifest=None)


def test_the_draft_alone_is_replaced_where_it_is_asked_for():
    asked = []
    worker = SimpleNamespace(replace_draft=lambda *given: asked.append(given) or (True, "done"))
    manager = SimpleNamespace(draft_worker=worker)
    found = update_draft(lambda *_: "original", manager, FOR_DRAFT)
    assert (found.success, found.message) == (True, "done") and asked == [("new", "auto")]
    assert update_draft(lambda *_: "original", manager, FOR_ALL) == "original"
    # Without speculation, and with SGLang's own.
    assert update_draft(lambda *_: "original", SimpleNamespace(draft_worker=None), FOR_DRAFT) == "original"


def test_the_served_model_keeps_its_name():
    async def update(manager, request):
        manager.served_model_name = manager.model_path = request.model_path
        return True, "done", 0

    def replace(algorithm: str, request) -> tuple[str, str]:
        arguments = SimpleNamespace(speculative_algorithm=algorithm)
        manager = SimpleNamespace(server_args=arguments, served_model_name="name", model_path="target")
        assert asyncio.run(keep_model_path(update, manager, request)) == (True, "done", 0)
        return manager.served_model_name, manager.model_path

    assert replace("TETRIS", FOR_DRAFT) == ("name", "target")
    assert replace("TETRIS", FOR_ALL) == replace("EAGLE3", FOR_DRAFT) == ("new", "new")


def write_config(folder: Path, config: dict) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_a_draft_of_another_shape_is_named(tmp_path):
    served = read_served(SimpleNamespace(model_path=str(PAIR / "eagle3")))
    assert why_unlike(str(PAIR / "eagle3"), served) is None
    assert "no config.json to read" in why_unlike(str(tmp_path), served)
    config = json.loads((PAIR / "eagle3" / "config.json").read_text())
    folder = write_config(tmp_path, config | {"draft_vocab_size": 7})
    assert f"draft_vocab_size 7 where this server's has {config['draft_vocab_size']}" in why_unlike(folder, served)
    hub = SimpleNamespace(model_path="somebody/head", hf_config=SimpleNamespace(to_dict=lambda: config))
    assert "draft_vocab_size 7" in why_unlike(folder, read_served(hub))
    # A key that is missing says something, too, but for what follows from others.
    folder = write_config(tmp_path, {name: value for name, value in config.items() if name != "draft_vocab_size"})
    assert "draft_vocab_size None" in why_unlike(folder, served)
    config = json.loads((PAIR / "eagle" / "config.json").read_text())
    assert config["head_dim"] * config["num_attention_heads"] == config["hidden_size"]
    folder = write_config(tmp_path, {name: value for name, value in config.items() if name != "head_dim"})
    assert why_unlike(folder, read_served(SimpleNamespace(model_path=str(PAIR / "eagle")))) is None


class Head(nn.Module):
    def __init__(self, embedding: nn.Parameter) -> None:
        super().__init__()
        self.model, self.lm_head = nn.Module(), nn.Linear(2, 3, bias=False)
        self.model.embed_tokens = nn.Module()
        self.model.embed_tokens.weight = embedding
        self.hot_token_id = torch.tensor([1, 2, 3])


class Updater:
    """Loads "weights" by their names, or fails in the folders that are broken."""

    def __init__(self, model: Head) -> None:
        self.model, self.broken, self.loaded, self.raises = model, set(), [], False

    def update_weights_from_disk(self, model_path, load_format, weight_name_filter):
        names = ["embed_tokens.weight", "lm_head.weight", "midlayer.fc.weight"]
        self.loaded.append((model_path, [name for name in names if weight_name_filter(name)]))
        if model_path in self.broken:
            if self.raises:
                raise RuntimeError("broken file")
            return False, "Failed to get weights iterator"
        self.model.hot_token_id = torch.tensor([4, 5, 6])
        return True, "done"


@pytest.fixture
def replacer(tmp_path) -> DraftReplacer:
    target = nn.Module()
    target.embedding = nn.Parameter(torch.zeros(3, 2))
    model = Head(target.embedding)
    served = shutil.copytree(PAIR / "eagle3", tmp_path / "served")
    runner = SimpleNamespace(
        model=model,
        model_config=SimpleNamespace(model_path=str(served), quantization=None),
        weight_updater=Updater(model),
    )
    worker = SimpleNamespace(draft_runner=runner, hot_token_id=model.hot_token_id.clone())
    return DraftReplacer(worker, target)


def test_what_is_the_targets_is_not_loaded_and_the_token_map_is(replacer):
    worker, held = replacer._worker, replacer._worker.hot_token_id
    assert replacer.replace(str(PAIR / "eagle3"), "auto") == (True, "The draft was replaced.")
    assert worker.draft_runner.weight_updater.loaded == [(str(PAIR / "eagle3"), ["lm_head.weight", "midlayer.fc.weight"])]
    # In place: captured graphs read it.
    assert worker.hot_token_id is held and held.tolist() == [4, 5, 6]


@pytest.mark.parametrize("raises", [False, True])
def test_the_draft_from_before_comes_back_where_another_one_cannot_be_loaded(replacer, raises):
    updater, served = replacer._worker.draft_runner.weight_updater, replacer._folder
    updater.raises, updater.broken = raises, {str(PAIR / "eagle3")}
    success, message = replacer.replace(str(PAIR / "eagle3"), "auto")
    assert not success and f"The draft of {served} serves on" in message
    assert [folder for folder, _ in updater.loaded] == [str(PAIR / "eagle3"), served]
    updater.broken.add(served)
    success, message = replacer.replace(str(PAIR / "eagle3"), "auto")
    assert not success and "may be incomplete; restart the server" in message


def test_another_shape_in_the_same_folder_is_noticed(replacer):
    folder = Path(replacer._folder)
    config = json.loads((folder / "config.json").read_text())
    write_config(folder, config | {"draft_vocab_size": 7})
    success, message = replacer.replace(str(folder), "auto")
    assert not success and "draft_vocab_size 7" in message and not replacer._worker.draft_runner.weight_updater.loaded


def test_quantised_drafts_are_not_replaced(replacer):
    replacer._worker.draft_runner.model_config.quantization = "fp8"
    success, message = replacer.replace(str(PAIR / "eagle3"), "auto")
    assert not success and "is quantised" in message
