"""A draft that takes another one's place: who is asked, and what does not fit."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace

from tetris_sglang.portable_cpu.activate import activate

activate()  # as SGLang does, before its modules are imported
from tetris_sglang.runtime.drafts.replacement import keep_model_path, update_draft, why_unlike

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


def test_a_draft_of_another_shape_is_named(tmp_path):
    served = SimpleNamespace(model_path=str(PAIR / "eagle3"))
    assert why_unlike(str(PAIR / "eagle3"), served) is None
    assert "no config.json to read" in why_unlike(str(tmp_path), served)
    config = json.loads((PAIR / "eagle3" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"draft_vocab_size": 7}))
    assert f"draft_vocab_size 7 where this server's has {config['draft_vocab_size']}" in why_unlike(str(tmp_path), served)
    hub = SimpleNamespace(model_path="somebody/head", hf_config=SimpleNamespace(to_dict=lambda: config))
    assert "draft_vocab_size 7" in why_unlike(str(tmp_path), hub)
