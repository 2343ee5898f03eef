"""What servers wrote, against the target in float32: greedy tokens by how much they fall short, drawn ones as draws."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

MAX_REGRET = 0.05
"""In logits: what rounding to bfloat16 may cost the token that was taken."""
MAX_OUTSIDE = 0.02
"""Share of the drawn tokens that rounding may let through a filter whose bound they are at."""


class Greedy(NamedTuple):
    num_tokens: int
    num_best: int
    """Tokens that are the reference's own."""
    regret: float
    """By how much the worst one falls short of the reference's, in logits."""


class Draws(NamedTuple):
    p: float
    """That the tokens' places in the reference's distribution are as uniform as those of draws from it."""
    outside: float
    """Share of the tokens that the filters forbid."""


class Filters(NamedTuple):
    """In the order in which SGLang applies them."""

    top_k: int = 1 << 30
    top_p: float = 1.0
    min_p: float = 0.0

    def apply(self, probs: Tensor) -> Tensor:
        """probs: [rows, vocab]. Returns what they leave, normalised."""
        ordered, at = probs.sort(dim=-1, descending=True)
        ordered[:, self.top_k :] = 0
        ordered /= ordered.sum(dim=-1, keepdim=True)
        ordered[ordered.cumsum(dim=-1) - ordered >= self.top_p] = 0
        ordered[ordered < self.min_p * ordered[:, :1]] = 0
        return torch.zeros_like(probs).scatter_(-1, at, ordered / ordered.sum(dim=-1, keepdim=True))


NO_FILTERS = Filters()


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
    def logits(self, prompt: str, output_ids: Sequence[int]) -> Tensor:
        """[outputs, vocab] float32, those that each output token was chosen from, given those before it."""
        prompt_ids = self._tokenizer(prompt).input_ids
        logits = self._model(torch.tensor([[*prompt_ids, *output_ids]])).logits[0]
        return logits[len(prompt_ids) - 1 : -1]

    def judge_greedy(self, prompts: Sequence[str], outputs: Sequence[Sequence[int]], frequency_penalty: float = 0.0) -> Greedy:
        num_tokens = num_best = 0
        worst = 0.0
        for prompt, output in zip(prompts, outputs, strict=True):
            logits = self.logits(prompt, output)
            if frequency_penalty:
                for row, seen in enumerate(map(Counter, _prefixes(output))):
                    logits[row, list(seen)] -= frequency_penalty * torch.tensor(list(seen.values()), dtype=torch.float32)
            regrets = logits.amax(dim=-1) - logits.gather(1, torch.tensor(output)[:, None])[:, 0]
            num_tokens, num_best = num_tokens + len(output), num_best + int((regrets == 0).sum())
            worst = max(worst, float(regrets.max()))
        return Greedy(num_tokens, num_best, worst)

    def judge_draws(
        self, prompts: Sequence[str], outputs: Sequence[Sequence[int]], filters: Filters = NO_FILTERS, seed: int = 0
    ) -> Draws:
        """Tokens drawn at temperature 1."""
        from scipy.stats import kstest

        generator, places, outside = torch.Generator().manual_seed(seed), [], 0
        for prompt, output in zip(prompts, outputs, strict=True):
            probs = filters.apply(self.logits(prompt, output).double().softmax(dim=-1))
            own = probs.gather(1, torch.tensor(output)[:, None])[:, 0]
            below = probs.cumsum(dim=-1).gather(1, torch.tensor(output)[:, None])[:, 0] - own
            drawn = below + torch.rand(len(output), generator=generator, dtype=torch.float64) * own
            places += drawn[own > 0].tolist()
            outside += int((own == 0).sum())
        return Draws(float(kstest(places, "uniform").pvalue), outside / (len(places) + outside))

    def judge_log_probabilities(
        self, prompts: Sequence[str], outputs: Sequence[Sequence[int]], reported: Sequence[Sequence[float]]
    ) -> float:
        """By how much the worst of the reported natural log-probabilities is off."""
        worst = 0.0
        for prompt, output, values in zip(prompts, outputs, reported, strict=True):
            logs = self.logits(prompt, output).log_softmax(dim=-1)
            expected = logs.gather(1, torch.tensor(output)[:, None])[:, 0]
            worst = max(worst, float((expected - torch.tensor(values)).abs().max()))
        return worst


def _prefixes(output: Sequence[int]) -> list[Sequence[int]]:
    return [output[:end] for end in range(len(output))]
