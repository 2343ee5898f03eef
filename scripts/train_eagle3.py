#!/usr/bin/env python
"""Train an EAGLE-3 head, or a DFlash draft, for a model that was not trained here, on answers that the model itself writes.

    python scripts/train_eagle3.py write --work-dir head-work
    python scripts/train_eagle3.py train --work-dir head-work --resume
    python scripts/train_eagle3.py measure --work-dir head-work
    python scripts/train_eagle3.py publish --work-dir head-work

`write` lets the model answer real prompts, greedily and sampled, and keeps its hidden states; it can be stopped and started
again, and `train` takes whatever there is. `measure` counts what the head has accepted on prompts that it never saw. With
`--kind dflash`, `train` and `measure` are about a DFlash draft.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import torch.nn.functional as F
import train_pair
import typer
from answers import Answer, Prompt, Writer
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm import tqdm
from train_pair import Trainer
from transformers import AutoTokenizer, LlamaForCausalLM

from tetris_sglang.tools.distill.heads import (
    DFlashHead,
    Eagle3Head,
    Head,
    make_dflash_keys,
    make_eagle3_keys,
    make_head_config,
    save_head,
)
from tetris_sglang.tools.fetch import SMOLLM2
from tetris_sglang.tools.prompts import RESULTS, TRAINING, read_human_eval, read_questions, read_sharegpt
from tetris_sglang.tools.real_model import HEAD, ensure_target

LAYER_IDS = "2,15,28"
"""Whose outputs the head reads: early, in the middle, and the last that SGLang can capture of thirty."""
TEMPERATURES = (0.0, 0.7, 0.0, 1.0)
SHARD_ANSWERS = 64
STDLIB_QUESTIONS = 900
HELD_OUT_PROMPTS = 32
ANSWERS, HELD_OUT = "answers", "held-out"
SEED = 20250215

MAX_CHAIN = 5
CHAINS = {Eagle3Head.kind: (2, 3, 2, 5), DFlashHead.kind: (MAX_CHAIN,)}
"""Lengths of the chains, in turn: long ones are dear, and once they are learnt, more text helps more."""
NUM_BLOCK_LAYERS = 2
MASK_TOKEN = "<repo_name>"
"""Of a block's rows: one that no answer has."""
STEP_DECAY = 0.8
MUON_RATE, ADAM_RATE, WARM_UP_STEPS, FALLING_SHARE = 0.02, 2e-3, 32, 0.5
EVALUATE_EVERY = 100

app = typer.Typer(add_completion=False, help=__doc__, rich_markup_mode=None)
WorkDir = Annotated[Path, typer.Option(help="Answers, checkpoints and intermediate results.")]
Target = Annotated[Path | None, typer.Option(help="A Llama-architecture folder.", show_default="SmolLM2")]
LayerIds = Annotated[str, typer.Option(help="The layers whose outputs the head reads, ascending.")]
Threads = Annotated[int, typer.Option(help="CPU threads.")]
Kind = Annotated[str, typer.Option(help=f"{' or '.join(CHAINS)}.")]


# ---------------------------------------------------------------------------------------------------- answers


def training_prompts(tokenizer) -> list[Prompt]:
    """ShareGPT's questions of the training split, and questions on the standard library, in a fixed mixed order."""
    texts = [(p.id, p.kind, p.text) for p in read_sharegpt(TRAINING)]
    documents = train_pair.collect_documents(None, SEED)
    questions = {
        d.turns[0]: f"stdlib-{i}"
        for i, d in enumerate(documents)
        if d.kind == "chat" and not train_pair.is_held_out(d.source) and len(d.turns[0]) > 40
    }
    texts += [(name, "stdlib", text) for text, name in list(questions.items())[:STDLIB_QUESTIONS]]
    random.Random(SEED).shuffle(texts)
    return [
        Prompt(name, kind, encode_chat(tokenizer, text), TEMPERATURES[i % len(TEMPERATURES)])
        for i, (name, kind, text) in enumerate(texts)
    ]


