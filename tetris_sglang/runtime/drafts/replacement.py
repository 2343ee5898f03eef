"""Another draft of the same shape, in a server that runs: SGLang's /update_weights_from_disk, asked for the draft alone.

    curl localhost:30000/update_weights_from_disk -H "Content-Type: application/json" \
        -d '{"model_path": "my-head", "manifest": {"selector": "draft"}}'

SGLang's request has no selector, as its other weight updates have; `manifest` is what it passes on. Outputs stay what they are.
What running requests and cached prefixes have of the old draft's keys and values goes on to be read, and costs acceptance
alone. What a head shares with the target is not loaded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tetris_sglang.config import is_tetris

SELECTOR, DRAFT = "selector", "draft"
_SHAPE = (
    "architectures", "draft_vocab_size", "eagle_config", "dflash_config", "head_dim", "hidden_size", "intermediate_size",
    "num_attention_heads", "num_hidden_layers", "num_key_value_heads", "vocab_size",
)  # fmt: skip
"""Of a config.json: what cannot change while graphs and caches stand."""


def is_for_draft(request) -> bool:
    return (request.manifest or {}).get(SELECTOR) == DRAFT


def update_draft(original, manager, recv_req):
    """Around `SchedulerWeightUpdaterManager.update_weights_from_disk`: what is for the draft alone leaves the target alone."""
    worker = manager.draft_worker
    if not is_for_draft(recv_req) or not hasattr(worker, "replace_draft"):
        return original(manager, recv_req)
    from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqOutput

    success, message = worker.replace_draft(recv_req.model_path, recv_req.load_format)
    return UpdateWeightFromDiskReqOutput(success=success, message=message, num_paused_requests=0)


async def keep_model_path(original, manager, obj):
    """Around `TokenizerManager._wait_for_model_update_from_disk`: the served model is still the one before."""
    if not is_for_draft(obj) or not is_tetris(manager.server_args.speculative_algorithm):
        return await original(manager, obj)
    names = manager.served_model_name, manager.model_path
    result = await original(manager, obj)
    manager.served_model_name, manager.model_path = names  # see TokenizerManager._update_model_path_info
    return result


class DraftReplacer:
    """Loads other weights into a draft that serves.

    Args:
        worker: SGLang's draft worker. target: the target's model; a head has its embedding, and may have its output layer.
    """

    def __init__(self, worker, target) -> None:
        self._worker, self._target = worker, target
        self._folder = worker.draft_runner.model_config.model_path
        self._served = read_served(worker.draft_runner.model_config)

    def replace(self, model_path: str, load_format: str) -> tuple[bool, str]:
        """Whether it was done, and what to tell; if not, the draft from before serves on."""
        if reason := self._find_obstacle(model_path):
            return False, reason
        failure = self._load(model_path, load_format)
        if failure is None:
            self._folder = model_path
            return True, "The draft was replaced."
        # SGLang's own way back would read the same files again.
        told = f"model_path {model_path}: {failure}"
        if (again := self._load(self._folder, "auto")) is None:
            return False, f"{told}. The draft of {self._folder} serves on"
        told += f". Nor could {self._folder} be loaded again ({again}): texts stay right, but the draft may be incomplete"
        return False, f"{told}; restart the server"

    def _find_obstacle(self, model_path: str) -> str | None:
        if self._worker.draft_runner.model_config.quantization is not None:
            return (
                f"model_path {model_path}: this server's draft is quantised, which cannot be replaced. Start a server with it"
            )
        return why_unlike(model_path, self._served)

    def _load(self, model_path: str, load_format: str) -> str | None:
        """Returns what went wrong."""
        runner = self._worker.draft_runner
        own = {id(parameter) for parameter in self._target.parameters()}
        # Under the names that checkpoints have, which say less of where a parameter is.
        shared = {_short(name) for name, parameter in runner.model.named_parameters() if id(parameter) in own}
        try:
            success, message = runner.weight_updater.update_weights_from_disk(
                model_path, load_format, weight_name_filter=lambda name: _short(name) not in shared
            )
            token_ids = getattr(runner.model, "hot_token_id", None)
            if success and token_ids is not None and self._worker.hot_token_id is not None:
                self._worker.hot_token_id.copy_(token_ids)  # in place: captured graphs read it
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return None if success else message


def _short(name: str) -> str:
    return ".".join(name.split(".")[-2:])


def why_unlike(model_path: str, served: Mapping[str, Any]) -> str | None:
    """What keeps the draft in a folder from taking the place of one with the shape `served`; None: nothing."""
    try:
        given = _shape_of(_read_config(model_path))
    except (OSError, ValueError) as error:
        return f"model_path {model_path}: no config.json to read: {error}. Give a folder on the server's machine"
    unlike = [name for name in served if given[name] != served[name]]
    if unlike:
        told = ", ".join(f"{name} {given[name]} where this server's has {served[name]}" for name in unlike)
        return f"model_path {model_path}: a draft of another shape: {told}. Start a server with it instead"
    return None


def read_served(model_config) -> dict[str, Any]:
    """The shape of the draft with SGLang's `model_config`, of which SGLang changes its own copy."""
    try:
        return _shape_of(_read_config(model_config.model_path))
    except OSError:  # a hub's name
        shape = _shape_of(model_config.hf_config.to_dict())
        return {name: value for name, value in shape.items() if name not in ("architectures", "eagle_config")}


def _shape_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """With what a config need not say."""
    if not isinstance(config, Mapping):
        raise ValueError(f"a config is an object, not {config!r:.40}")
    shape = {name: config.get(name) for name in _SHAPE}
    heads = shape["num_attention_heads"]
    if shape["num_key_value_heads"] is None:
        shape["num_key_value_heads"] = heads
    if shape["head_dim"] is None and heads and shape["hidden_size"]:
        shape["head_dim"] = shape["hidden_size"] // heads
    return shape


def _read_config(folder: str) -> dict[str, Any]:
    return json.loads((Path(folder) / "config.json").read_text())
