#!/usr/bin/env python
"""Record the laws that a real target and its head have for the next token, for benchmarks/bench_acceptance_rules.py.

    python scripts/record_laws.py                 # writes benchmarks/laws/TEMPERATURE.npz

SmolLM2-135M-Instruct answers ShareGPT's and HumanEval's prompts and the project's own, drawing at each temperature. At some
positions of the answers: p, the target's law of the next token, and q, its EAGLE-3 head's, over the likeliest tokens of both.
No token and no text is in them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from record_traces import mixed_prompts
from rich.console import Console
from rich.progress import track
from torch import Tensor
from transformers import AutoTokenizer, LlamaForCausalLM

from tetris_sglang.tools.distill.head_files import load_head
from tetris_sglang.tools.distill.heads import read_target
from tetris_sglang.tools.prompts import render_chats
from tetris_sglang.tools.real_model import HEAD, ensure_target

OUT = Path(__file__).resolve().parent.parent / "benchmarks/laws"
TEMPERATURES = (0.7, 1.0)
LIKELIEST = 64
"""Tokens of each law that are kept; what they leave out is spread over them."""


def main(
    out: Annotated[Path, typer.Option(help="Folder to write to.")] = OUT,
    prompts: Annotated[int, typer.Option(help="To answer, at each temperature.")] = 24,
    positions: Annotated[int, typer.Option(help="Of each answer.")] = 12,
    new_tokens: Annotated[int, typer.Option(help="Of each answer.")] = 64,
    seed: int = 0,
) -> None:
    folder = ensure_target()
    target = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    head, tokenizer = load_head(HEAD, target), AutoTokenizer.from_pretrained(folder)
    texts = [prompt.text for prompt in mixed_prompts(prompts)]
    chats = [tokenizer.encode(chat, return_tensors="pt") for chat in render_chats(folder, texts)]
    out.mkdir(parents=True, exist_ok=True)
    for temperature in TEMPERATURES:
        torch.manual_seed(seed)
        laws: list[tuple[Tensor, Tensor]] = []
        for chat in track(chats, description=f"temperature {temperature:g}", console=Console()):
            with torch.inference_mode():
                written = target.generate(
                    chat, do_sample=True, temperature=temperature, top_k=0, top_p=1.0, max_new_tokens=new_tokens
                )
                states = read_target(target, written)
                (drafted,) = head.draft(written, head.features(states), 1)
            # The head's logits of token i + 2 stand at i, the target's at i + 1.
            first, last = chat.shape[1] - 2, written.shape[1] - 2
            for i in torch.randperm(last - first)[:positions].add(first).tolist():
                q = torch.zeros(target.config.vocab_size, dtype=torch.float64)
                q[head.draft_ids] = (drafted[0, i].double() / temperature).softmax(-1)
                p = (states.logits[0, i + 1].double() / temperature).softmax(-1)
                laws.append(cut(p, q))
        p, q = (torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).float().numpy() for rows in zip(*laws, strict=True))
        np.savez_compressed(out / f"{temperature:g}.npz", p=p, q=q)
        typer.echo(f"{len(p)} positions at temperature {temperature:g}")


def cut(p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """Both laws over the tokens that are likeliest in either, the likeliest of p first."""
    kept = torch.cat((p.topk(LIKELIEST).indices, q.topk(LIKELIEST).indices)).unique()
    kept = kept[p[kept].argsort(descending=True)]
    return p[kept] / p[kept].sum(), q[kept] / q[kept].sum()


if __name__ == "__main__":
    typer.run(main)
