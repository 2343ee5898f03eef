#!/usr/bin/env python
"""Fit the few constants of n-gram drafting's probabilities, and show how well they hold.

    python scripts/fit_ngram.py                          # the shipped target, on the shipped prompts
    python scripts/fit_ngram.py --texts mine.jsonl       # texts of another model

The target continues every prompt greedily. Every text is then drafted and verified as serving would: the first
branch, all of its depth. The constants maximise the likelihood of which branch's first token was right, and of what
was accepted on the first branch, over every other text of each kind; everything that is printed, the shipped constants'
figures too, comes from the texts left out.
"""

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import typer
from rich import box
from rich.console import Console
from rich.table import Table
from scipy.optimize import minimize
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from tetris_sglang.drafting import LEAST_PROB, PRIOR, Lookup, Prior, estimate_probs, look_up
from tetris_sglang.selection import survival_from_probs

PAIR = Path(__file__).resolve().parent.parent / "tests/pair"
BATCH = 16


class Text(NamedTuple):
    kind: str
    tokens: list[int]
    prompt_len: int


class Steps(NamedTuple):
    """Steps as serving takes them: of many texts, one after the other."""

    kinds: list[str]
    evidence: Lookup
    """[steps, branches, depth]"""
    accepted: Tensor
    """[steps] int64, tokens of the first branch that the target accepts"""
    reached: Tensor
    """[steps, branches] bool, the branch's first token is the target's"""


def main(
    model: Annotated[Path, typer.Option(help="the target, with its tokenizer")] = PAIR / "target",
    prompts: Annotated[Path, typer.Option(help="JSON lines with `kind` and `text`")] = PAIR / "prompts.jsonl",
    texts: Annotated[
        Path | None,
        typer.Option(help="JSON lines with `kind`, `tokens`, `prompt_len`; written if missing, else read"),
    ] = None,
    new_tokens: Annotated[int, typer.Option(min=1, help="tokens written per prompt")] = 256,
    depth: Annotated[int, typer.Option(min=1)] = 5,
    branches: Annotated[int, typer.Option(min=1, help="branches whose first tokens are reported on")] = 4,
    max_match: Annotated[int, typer.Option(min=1)] = 8,
) -> None:
    """Fit on half of the texts, report on the other half."""
    torch.set_num_threads(1)
    if texts is not None and texts.exists():
        written = [Text(**json.loads(line)) for line in texts.read_text().splitlines()]
    else:
        written = write_texts(model, prompts, new_tokens)
        if texts is not None:
            texts.write_text("".join(json.dumps(text._asdict()) + "\n" for text in written))

    def run(chosen: list[Text]) -> Steps:
        return replay(chosen, depth=depth, branches=branches, max_match=max_match)

    fitted = fit(run(written[::2]))
    steps = run(written[1::2])
    console = Console(width=100)
    for name, prior in (("shipped", PRIOR), ("fitted", fitted)):
        constants = ", ".join(f"{field}={value:.4g}" for field, value in prior._asdict().items())
        console.print(f"{name}: Prior({constants}), log-loss {log_loss(steps, prior):.4f}\n")
        console.print(
            draw_acceptance(steps, prior), draw_calibration(steps, prior), draw_branches(steps, prior)
        )


def write_texts(model: Path, prompts: Path, new_tokens: int) -> list[Text]:
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    target = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    rows = [json.loads(line) for line in prompts.read_text().splitlines()]
    written: list[Text] = []
    for start in range(0, len(rows), BATCH):
        batch = rows[start : start + BATCH]
        given = tokenizer([row["text"] for row in batch], padding=True, return_tensors="pt")
        with torch.inference_mode():
            output = target.generate(
                input_ids=given.input_ids,
                attention_mask=given.attention_mask,
                max_new_tokens=new_tokens,
                do_sample=False,
            )
        width = given.input_ids.shape[1]
        for row, mask, tokens in zip(batch, given.attention_mask, output, strict=True):
            prompt_len = int(mask.sum())
            # A text that has ended is padded behind its end.
            kept = [token for token in tokens[width:].tolist() if token != tokenizer.pad_token_id]
            written.append(Text(row["kind"], tokens[width - prompt_len : width].tolist() + kept, prompt_len))
    return written


