"""A draft is replaced while its server runs: texts stay, acceptance moves."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import requests
import torch
from safetensors.torch import load_file, save_file

from tests.e2e.client import Client
from tests.e2e.conftest import DRAFT, PAIR


def replace_draft(server: Client, folder: Path) -> requests.Response:
    body = {"model_path": str(folder), "manifest": {"selector": "draft"}}
    return requests.post(f"{server.url}/update_weights_from_disk", json=body, timeout=60)


@pytest.fixture
def worse_draft(tmp_path) -> Path:
    """The same draft with noise on its weights."""
    folder = tmp_path / "worse"
    shutil.copytree(DRAFT, folder)
    weights = load_file(folder / "model.safetensors")
    torch.manual_seed(0)
    noisy = {name: (w + 0.5 * w.float().std() * torch.randn(w.shape)).to(w.dtype) for name, w in weights.items()}
    save_file(noisy, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_texts_stay_and_acceptance_moves(overlap, mixed_prompts, worse_draft):
    def serve() -> tuple[list[str], float]:
        """And the share of the verified drafts that was accepted."""
        overlap.flush_cache()  # cached prefixes have the draft's keys and values, too
        before = overlap.tetris_state()
        texts = [o["text"] for o in overlap.generate_all(mixed_prompts[:16], max_new_tokens=48, ignore_eos=True)]
        after = overlap.tetris_state()
        accepted, selected = (after[f"{name}_tokens"] - before[f"{name}_tokens"] for name in ("accepted", "selected"))
        return texts, accepted / selected

    served = requests.get(f"{overlap.url}/model_info", timeout=60).json()["model_path"]
    expected, rate = serve()
    try:
        assert replace_draft(overlap, worse_draft).json()["success"]
        # What was learnt of the old draft is forgotten.
        assert overlap.tetris_state()["calibration_error_raw"] == 0
        texts, worse_rate = serve()
        assert texts == expected and worse_rate < 0.7 * rate
        assert requests.get(f"{overlap.url}/model_info", timeout=60).json()["model_path"] == served
        refused = replace_draft(overlap, PAIR / "target")
        assert refused.status_code == 400 and "a draft of another shape: " in json.dumps(refused.json())
    finally:
        assert replace_draft(overlap, DRAFT).json()["success"]
    texts, last_rate = serve()
    assert texts == expected and last_rate > 0.9 * rate
