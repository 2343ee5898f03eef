#!/usr/bin/env python
"""Serve a small random model of each family with TETRIS, and write benchmarks/results/models/families.json.

    .venv/bin/python scripts/verify_models.py [--families llama,qwen3] [--resume]

Each model is its own draft, so nearly all drafts must be accepted, through its own layers, positions and caches. The text is
held against transformers: at no position may another token be clearly better. A family that TETRIS refuses is asked for its
reason. A minute for each family on two cores.
"""

from __future__ import annotations

import json
import random
import re
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Annotated, Any

import requests
import torch
import typer
from tqdm import tqdm
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig

REPOSITORY = Path(__file__).parents[1]
sys.path.insert(0, str(REPOSITORY))

from tetris_sglang.tools.bench.results import collect_provenance
from tetris_sglang.tools.load import count_drafts
from tetris_sglang.tools.server_process import ServerFailed, ServerProcess

OUT = REPOSITORY / "benchmarks" / "results" / "models" / "families.json"
VOCABULARY, NUM_STEPS, NUM_REQUESTS, NEW_TOKENS = 1024, 3, 12, 32
MAX_REGRET, MIN_SUCCESS = 0.02, 0.97
"""In logits, and of the drafts: near-ties are decided differently by passes of unlike shapes."""
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.08,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
EXPERTS = {"moe_intermediate_size": 64, "num_experts_per_tok": 2, "num_experts": 4, "num_local_experts": 4}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {},
    "phi": {"num_key_value_heads": 4},
    "phi3": {},
    "gemma": {},
    "glm4": {"partial_rotary_factor": 0.5},
    "granite": {},
    "olmo": {"num_key_value_heads": 4},
    "olmo2": {},
    "cohere": {"logit_scale": 1.0},
    "starcoder2": {"sliding_window": None},
    "stablelm": {},
    "gpt2": {"num_key_value_heads": 4},
    "gpt_bigcode": {"num_key_value_heads": 1},
    "opt": {"num_key_value_heads": 4, "ffn_dim": 256, "word_embed_proj_dim": 128},
    "persimmon": {"num_key_value_heads": 4},
    "ernie4_5": {},
    "exaone4": {"sliding_window": None, "layer_types": ["full_attention"] * 2},
    "arcee": {},
    "apertus": {},
    "mixtral": {"num_local_experts": 4, "sliding_window": None},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 64},
    "qwen3_moe": EXPERTS,
    "olmoe": EXPERTS,
    "phimoe": {**EXPERTS, "sliding_window": None},
    "granitemoe": EXPERTS,
    "gemma2": {},
    "gemma3_text": {},
    "cohere2": {},
    "gpt_oss": EXPERTS,
    "qwen3_next": EXPERTS,
    "deepseek_v3": {},
    "mamba2": {"num_heads": 8},
    "falcon_h1": {},
}
"""transformers' model type -> what its configuration needs beside SIZES."""


def make_model(config: PretrainedConfig, folder: Path) -> AutoModelForCausalLM:
    """A random model, saved to `folder`."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(folder)
    return model


def make_config(family: str) -> PretrainedConfig:
    config = CONFIG_MAPPING[family](**(SIZES | FAMILIES[family]))
    config.architectures = config.architectures or [architecture_of(config)]
    return config


def architecture_of(config: PretrainedConfig) -> str:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]


def find_reason(config: PretrainedConfig) -> str | None:
    """Why TETRIS refuses this architecture; None: it does not."""
    from tetris_sglang.runtime.arguments import validate_architecture

    try:
        validate_architecture("--model-path", "MODEL", config)
    except ValueError as error:
        return str(error).partition("MODEL: ")[2].partition(" not supported")[0].removesuffix(" is").removesuffix(" are")
    return None


@torch.no_grad()
def largest_regret(model: AutoModelForCausalLM, prompts: list[list[int]], outputs: list[list[int]]) -> float:
    """By how much, in logits, transformers would have preferred another token anywhere."""
    regret = 0.0
    for prompt, output in zip(prompts, outputs, strict=True):
        logits = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(output)[:, None])[:, 0]
        regret = max(regret, float((logits.max(dim=1).values - chosen).max()))
    return regret


def serve(folder: Path, log_path: Path, prompts: list[list[int]]) -> tuple[list[list[int]], float]:
    """The greedy continuations under TETRIS, and which share of the drafts was accepted."""
    arguments = [
        "--model-path", str(folder), "--speculative-draft-model-path", str(folder), "--speculative-algorithm", "TETRIS",
        "--speculative-num-steps", str(NUM_STEPS), "--speculative-tetris-capacity-per-request", str(NUM_STEPS),
        "--dtype", "float32", "--skip-tokenizer-init", "--max-total-tokens", "4096", "--max-running-requests", "8",
        "--sleep-on-idle", "--speculative-tetris-calibration", "false",  # matches in random texts are tried, too
    ]  # fmt: skip
    with ServerProcess(arguments, log_path, start_timeout_s=400) as server:
        params = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
        body = {"input_ids": prompts, "sampling_params": params}
        response = requests.post(f"{server.url}/generate", json=body, timeout=300)
        response.raise_for_status()
        answers = response.json()
    return [answer["output_ids"] for answer in answers], count_drafts(answer["meta_info"] for answer in answers).success_rate


def verify(family: str, folder: Path) -> dict[str, Any]:
    """One entry of the results."""
    config = make_config(family)
    entry: dict[str, Any] = {"architecture": config.architectures[0]}
    reason = find_reason(config)
    if reason is not None:
        return entry | {"refused": reason}
    model = make_model(config, folder)
    draw = random.Random(0)
    prompts = [[draw.randrange(3, VOCABULARY) for _ in range(draw.randint(3, 60))] for _ in range(NUM_REQUESTS)]
    log_path = folder.parent / f"{family}.log"
    try:
        outputs, success = serve(folder, log_path, prompts)
    except (ServerFailed, requests.RequestException) as error:
        lines = [line for line in log_path.read_text().splitlines() if re.match(r"\w*(Error|Exception): ", line)]
        return entry | {"failed": lines[-1] if lines else str(error)[:300]}
    regret = largest_regret(model, prompts, outputs)
    entry |= {"success_rate": round(success, 3), "largest_regret": round(regret, 5), "texts": len({*map(tuple, outputs)})}
    if regret > MAX_REGRET or success < MIN_SUCCESS:
        entry["failed"] = "the text, or what is accepted of it, differs"
    return entry


def main(
    families: Annotated[str, typer.Option(help="Of those in FAMILIES.")] = ",".join(FAMILIES),
    resume: Annotated[bool, typer.Option(help="Keep those that hold.")] = False,
) -> None:
    found = json.loads(OUT.read_text())["families"] if OUT.exists() else {}
    wanted = [name for name in families.split(",") if not (resume and "failed" not in found.get(name, {"failed": ""}))]
    OUT.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        futures = {pool.submit(verify, family, Path(folder) / family): family for family in wanted}
        for future in tqdm(as_completed(futures), total=len(futures), unit="family"):
            family = futures[future]
            try:
                found[family] = future.result()
            except Exception as error:  # transformers' own classes want other fields
                found[family] = {"failed": f"no model was made: {type(error).__name__}: {error}"[:300]}
            if "failed" in found[family]:
                tqdm.write(f"{family}: {found[family]['failed']}")
            results = {"provenance": collect_provenance(), "families": dict(sorted(found.items()))}
            OUT.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