def held_out_prompts(tokenizer) -> list[Prompt]:
    """Of every kind some, answered greedily; none of them is trained on, nor is any other problem of HumanEval."""
    documents = train_pair.collect_documents(None, SEED)
    stdlib = {d.turns[0]: d.source for d in documents if d.kind == "chat" and train_pair.is_held_out(d.source)}
    texts = [(p.id, p.kind, p.text) for p in read_sharegpt(RESULTS)[: 2 * HELD_OUT_PROMPTS]]
    texts += [(p.id, p.kind, p.text) for p in read_human_eval()[:HELD_OUT_PROMPTS]]
    texts += [(f"stdlib-{i}", "stdlib", text) for i, text in enumerate(list(stdlib)[:HELD_OUT_PROMPTS])]
    texts += [(p.id, "questions", p.text) for p in read_questions()[:HELD_OUT_PROMPTS]]
    return [Prompt(name, kind, encode_chat(tokenizer, text), 0.0) for name, kind, text in texts]


def encode_chat(tokenizer, text: str) -> list[int]:
    messages = [{"role": "user", "content": text}]
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"])


def _save_shard(answers: list[Answer], path: Path) -> None:
    names = [
        {
            "id": a.prompt.id,
            "kind": a.prompt.kind,
            "temperature": a.prompt.temperature,
            "prompt_tokens": a.prompt_tokens,
            "tokens": len(a.token_ids),
        }
        for a in answers
    ]
    tensors = {
        "token_ids": torch.cat([a.token_ids for a in answers]),
        "states": torch.cat([a.states for a in answers]),
        "log_normalizers": torch.cat([a.log_normalizers for a in answers]),
    }
    partial = path.with_suffix(".partial")
    save_file(tensors, partial, metadata={"answers": json.dumps(names)})
    partial.rename(path)


def _read_layer_ids(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _read_names(path: Path) -> list[dict]:
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        return json.loads(json.loads(file.read(size))["__metadata__"]["answers"])


@app.callback()
def main() -> None:
    """Large blocks of memory are kept between steps: giving them back and taking them anew costs half the time."""
    keep = {"MALLOC_MMAP_THRESHOLD_": str(2**32), "MALLOC_TRIM_THRESHOLD_": str(2**33)}
    if not keep.keys() <= os.environ.keys():
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **keep})


