"""What servers wrote, against the target in float32: greedy tokens by how much they fall short, drawn ones as draws."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

MAX_REGRET = {"float32": 1e-3, "bfloat16": 0.05}
"""In logits: what rounding may cost the token that was taken."""


class Greedy(NamedTuple):
    num_tokens: int
    num_best: int
    """Tokens that are the reference's own."""
    regret: float
    """By how much the worst one falls short of the reference's, in logits."""


class Reference:
    """The target.

    Args:
        folder: of its checkpoint.
    """

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.no_grad()
    def _logits(self, prompt: str, output_ids: Sequence[int]) -> torch.Tensor:
        """[outputs, vocab] float32, those that each output token was chosen from, given those before it."""
        prompt_ids = self._tokenizer(prompt).input_ids
        logits = self._model(torch.tensor([[*prompt_ids, *output_ids]])).logits[0]
        return logits[len(prompt_ids) - 1 : -1]

    def judge_greedy(self, prompts: Sequence[str], outputs: Sequence[Sequence[int]]) -> Greedy:
        num_tokens = num_best = 0
        worst = 0.0
        for prompt, output in zip(prompts, outputs, strict=True):
            logits = self._logits(prompt, output)
            regrets = logits.amax(dim=-1) - logits.gather(1, torch.tensor(output)[:, None])[:, 0]
            num_tokens, num_best = num_tokens + len(output), num_best + int((regrets == 0).sum())
            worst = max(worst, float(regrets.max()))
        return Greedy(num_tokens, num_best, worst)

    def judge_draws(self, prompts: Sequence[str], outputs: Sequence[Sequence[int]], seed: int = 0) -> float:
        """The p-value of tokens drawn at temperature 1: their places in the target's distribution are uniform."""
        from scipy.stats import kstest

        generator, places = torch.Generator().manual_seed(seed), []
        for prompt, output in zip(prompts, outputs, strict=True):
            probs = self._logits(prompt, output).double().softmax(dim=-1)
            own = probs.gather(1, torch.tensor(output)[:, None])[:, 0]
            below = probs.cumsum(dim=-1).gather(1, torch.tensor(output)[:, None])[:, 0] - own
            places += (below + torch.rand(len(output), generator=generator, dtype=torch.float64) * own).tolist()
        return float(kstest(places, "uniform").pvalue)
