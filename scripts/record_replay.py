#!/usr/bin/env python
"""Record what drafts believe and what the target accepts, to replay selection without models.

    python scripts/record_replay.py        # the shipped pair; writes tests/data/replay.npz

The target continues prompts greedily, so the text that a request ends up with does not depend on what is drafted or
verified. At *every* position of it D tokens are drafted, whether or not a step of some run would begin there: a replay can
then take any steps. Traces:

- `standalone`: the pair's draft model, its most likely tokens;
- `overconfident`: the same tokens, with probabilities as at temperature 1 / 3: right order within a position's
  vocabulary, far too sure; `evidence` is what the request's own text says of the tokens of both (texts/match.py);
- `ngram`: n-grams of the request's own text, with what is believed of them without calibration;
- `ngram_human`: the same on Python sources as people wrote them, held out from the pair's training, as if a target
  that writes like them were serving. The pair's target repeats itself much more than large models do.
"""

import json
import platform
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import torch
import typer
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from tetris_sglang.drafting import ChainGrower, propose_matches
from tetris_sglang.texts import Match, RecentTexts, trust, trust_match_lens

ROOT = Path(__file__).resolve().parent.parent
PAIR, OUT = ROOT / "tests/pair", ROOT / "tests/data/replay.npz"
BATCH = 16
SHARPEN = 3.0
# float32 probabilities do not come closer to 1.
LARGEST_LOGIT = 16.6


class Text(NamedTuple):
    kind: str
    tokens: list[int]
    prompt_len: int