@app.command()
def write(
    work_dir: WorkDir,
    target: Target = None,
    threads: Threads = 2,
    layer_ids: LayerIds = LAYER_IDS,
    slots: Annotated[int, typer.Option(help="Texts written at once.")] = 96,
    max_tokens: Annotated[int, typer.Option(help="Of a prompt and its answer together.")] = 448,
    held_out: Annotated[bool, typer.Option("--held-out", help="Answers to judge the head by.")] = False,
    minutes: Annotated[float | None, typer.Option(help="Stop after so long.", show_default="at the end")] = None,
) -> None:
    """Let the model answer the training prompts; goes on where an earlier call stopped."""
    torch.set_num_threads(threads)
    folder = target or ensure_target()
    out = work_dir / (HELD_OUT if held_out else ANSWERS)
    out.mkdir(parents=True, exist_ok=True)
    shards = sorted(out.glob("*.safetensors"))
    answered = {name["id"] for shard in shards for name in _read_names(shard)}
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = held_out_prompts(tokenizer) if held_out else training_prompts(tokenizer)
    prompts = [p for p in prompts if p.id not in answered]
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    inputs = [i + 1 for i in _read_layer_ids(layer_ids)]
    writer = Writer(model, slots, max_tokens, inputs, seed=SEED + len(shards))
    del model
    held: list[Answer] = []
    begun, count = time.monotonic(), len(shards)
    fitting = sum(len(p.token_ids) <= max_tokens // 2 for p in prompts)
    bar = tqdm(total=fitting, desc="answers", unit="answer", mininterval=5)
    tokens = 0
    for answer in writer.write(prompts):
        held.append(answer)
        tokens += len(answer.token_ids) - answer.prompt_tokens
        bar.set_postfix(tokens=tokens, refresh=False)
        bar.update()
        if len(held) == SHARD_ANSWERS:
            _save_shard(held, out / f"{count:05d}.safetensors")
            held, count = [], count + 1
            if minutes is not None and time.monotonic() - begun > 60 * minutes:
                break
    if held:
        _save_shard(held, out / f"{count:05d}.safetensors")


# --------------------------------------------------------------------------------------------------- learning


class Text(NamedTuple):
    """One answer as it is learnt from; padded to a batch's longest."""

    token_ids: Tensor  # [length] int64
    states: Tensor  # [length - 1, layers + 1, hidden] bfloat16
    log_normalizers: Tensor  # [length - prompt_tokens]
    prompt_tokens: int
    kind: str


class Texts:
    """All answers of a folder, in memory."""

    def __init__(self, folder: Path) -> None:
        self.items: list[Text] = []
        for shard in tqdm(sorted(folder.glob("*.safetensors")), desc=folder.name, unit="shard"):
            tensors, names = load_file(shard), _read_names(shard)
            lengths = [name["tokens"] for name in names]
            answered = [name["tokens"] - name["prompt_tokens"] for name in names]
            for name, ids, states, normalizers in zip(
                names,
                tensors["token_ids"].long().split(lengths),
                tensors["states"].split([n - 1 for n in lengths]),
                tensors["log_normalizers"].split(answered),
                strict=True,
            ):
                if len(ids) > name["prompt_tokens"] + MAX_CHAIN + 2:
                    self.items.append(Text(ids, states, normalizers, name["prompt_tokens"], name["kind"]))
        if not self.items:
            raise typer.BadParameter(f"{folder} holds no answers: call `write` first")
        self.answer_tokens = sum(len(t.log_normalizers) for t in self.items)

    def count_answer_tokens(self, vocab_size: int) -> Tensor:
        ids = torch.cat([t.token_ids[t.prompt_tokens :] for t in self.items])
        return torch.bincount(ids, minlength=vocab_size)

    def batches(self, epoch: int, batch_tokens: int) -> list[list[Text]]:
        """Texts of like length together, the batches in an order of the epoch's own."""
        rng = random.Random(SEED * 1009 + epoch)
        order = sorted(self.items, key=lambda t: len(t.token_ids) + rng.uniform(0, 32))
        batches: list[list[Text]] = [[]]
        for text in order:
            if batches[-1] and (len(batches[-1]) + 1) * len(text.token_ids) > batch_tokens:
                batches.append([])
            batches[-1].append(text)
        rng.shuffle(batches)
        return batches


class Batch(NamedTuple):
    token_ids: Tensor  # [texts, longest]
    states: Tensor  # [texts, longest - 1, layers + 1, hidden]
    normalizers: Tensor  # [texts, longest - 1], of the token after each position; 0 where none is learnt
    answered: Tensor  # [texts, longest - 1] bool: the token after this position is of the answer


def pad(texts: list[Text]) -> Batch:
    longest = max(len(t.token_ids) for t in texts)
    token_ids = torch.zeros(len(texts), longest, dtype=torch.long)
    states = torch.zeros(len(texts), longest - 1, *texts[0].states.shape[1:], dtype=torch.bfloat16)
    normalizers = torch.zeros(len(texts), longest - 1)
    answered = torch.zeros(len(texts), longest - 1, dtype=torch.bool)
    for row, text in enumerate(texts):
        length, first = len(text.token_ids), text.prompt_tokens - 1
        token_ids[row, :length] = text.token_ids
        states[row, : length - 1] = text.states
        normalizers[row, first : length - 1] = text.log_normalizers
        answered[row, first : length - 1] = True
    return Batch(token_ids, states, normalizers, answered)


def chain_loss(head: Head, target_rows: Tensor, batch: Batch, steps: int) -> tuple[Tensor, list[float]]:
    """What chains of `steps` tokens lose, from every position whose first drafted token is of an answer.

    Per step: half cross-entropy to the target's distribution, half to its likeliest token where the head's vocabulary
    surely holds it.

    Args:
        target_rows: [the head's vocabulary, hidden], of the target's lm_head.
    Returns: the loss, and per step how often the head's likeliest token is the vocabulary's likeliest.
    """
    features = batch.states[:, :, :-1].flatten(2)
    total, weights, right = 0.0, 0.0, []
    for step, (x, _) in enumerate(head.unroll(batch.token_ids[:, :-1], features, steps)):
        there = slice(1 + step, 1 + step + x.shape[1])
        learnt = batch.answered[:, there]
        with torch.no_grad():
            logits = F.linear(batch.states[:, there, -1][learnt], target_rows).float()
            probs = (logits - batch.normalizers[:, there][learnt][:, None]).exp()
            highest, likeliest = probs.max(-1)
            sure = highest >= 1 - probs.sum(-1)
        log_probs = head.read_logits(x[learnt]).float().log_softmax(-1)
        soft = -(probs * log_probs).sum(-1).mean()
        own = log_probs.gather(-1, likeliest[:, None])[:, 0]
        hard = -(own * sure).sum() / sure.sum().clamp(min=1)
        total = total + STEP_DECAY**step * (0.5 * soft + 0.5 * hard)
        weights += STEP_DECAY**step
        with torch.no_grad():
            right.append(((log_probs.argmax(-1) == likeliest) & sure).float().mean().item())
    return total / weights, right


class HeadTrainer(Trainer):
    """Remembers its evaluations, too. The learning rate warms up, stays, and falls linearly to 0 over the last part."""

    max_grad_norm = 1.0

    def __init__(self, head: Head, total_steps: int, checkpoint: Path) -> None:
        super().__init__(head, total_steps, checkpoint)
        self.evaluations: list[dict] = []

    def make_optimizers(self, matrices: list[Tensor], others: list[Tensor]) -> list[torch.optim.Optimizer]:
        return [
            torch.optim.Muon(matrices, lr=MUON_RATE, weight_decay=0.0),
            torch.optim.AdamW(others, lr=ADAM_RATE, betas=(0.9, 0.95), weight_decay=0.0),
        ]

    def rate(self) -> float:
        left = (self.total_steps - self.step_index) / self.total_steps
        return min(1.0, (self.step_index + 1) / WARM_UP_STEPS, left / FALLING_SHARE)

    def state(self) -> dict:
        return super().state() | {"total_steps": self.total_steps, "evaluations": self.evaluations}

    def take_over(self, state: dict) -> None:
        if state["total_steps"] > self.total_steps:
            raise typer.BadParameter(
                f"{self.checkpoint} is of a run of {state['total_steps']} steps, --steps {self.total_steps} is less: give as "
                "many or more, or name another --work-dir"
            )
        super().take_over(state)
        self.evaluations = state["evaluations"]


@torch.no_grad()
def evaluate(head: Head, texts: Texts, batch_tokens: int) -> dict[str, float]:
    """Mean accepted of MAX_CHAIN greedy drafts per verification, by kind of prompt, on texts that were written greedily.

    While a chain is accepted it reads exactly the text, so chains from every position at once hold those that serving
    would draft.
    """
    counts: dict[str, list[int]] = {}
    for texts_of_batch in texts.batches(0, batch_tokens):
        batch = pad(texts_of_batch)
        features = batch.states[:, :, :-1].flatten(2)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            steps = head.unroll(batch.token_ids, features, MAX_CHAIN)
            drafted = torch.stack([head.draft_ids[head.read_logits(x).argmax(-1)] for x, _ in steps], -1)
        for row, text in enumerate(texts_of_batch):
            position, length = text.prompt_tokens + 1, len(text.token_ids)
            while position + MAX_CHAIN <= length:
                chain = text.token_ids[position : position + MAX_CHAIN]
                kept = int((drafted[row, position - 2] == chain).long().cumprod(0).sum())
                for kind in (text.kind, "overall"):
                    total = counts.setdefault(kind, [0, 0])
                    total[0], total[1] = total[0] + kept, total[1] + 1
                position += kept + 1
    return {kind: round(a / v, 3) for kind, (a, v) in sorted(counts.items())}


@app.command()
def train(
    work_dir: WorkDir,
    kind: Kind = Eagle3Head.kind,
    target: Target = None,
    threads: Threads = 2,
    layer_ids: LayerIds = LAYER_IDS,
    steps: Annotated[
        int,
        typer.Option(
            help="Of training; the learning rate falls over the second half. More than a checkpoint's: it rises again."
        ),
    ] = 2400,
    vocabulary: Annotated[int, typer.Option(help="Tokens that the head can draft.")] = 6144,
    intermediate: Annotated[int, typer.Option(help="Of its feed-forward layer.")] = 1136,
    batch_tokens: Annotated[int, typer.Option(help="Per step, padding included.")] = 4096,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the checkpoint.")] = False,
    stop_after: Annotated[int | None, typer.Option(help="Stop after this step.")] = None,
) -> None:
    """Train the head on what `write` has written."""
    torch.set_num_threads(threads)
    torch.manual_seed(SEED)
    folder = target or ensure_target()
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    texts, judged = Texts(work_dir / ANSWERS), Texts(work_dir / HELD_OUT)
    checkpoint = work_dir / f"{kind}.checkpoint"
    if checkpoint.exists() and not resume:
        raise typer.BadParameter(f"{checkpoint} exists: add --resume to go on, or name another --work-dir")
    counts = texts.count_answer_tokens(model.config.vocab_size)
    ids = counts.sort(descending=True, stable=True).indices[:vocabulary].sort().values
    head = make_head(model, kind, ids, intermediate, _read_layer_ids(layer_ids), folder)
    head.norm.weight.data.copy_(model.model.norm.weight)
    trainer = HeadTrainer(head, steps, checkpoint)
    if checkpoint.exists():
        trainer.restore()
    # The head's own, where a checkpoint brought them.
    target_rows = model.lm_head.weight.detach()[head.draft_ids].bfloat16()
    typer.echo(
        f"{texts.answer_tokens} answer tokens in {len(texts.items)} texts; the vocabulary of {vocabulary} covers "
        f"{counts[head.draft_ids].sum() / counts.sum():.4f}; {sum(p.numel() for p in head.parameters())} parameters"
    )
    del model
    last, lengths = steps if stop_after is None else min(stop_after, steps), CHAINS[kind]
    bar = tqdm(total=steps, initial=trainer.step_index, desc="head", unit="step", mininterval=5)
    while trainer.step_index < last:
        for batch_texts in _rest_of_epoch(texts, trainer.step_index, batch_tokens):
            if trainer.step_index >= last:
                break
            batch = pad(batch_texts)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss, right = chain_loss(head, target_rows, batch, lengths[trainer.step_index % len(lengths)])
            trainer.apply(loss)
            bar.set_postfix(loss=f"{trainer.losses[-1]:.3f}", right=f"{right[0]:.3f}", refresh=False)
            bar.update()
            if trainer.step_index % EVALUATE_EVERY == 0:
                trainer.evaluations.append({"step": trainer.step_index, **evaluate(head, judged, batch_tokens)})
                tqdm.write(json.dumps(trainer.evaluations[-1]))
                trainer.save()
    trainer.save()
    if trainer.step_index == steps:
        train_pair.round_to_bfloat16(head)
        save_head(head, work_dir / kind)
        accepted = evaluate(head, judged, batch_tokens)
        typer.echo(json.dumps({"mean_accepted": accepted}))


def make_head(
    target: LlamaForCausalLM, kind: str, ids: Tensor, intermediate: int, layer_ids: list[int], folder: Path
) -> Eagle3Head | DFlashHead:
    """Untrained; `ids` [tokens] are the target's that it learns to draft, ascending, `folder` has the target's tokenizer."""
    weights = target.model.embed_tokens.weight.detach(), target.lm_head.weight.detach()
    if kind == Eagle3Head.kind:
        config = make_head_config(target.config, Eagle3Head.architecture, intermediate)
        head = Eagle3Head(config | make_eagle3_keys(len(ids), layer_ids), *weights)
        head.set_draft_ids(ids)
        return head
    if kind != DFlashHead.kind:
        raise typer.BadParameter(f"{kind}; known: {', '.join(CHAINS)}")
    mask_token = AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids(MASK_TOKEN)
    config = make_head_config(target.config, DFlashHead.architecture, intermediate)
    config |= make_dflash_keys(MAX_CHAIN + 1, layer_ids, mask_token, NUM_BLOCK_LAYERS)
    block = DFlashHead(config, *weights)
    block.vocabulary = ids
    return block


def _rest_of_epoch(texts: Texts, step: int, batch_tokens: int) -> Iterator[list[Text]]:
    """Of the epoch that a step belongs to; the same batches for a run that was interrupted."""
    epoch = 0
    while step >= len(batches := texts.batches(epoch, batch_tokens)):
        step, epoch = step - len(batches), epoch + 1
    yield from batches[step:]


# --------------------------------------------------------------------------------------------------- measuring


@app.command()
def measure(
    work_dir: WorkDir,
    kind: Kind = Eagle3Head.kind,
    target: Target = None,
    prompts: Annotated[int, typer.Option(help="Held-out prompts.")] = 48,
    new_tokens: Annotated[int, typer.Option(help="Written per prompt, at most.")] = 128,
) -> None:
    """Count what a real server accepts of five drafts, all verified, at temperature 0 and 1, on prompts never trained on."""
    from record_traces import Recording, mixed_prompts, record

    from tetris_sglang.trace import read_trace

    asked = mixed_prompts(prompts)
    measured = {"prompts": len(asked), "new_tokens": new_tokens, "drafted": MAX_CHAIN, "temperatures": {}}
    for temperature in (0.0, 1.0):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "steps.trace"
            completions = record(
                Recording(num_steps=MAX_CHAIN, temperature=temperature, calibration=False),
                path,
                [prompt.text for prompt in asked],
                new_tokens,
                concurrency=16,
                seed=0,
                target=target or ensure_target(),
                head=work_dir / kind,
            )
            accepted = read_trace(path).accepted
        by_kind: dict[str, list[int]] = {}
        for prompt, completion in zip(asked, completions, strict=True):
            kind = prompt.kind if prompt.kind in ("sharegpt", "humaneval") else "questions"
            total = by_kind.setdefault(kind, [0, 0])
            total[0] += completion.meta_info["spec_num_correct_drafts"]
            total[1] += completion.meta_info["spec_verify_ct"]
        reached = [len(accepted), *accepted.sum(0).tolist()]
        measured["temperatures"][str(temperature)] = {
            "mean_accepted": {kind: round(a / v, 3) for kind, (a, v) in sorted(by_kind.items())}
            | {"overall": round(float(accepted.sum(1).mean()), 3)},
            # Of the tokens whose predecessors were accepted, the share that was.
            "accepted_at": [round(b / a, 3) for a, b in pairwise(reached)],
        }
    (work_dir / f"{kind}.measured.json").write_text(json.dumps(measured, indent=1) + "\n")
    typer.echo(json.dumps(measured["temperatures"], indent=1))


@app.command()
def publish(
    work_dir: WorkDir,
    out: Annotated[Path, typer.Option(help="Where the head goes.")] = HEAD,
) -> None:
    """Put head, figures and card in their place."""
    names = [name for shard in sorted((work_dir / ANSWERS).glob("*.safetensors")) for name in _read_names(shard)]
    kind = Eagle3Head.kind
    state = torch.load(work_dir / f"{kind}.checkpoint", weights_only=True)
    losses = state["losses"]
    tail = max(1, len(losses) // 20)
    counts: dict[str, list[int]] = {}
    for name in names:
        total = counts.setdefault(name["kind"], [0, 0, 0])
        total[0] += 1
        total[1] += name["prompt_tokens"]
        total[2] += name["tokens"] - name["prompt_tokens"]
    weights = work_dir / kind / "model.safetensors"
    metrics = {
        "target": SMOLLM2.name,
        "target_sha256": SMOLLM2.sha256,
        "config": json.loads((work_dir / kind / "config.json").read_text()),
        "bytes": weights.stat().st_size,
        "parameters": sum(t.numel() for t in load_file(weights).values() if t.is_floating_point()),
        "answers": {kind: dict(zip(("prompts", "prompt_tokens", "answer_tokens"), c, strict=True))
                    for kind, c in sorted(counts.items())},
        "temperatures": sorted(set(TEMPERATURES)),
        "training": {
            "steps": state["total_steps"],
            "chains": list(CHAINS[kind]),
            "first_loss": round(losses[0], 3),
            "last_loss": round(sum(losses[-tail:]) / tail, 3),
            "evaluations": state["evaluations"],
        },
        "measured": json.loads((work_dir / f"{kind}.measured.json").read_text()),
    }  # fmt: skip
    out.mkdir(parents=True, exist_ok=True)
    (out / "metrics.json").write_text(json.dumps(metrics, indent=1) + "\n")
    (out / "README.md").write_text(render_card(metrics))
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(work_dir / kind / name, out / name)


def render_card(metrics: dict) -> str:
    """The head's card, from its figures alone."""
    config, training, measured = metrics["config"], metrics["training"], metrics["measured"]
    layers = ", ".join(map(str, config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]))
    data = "\n".join(
        f"| {kind} | {c['prompts']} | {c['prompt_tokens'] / 1e3:.0f} k | {c['answer_tokens'] / 1e3:.0f} k |"
        for kind, c in metrics["answers"].items()
    )
    kinds = list(next(iter(measured["temperatures"].values()))["mean_accepted"])
    accepted = "\n".join(
        f"| {t} | " + " | ".join(f"{found['mean_accepted'][kind]:.2f}" for kind in kinds) + " |"
        for t, found in measured["temperatures"].items()
    )
    places = "\n".join(
        f"| {t} | " + " | ".join(f"{share:.2f}" for share in found["accepted_at"]) + " |"
        for t, found in measured["temperatures"].items()
    )
    evaluations = training["evaluations"]
    shown = evaluations[: -1 : max(1, len(evaluations) // 8)]
    course = "\n".join(f"| {e['step']} | {e['overall']:.2f} |" for e in [*shown, *evaluations[-1:]])
    return f"""# An EAGLE-3 head for SmolLM2-135M-Instruct

Made by `scripts/train_eagle3.py`; this card is rendered from `metrics.json`. The target is
`{metrics["target"]}` (Apache-2.0), as `tetris-sglang models` fetches it; nothing of it is in this folder.

| | |
|---|---|
| parameters | {metrics["parameters"] / 1e6:.2f} M in bfloat16, {metrics["bytes"] / 1e6:.1f} MB |
| reads | the outputs of layers {layers} |
| drafts | {config["draft_vocab_size"]} of the target's {config["vocab_size"]} tokens, those that it writes most |
| heads | {config["num_attention_heads"]} of queries, {config["num_key_value_heads"]} of keys and values |
| feed-forward | {config["intermediate_size"]} |

## Data

Answers of the target itself, half of them greedy, the rest at temperature 0.7 and 1. The prompts are ShareGPT's first questions
(conversations whose id has a SHA-1 that begins with 0 to 9) and questions on Python's standard library. No text is in this
folder.

| prompts | count | prompt tokens | answer tokens |
|---|---|---|---|
{data}

## Training

{training["steps"]} steps. Chains of {", ".join(map(str, training["chains"]))} tokens in turn, from every position of an
answer. Half cross-entropy to the target's distribution, half to its likeliest token.
The loss fell from {training["first_loss"]:.2f} to {training["last_loss"]:.2f}.

Accepted of {measured["drafted"]} greedy drafts on held-out prompts, while it was trained:

| step | accepted |
|---|---|
{course}

## What a server accepts

{measured["prompts"]} prompts that were not trained on (ShareGPT of the split for results, HumanEval, the project's own
questions), at most {measured["new_tokens"]} tokens each, float32. Every draft is verified; the draft's own tokens and
probabilities, without calibration and texts. Accepted per pass, of {measured["drafted"]}:

| temperature | {" | ".join(kinds)} |
|---|{"---|" * len(kinds)}
{accepted}

Share accepted of the tokens at each place whose predecessors were accepted:

| temperature | {" | ".join(str(i + 1) for i in range(measured["drafted"]))} |
|---|{"---|" * measured["drafted"]}
{places}
"""


if __name__ == "__main__":
    app()