def replay(texts: Iterable[Text], depth: int, branches: int, max_match: int) -> Steps:
    """Draft and verify every text from its first written token on; chains that would pass its end are left out."""
    kinds, evidence, accepted, reached = [], [], [], []
    for text in texts:
        first, last = text.prompt_len + 1, len(text.tokens) - depth
        if last < first:
            continue
        history = torch.tensor([text.tokens], dtype=torch.int32)
        lens = torch.arange(first, last + 1)
        drafts = look_up(
            history, torch.zeros_like(lens), lens, depth=depth, branches=branches, max_match=max_match
        )
        truth = history[0, lens[:, None] + torch.arange(depth)]
        accept_lens = (drafts.tokens[:, 0] == truth).cumprod(dim=1).sum(dim=1)
        visited, position = [], 0
        while position < len(lens):
            visited.append(position)
            position += int(accept_lens[position]) + 1
        kinds += [text.kind] * len(visited)
        evidence.append(Lookup(*(field[visited] for field in drafts)))
        accepted.append(accept_lens[visited])
        reached.append(drafts.tokens[visited, :, 0] == truth[visited, :1])
    return Steps(
        kinds,
        Lookup(*(torch.cat(field) for field in zip(*evidence, strict=True))),
        torch.cat(accepted),
        torch.cat(reached),
    )


def judged(steps: Steps, prior: Prior) -> tuple[Tensor, Tensor]:
    """(estimate, accepted or not) of every token of the first branches whose predecessors were all accepted."""
    _, match_lens, agreeing, known = (field[:, :1] for field in steps.evidence)
    probs = estimate_probs(match_lens, agreeing, known, prior)[:, 0]
    depths = torch.arange(probs.shape[1])
    is_judged = depths <= steps.accepted[:, None]
    return probs[is_judged], (depths < steps.accepted[:, None])[is_judged]


def log_loss(steps: Steps, prior: Prior) -> float:
    """Of which branch begins with the target's token, if any, and of the first branch's further tokens; per outcome."""
    probs = estimate_probs(*steps.evidence[1:], prior).double()
    first = probs[:, :, 0]
    none_right = (1 - first.sum(dim=1)).clamp_min(LEAST_PROB)
    which = torch.where(steps.reached.any(dim=1), (first * steps.reached).sum(dim=1), none_right)
    depths = torch.arange(1, probs.shape[2])
    is_judged, hits = (depths <= steps.accepted[:, None]), depths < steps.accepted[:, None]
    further = torch.where(hits, probs[:, 0, 1:], 1 - probs[:, 0, 1:])[is_judged]
    return -torch.cat((which, further)).log().mean().item()


def fit(steps: Steps) -> Prior:
    def to_prior(raw) -> Prior:
        def squash(x: float) -> float:
            return 1 / (1 + math.exp(-x))

        # A miss_scale in (0, 1) keeps the probability of a match above 0.
        return Prior(squash(raw[0]), squash(raw[1]), *(math.exp(value) for value in raw[2:]))

    start = [-4.0, 2.0, 0.0, 0.7, -0.2]
    best = minimize(
        lambda raw: log_loss(steps, to_prior(raw)), start, method="Nelder-Mead", options={"maxiter": 600}
    )
    return to_prior(best.x)


def draw_acceptance(steps: Steps, prior: Prior) -> Table:
    table = Table("kind", "steps", "accepted", "expected", title="tokens per step", box=box.SIMPLE_HEAD)
    probs = estimate_probs(*steps.evidence[1:], prior)
    expected = survival_from_probs(probs[:, 0]).sum(dim=1)
    kinds = list(dict.fromkeys(steps.kinds))
    for kind in [*kinds, "overall"]:
        chosen = torch.tensor([kind in (mine, "overall") for mine in steps.kinds])
        table.add_row(
            kind,
            str(int(chosen.sum())),
            f"{steps.accepted[chosen].double().mean():.2f}",
            f"{expected[chosen].mean():.2f}",
        )
    return table


def draw_calibration(steps: Steps, prior: Prior) -> Table:
    title = "first branch: tokens by their estimate, predecessors accepted"
    table = Table("estimate", "tokens", "mean estimate", "accepted", title=title, box=box.SIMPLE_HEAD)
    probs, hits = judged(steps, prior)
    for tenth in range(10):
        chosen = (probs * 10).long().clamp_max(9) == tenth
        if chosen.any():
            table.add_row(
                f"{tenth / 10:.1f}..{(tenth + 1) / 10:.1f}",
                str(int(chosen.sum())),
                f"{probs[chosen].mean():.3f}",
                f"{hits[chosen].double().mean():.3f}",
            )
    return table


def draw_branches(steps: Steps, prior: Prior) -> Table:
    table = Table(
        "branch", "mean estimate", "right", title="first tokens of all branches", box=box.SIMPLE_HEAD
    )
    probs = estimate_probs(*steps.evidence[1:], prior)[:, :, 0].mean(dim=0)
    for branch, (prob, right) in enumerate(zip(probs, steps.reached.double().mean(dim=0), strict=True)):
        table.add_row(str(branch), f"{prob:.3f}", f"{right:.3f}")
    return table


if __name__ == "__main__":
    typer.run(main)