def main(
    out: Annotated[Path, typer.Option(help="where to write the traces")] = OUT,
    every: Annotated[int, typer.Option(min=1, help="use every so many-th prompt")] = 1,
    new_tokens: Annotated[int, typer.Option(min=1, help="tokens written per prompt")] = 96,
    depth: Annotated[int, typer.Option(min=1, help="D, tokens drafted per position")] = 6,
) -> None:
    torch.set_num_threads(1)
    written = write_texts(new_tokens)[::every]
    draft = AutoModelForCausalLM.from_pretrained(PAIR / "draft", dtype=torch.float32).eval()
    by_model = [draft_by_model(draft, text, depth) for text in written if count_positions(text, depth) > 0]
    traces = {
        "standalone": [(logits, accepted) for logits, _, _, accepted in by_model],
        "overconfident": [(sharp, accepted) for _, sharp, _, accepted in by_model],
        "ngram": draft_by_ngrams(written, depth),
        "ngram_human": draft_by_ngrams(read_sources(), depth),
    }
    arrays = {"evidence": torch.cat([evidence for _, _, evidence, _ in by_model]).to(torch.uint8).numpy()}
    for name, requests in traces.items():
        lens = [len(accepted) for _, accepted in requests]
        arrays[f"{name}_logits"] = torch.cat([logits for logits, _ in requests]).to(torch.float16).numpy()
        arrays[f"{name}_accepted"] = torch.cat([a for _, a in requests]).to(torch.uint8).numpy()
        arrays[f"{name}_starts"] = np.cumsum([0, *lens], dtype=np.int32)
        accepted = arrays[f"{name}_accepted"]
        expected = torch.cat([logits for logits, _ in requests]).sigmoid().cumprod(dim=1).sum(dim=1).mean()
        print(
            f"{name}: {len(lens)} requests, {len(accepted)} positions, {accepted.mean():.2f} of {depth} accepted, "
            f"{expected:.2f} expected"
        )
    provenance = {
        "depth": depth,
        "new_tokens": new_tokens,
        "every": every,
        "python": platform.python_version(),
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(out, provenance=json.dumps(provenance), **arrays)
    print(f"{out}: {out.stat().st_size} bytes")


def write_texts(new_tokens: int) -> list[Text]:
    """The prompts, and what the target writes behind them."""
    tokenizer = AutoTokenizer.from_pretrained(PAIR / "target", padding_side="left")
    target = AutoModelForCausalLM.from_pretrained(PAIR / "target", dtype=torch.float32).eval()
    rows = [json.loads(line) for line in (PAIR / "prompts.jsonl").read_text().splitlines()]
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


def count_positions(text: Text, depth: int) -> int:
    """Positions after the first written token with D more known after them."""
    return max(0, len(text.tokens) - depth - text.prompt_len)


def draft_by_model(draft: PreTrainedModel, text: Text, depth: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draft at every position at once, a pass per level.

    A pass reads the text and behind it all that is drafted so far, level by level; a drafted token sees the text up to its
    position and the tokens before it on its own chain.

    Returns:
        logits: [positions, depth] float32, logit of the probability of each drafted token given those before it.
        sharp: the same with the model's logits times SHARPEN.
        evidence: [positions, depth] int64, what the text says of the drafted tokens.
        accepted: [positions] int64, drafted tokens that equal the text.
    """
    tokens = torch.tensor(text.tokens)
    length, positions = len(tokens), count_positions(text, depth)
    lens = torch.arange(positions) + text.prompt_len + 1
    chains, logits, sharp = tokens.new_empty(positions, 0), [], []
    for level in range(depth):
        drafted = level * positions
        size = length + drafted
        sees = torch.ones(size, size, dtype=torch.bool).tril_()
        sees[length:] = False
        for above in range(level):
            rows = slice(length + above * positions, length + (above + 1) * positions)
            sees[rows, :length] = torch.arange(length) < lens[:, None]
            for before in range(above + 1):
                sees[rows, length + before * positions : length + (before + 1) * positions] = torch.eye(
                    positions, dtype=torch.bool
                )
        bias = torch.zeros(size, size).masked_fill_(~sees, torch.finfo(torch.float32).min)
        with torch.inference_mode():
            output = draft(
                input_ids=torch.cat((tokens, chains.t().flatten()))[None],
                position_ids=torch.cat((torch.arange(length), *(lens + above for above in range(level))))[None],
                attention_mask=bias[None, None],
                use_cache=False,
            ).logits[0]
        rows = output[-positions:] if level else output[lens - 1]
        chosen = rows.argmax(dim=1)
        chains = torch.cat((chains, chosen[:, None]), dim=1)
        logits.append(logit_of(rows, chosen))
        sharp.append(logit_of(rows * SHARPEN, chosen))
    truth = tokens[lens[:, None] + torch.arange(depth)]
    accepted = (chains == truth).cumprod(dim=1).sum(dim=1)
    # Without calibration nothing is copied.
    grower = ChainGrower(chains[:, :1], torch.ones(positions, 1), match=find_matches(text, depth))
    for level in range(1, depth):
        grower.grow(chains[:, level, None], torch.ones(positions, 1))
    evidence = grower.finish(depth).evidence
    return torch.stack(logits, dim=1), torch.stack(sharp, dim=1), evidence, accepted


def logit_of(rows: Tensor, chosen: Tensor) -> Tensor:
    """logit(softmax(rows)[chosen]), exact where the probability rounds to 1."""
    mine = rows.gather(1, chosen[:, None])
    others = rows.scatter(1, chosen[:, None], -torch.inf).logsumexp(dim=1)
    return (mine.squeeze(1) - others).clamp(-LARGEST_LOGIT, LARGEST_LOGIT)


def find_matches(text: Text, depth: int) -> Match:
    """What a request that runs alone finds in its text, at every position."""
    recent, slot = RecentTexts(1, max(text.tokens) + 1, are_shared=False), torch.tensor([0])
    recent.begin(slot, recent.place([0], [0], [0]))
    known, *others = torch.tensor([text.tokens]).split(
        [text.prompt_len + 1, *[1] * (len(text.tokens) - text.prompt_len - 1)], dim=1
    )
    found = []
    for tokens in (known, *others[: count_positions(text, depth) - 1]):
        recent.append(slot, tokens, torch.tensor([tokens.shape[1]]))
        found.append(recent.find(slot, depth))
    return Match(*(torch.cat(parts) for parts in zip(*found, strict=True)))


def draft_by_ngrams(texts: Iterable[Text], depth: int) -> list[tuple[Tensor, Tensor]]:
    """As `draft_by_model`, by n-grams of each text: (logits, accepted) per text."""
    requests = []
    for text in texts:
        positions = count_positions(text, depth)
        if positions == 0:
            continue
        match, steps = find_matches(text, depth), torch.arange(depth)
        drafts = propose_matches(match, trust, trust_match_lens(match.match_lens[:, None] + steps))
        lens = torch.arange(positions) + text.prompt_len + 1
        truth = torch.tensor(text.tokens)[lens[:, None] + steps]
        accepted = (drafts.tokens == truth).cumprod(dim=1).sum(dim=1)
        requests.append((drafts.probs.logit().clamp(-LARGEST_LOGIT, LARGEST_LOGIT), accepted))
    return requests


def read_sources(prompt_len: int = 256, new_tokens: int = 160, windows: int = 3) -> list[Text]:
    """Stretches of the held-out sources that the prompts come from, as the running Python has them."""
    tokenizer = AutoTokenizer.from_pretrained(PAIR / "target")
    rows = [json.loads(line) for line in (PAIR / "prompts.jsonl").read_text().splitlines()]
    library = Path(sysconfig.get_path("stdlib"))
    texts = []
    for source in sorted({row["source"] for row in rows}):
        path = library / source
        if not path.is_file():
            continue
        tokens = tokenizer(path.read_text(encoding="utf-8")).input_ids
        size = prompt_len + new_tokens
        for start in range(0, min(len(tokens), windows * size) - size + 1, size):
            texts.append(Text("human", tokens[start : start + size], prompt_len))
    return texts


if __name__ == "__main__":
    typer.run(main)
