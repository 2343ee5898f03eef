"""Another draft of the same shape, in a server that runs: SGLang's /update_weights_from_disk, asked for the draft alone.

    curl localhost:30000/update_weights_from_disk -H "Content-Type: application/json" \
        -d '{"model_path": "my-head", "manifest": {"selector": "draft"}}'

SGLang's request has no selector, as its other weight updates have; `manifest` is what it passes on. Outputs stay what they are.
What running requests and cached prefixes have of the old draft's keys and values goes on to be read, and costs acceptance
alone.
"""

from __future__ import annotations

import json
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


def why_unlike(model_path: str, model_config) -> str | None:
    """What keeps the draft in a folder from taking the place of the one with SGLang's `model_config`; None: nothing."""
    try:
        given = _read_config(model_path)
    except (OSError, ValueError) as error:
        return f"model_path {model_path}: no config.json to read: {error}"
    try:
        served = _read_config(model_config.model_path)  # SGLang changes its own copy for drafts
    except OSError:  # a hub's name
        served = model_config.hf_config.to_dict()
    unlike = [name for name in _SHAPE if name in given and given[name] != served.get(name)]
    if unlike:
        told = ", ".join(f"{name} {given[name]} where this server's has {served.get(name)}" for name in unlike)
        return f"model_path {model_path}: a draft of another shape: {told}. Start a server with it instead"
    return None


def _read_config(folder: str) -> dict[str, Any]:
    return json.loads((Path(folder) / "config.json").read_text())
