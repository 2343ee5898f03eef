#!/usr/bin/env python
"""Train draft heads for the tests' target: EAGLE, EAGLE-3, an MTP layer, DFlash and DFlare, in the forms that SGLang loads.

    python scripts/train_heads.py train --work-dir pair-work
    python scripts/train_heads.py train --work-dir pair-work --kinds eagle3 --resume
    python scripts/train_heads.py card

Text, held-out sources and prompts are those of `train_pair.py`; in its work directory, the text that the target
wrote for the draft is used again. A head learns in chains: after the first step it reads its own hidden states,
as in serving. Each kind is a stage of its own, resumable; the metrics and the model card follow at the end.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import torch.nn.functional as F
import train_pair
import typer
from tokenizers import Tokenizer
from torch import Tensor
from tqdm import tqdm
from train_pair import DRAFTED_TOKENS, Preset, Trainer, is_held_out
from transformers import LlamaForCausalLM

from tetris_sglang.tools.distill.heads import (
    BLOCKS,
    HEADS,
    Eagle3Head,
    Head,
    load_head,
    make_dflash_keys,
    make_eagle3_keys,
    make_head_config,
    read_target,
    save_head,
)

PAIR = Path(__file__).resolve().parents[1] / "tests" / "pair"


class Round(NamedTuple):
    """A stretch of training with a learning rate that rises and falls."""

    steps: int
    unrolled: int  # steps of a chain
    feature_weight: float = 0.0  # of smooth L1 to the target's hidden states


@dataclass(frozen=True)
class HeadSettings:
    """What a head is and how it learns."""

    heads: int
    kv_heads: int
    intermediate: int
    rounds: tuple[Round, ...]
    step_decay: float = 0.8  # later steps of a chain happen less often, and count less


@dataclass(frozen=True)
class HeadsPreset:
    """Everything a run depends on; text and seed are those of the pair's preset."""

    text: Preset
    heads: dict[str, HeadSettings]
    batch_tokens: int = 2048
    context_tokens: int = 512
    draft_vocab_size: int = 1024  # of eagle3
    aux_layer_ids: tuple[int, ...] = (0, 2, 3)  # of eagle3; the last layer's output cannot be captured


PRESETS = {
    "full": HeadsPreset(
        text=train_pair.PRESETS["full"],
        # Long chains are dear. After a first round on them every step of a chain is right as often as the first,
        # and what helps is more text.
        heads={
            "eagle": HeadSettings(4, 2, 512, (Round(100, 3, 1.0), Round(240, 2, 1.0), Round(280, 2, 0.1))),
            "eagle3": HeadSettings(2, 1, 192, (Round(420, 5), Round(400, 2), Round(260, 2), Round(220, 3))),
            "mtp": HeadSettings(4, 2, 512, (Round(200, 2), Round(120, 2))),
            "dflash": HeadSettings(4, 2, 128, (Round(320, 5),)),
            "dflare": HeadSettings(2, 1, 16, (Round(160, 5),)),
        },
    ),
    "tiny": HeadsPreset(
        text=train_pair.PRESETS["tiny"],
        heads={
            "eagle": HeadSettings(4, 2, 64, (Round(12, 2, 1.0),)),
            "eagle3": HeadSettings(2, 1, 64, (Round(6, 3), Round(6, 2))),
            "mtp": HeadSettings(4, 2, 64, (Round(12, 1),)),
            "dflash": HeadSettings(4, 2, 64, (Round(12, 2),)),
            "dflare": HeadSettings(4, 2, 64, (Round(12, 2),)),
        },
        batch_tokens=512,
        context_tokens=128,
    ),
}


# ---------------------------------------------------------------------------------------------------- models


def make_config(target: LlamaForCausalLM, kind: str, preset: HeadsPreset) -> dict:
    """The config.json of a head; that of `mtp` describes the complete checkpoint."""
    config, settings = target.config, preset.heads[kind]
    common = make_head_config(config, HEADS[kind].architecture, settings.intermediate) | {
        "num_attention_heads": settings.heads,
        "num_key_value_heads": settings.kv_heads,
    }
    if kind == "eagle3":
        # SGLang's own choice of layers needs a deeper target: of five layers it would capture one.
        common |= make_eagle3_keys(min(preset.draft_vocab_size, config.vocab_size), preset.aux_layer_ids)
    if kind in BLOCKS:
        common |= make_dflash_keys(train_pair.DRAFTED_TOKENS + 1, preset.aux_layer_ids, train_pair.PAD_ID, 2)
    if kind == "mtp":
        if (settings.heads, settings.kv_heads) != (config.num_attention_heads, config.num_key_value_heads):
            raise ValueError("an MTP layer has the attention heads of its target")
        # transformers knows no "mimo", and for "qwen2" would replace the tokenizer's splitting of words by its own.
        # SGLang chooses the model by its architecture.
        common["num_nextn_predict_layers"] = 1
        for key in ("intermediate_size", "num_hidden_layers", "tie_word_embeddings"):
            common[key] = getattr(config, key)
    return common


def make_head(target: LlamaForCausalLM, kind: str, preset: HeadsPreset, draft_ids: Tensor) -> Head:
    """An untrained head; `draft_ids` is eagle3's vocabulary."""
    torch.manual_seed(preset.text.seed + 5)
    config = make_config(target, kind, preset)
    sizes = config | {"intermediate_size": preset.heads[kind].intermediate}
    head = HEADS[kind](sizes, target.model.embed_tokens.weight.detach(), target.lm_head.weight.detach())
    head.config = config
    if isinstance(head, Eagle3Head):
        head.set_draft_ids(draft_ids)
    return head


def choose_draft_ids(stream: Tensor, written: Tensor, vocab_size: int, count: int) -> Tensor:
    """The `count` most frequent tokens, of training text and of what the target wrote alike, ascending."""
    shares = [torch.bincount(t.flatten().int(), minlength=vocab_size) / t.numel() for t in (stream, written)]
    # Stable, so that rare tokens with the same count are chosen alike everywhere.
    return sum(shares).sort(descending=True, stable=True).indices[:count].sort().values


# -------------------------------------------------------------------------------------------------- learning


class RoundsTrainer(Trainer):
    """In each round the learning rate warms up over 16 steps, stays, and falls to 0 over the last half."""

    def __init__(self, model: Head, rounds: tuple[Round, ...], checkpoint: Path):
        super().__init__(model, sum(r.steps for r in rounds), checkpoint)
        self.rounds = rounds

    def locate(self, step: int) -> tuple[int, Round]:
        """The round that a step belongs to, and how many steps of that round come before it."""
        for current in self.rounds:
            if step < current.steps:
                return step, current
            step -= current.steps
        raise IndexError(f"training ends {step} steps earlier")

    def rate(self) -> float:
        done, current = self.locate(self.step_index)
        return min(1.0, (done + 1) / 16, 2 * (1 - done / current.steps))


def head_loss(head: Head, target: LlamaForCausalLM, tokens: Tensor, current: Round, step_decay: float) -> Tensor:
    """What a chain of `current.unrolled` steps from every position of [batch, length] tokens loses.

    Per step: half cross-entropy to the target's distribution (sampled requests), half to its likeliest token
    (greedy ones), and `current.feature_weight` times smooth L1 to the target's hidden state. Tokens outside a reduced
    vocabulary take no part: the head cannot draft them.
    """
    states = read_target(target, tokens)
    probs, likeliest = states.logits.softmax(-1), states.logits.argmax(-1)
    if head.draft_ids is not None:
        position = torch.full((probs.shape[-1],), -100)
        position[head.draft_ids] = torch.arange(len(head.draft_ids))
        probs, likeliest = probs[..., head.draft_ids], position[likeliest]
    features = head.features(states)
    total, weights = 0.0, 0.0
    for step, drafted in enumerate(head.draft(tokens, features, current.unrolled)):
        there = slice(1 + step, 1 + step + drafted.hidden.shape[1])
        log_probs = drafted.logits.log_softmax(-1)
        soft = -(probs[:, there] * log_probs).sum(-1).mean()
        hard = F.nll_loss(log_probs.flatten(0, 1), likeliest[:, there].flatten(), ignore_index=-100)
        loss = 0.5 * soft + 0.5 * hard
        if current.feature_weight:
            loss = loss + current.feature_weight * F.smooth_l1_loss(drafted.hidden, features[:, there])
        total = total + step_decay**step * loss
        weights += step_decay**step
    return total / weights


@dataclass
class Text:
    """What all heads learn from."""

    stream: Tensor  # [tokens] int16, training text
    written: Tensor  # [sequences, tokens] int16, written by the target
    draft_ids: Tensor  # eagle3's vocabulary


def prepare_text(target: LlamaForCausalLM, pair: Path, preset: HeadsPreset, work_dir: Path) -> Text:
    """Training text in the target's own tokens, and text that the target wrote."""
    work_dir.mkdir(parents=True, exist_ok=True)
    documents = train_pair.collect_documents(preset.text.corpus_bytes, preset.text.seed)
    tokenizer = Tokenizer.from_file(str(pair / "target" / "tokenizer.json"))
    stream = train_pair.encode_documents(tokenizer, [d for d in documents if not is_held_out(d.source)])
    written_path = work_dir / "written.pt"
    if written_path.exists():
        written = torch.load(written_path, weights_only=True)
    else:
        written = train_pair.write_text(target, stream, preset.text)
        torch.save(written, written_path)
    vocab_size = target.config.vocab_size
    return Text(
        stream,
        written,
        choose_draft_ids(stream, written, vocab_size, min(preset.draft_vocab_size, vocab_size)),
    )


def train_head(
    kind: str,
    target: LlamaForCausalLM,
    text: Text,
    preset: HeadsPreset,
    work_dir: Path,
    resume: bool = False,
    stop_after: int | None = None,
) -> Head | None:
    """Train one head; None when stopped before its last step."""
    settings, seed = preset.heads[kind], preset.text.seed
    head = make_head(target, kind, preset, text.draft_ids).train()
    trainer = RoundsTrainer(head, settings.rounds, work_dir / f"{kind}.checkpoint")
    if resume and trainer.checkpoint.exists():
        trainer.restore()
    written_rows = max(1, preset.batch_tokens // text.written.shape[1])

    def loss_at(step: int) -> Tensor:
        if step % 2:
            generator = torch.Generator().manual_seed(seed * 1013 + step)
            rows = torch.randint(len(text.written), (written_rows,), generator=generator)
            tokens = text.written[rows].long()
        else:
            tokens = train_pair.batch_at(text.stream, step // 2, preset.batch_tokens, preset.context_tokens, seed + 6)
        return head_loss(head, target, tokens, trainer.locate(step)[1], settings.step_decay)

    if not train_pair.run_steps(trainer, loss_at, kind, stop_after):
        return None
    train_pair.round_to_bfloat16(head)
    save_head(head, work_dir / kind)
    return head.eval()


# --------------------------------------------------------------------------------------------------- metrics


@torch.no_grad()
def write_greedily(target: LlamaForCausalLM, prompt_ids: list[int], new_tokens: int) -> Tensor:
    """Returns: [1, up to len(prompt_ids) + new_tokens], prompt and continuation."""
    given = torch.tensor([prompt_ids])
    return target.generate(
        given,
        attention_mask=torch.ones_like(given),
        max_new_tokens=new_tokens,
        do_sample=False,
        pad_token_id=train_pair.PAD_ID,
    )


@torch.no_grad()
def count_accepted(target: LlamaForCausalLM, head: Head, text: Tensor, prompt_tokens: int) -> tuple[int, int]:
    """Speculate on a text that the target wrote greedily, five tokens at a time, and count.

    While a chain is accepted it reads exactly this text, so chains from every position at once hold the ones that
    serving would draft; counted as in `train_pair.measure_acceptance`.

    Args:
        text: [1, length], prompt and continuation.
    Returns: (accepted tokens, verifications).
    """
    length = text.shape[1]
    accepted = verifications = 0
    if length < prompt_tokens + 1 + DRAFTED_TOKENS:
        return accepted, verifications
    drafted = head.draft(text, head.features(read_target(target, text)), DRAFTED_TOKENS)
    tokens = torch.stack([d.logits[0].argmax(-1) for d in drafted], dim=1)  # [chains, drafted]
    if head.draft_ids is not None:
        tokens = head.draft_ids[tokens]
    position = prompt_tokens + 1  # of the first drafted token: the first new token comes from the prefill
    while position + DRAFTED_TOKENS <= length:
        agrees = (tokens[position - 2] == text[0, position : position + DRAFTED_TOKENS]).tolist()
        kept = agrees.index(False) if False in agrees else DRAFTED_TOKENS
        accepted, verifications, position = accepted + kept, verifications + 1, position + kept + 1
    return accepted, verifications


def measure(pair: Path, work_dir: Path, preset_name: str, preset: HeadsPreset, kinds: list[str]) -> dict:
    """The numbers of the card's section, for the heads in the work directory."""
    target = train_pair.load_model(pair / "target")
    new_tokens = preset.text.measured_tokens
    prompts = [json.loads(line) for line in (pair / "prompts.jsonl").read_text().splitlines()]
    tokenizer = Tokenizer.from_file(str(pair / "target" / "tokenizer.json"))
    heads = {kind: load_head(work_dir / kind, target) for kind in kinds}
    counts: dict[str, dict[str, tuple[int, int]]] = {kind: {} for kind in kinds}
    written, ids_of = [], {p["id"]: tokenizer.encode(p["text"]).ids for p in prompts}
    for prompt in tqdm(prompts, desc="acceptance", unit="prompt"):
        ids = ids_of[prompt["id"]]
        text = write_greedily(target, ids, new_tokens)
        written.append(text[0, len(ids) :])
        for kind, head in heads.items():
            counts[kind][prompt["id"]] = count_accepted(target, head, text, len(ids))

    def describe(kind: str) -> dict:
        head, settings = heads[kind], preset.heads[kind]
        history = torch.load(work_dir / f"{kind}.checkpoint", weights_only=True)["losses"]
        tail = max(1, len(history) // 20)
        described = {
            "parameters": sum(p.numel() for p in head.parameters()),
            "bytes": (work_dir / kind / "model.safetensors").stat().st_size,
            "heads": settings.heads,
            "kv_heads": settings.kv_heads,
            "intermediate": settings.intermediate,
            "vocabulary": target.config.vocab_size if head.draft_ids is None else len(head.draft_ids),
            "training": {
                "steps": len(history),
                "tokens": len(history) * preset.batch_tokens,
                "rounds": [list(r) for r in settings.rounds],
                "first_loss": round(history[0], 3),
                "last_loss": round(sum(history[-tail:]) / tail, 3),
            },
            "acceptance": {
                "mean_accepted": train_pair.summarize_acceptance(prompts, counts[kind]),
                "accepted_and_verifications": counts[kind],
            },
        }
        if isinstance(head, Eagle3Head):
            described["layer_ids"] = head.layer_ids
            described["coverage"] = round(head.t2d[torch.cat(written)].float().mean().item(), 4)
        return described

    return {
        "preset": preset_name,
        "settings": {**asdict(preset), "text": "the pair's"},
        "torch": torch.__version__.split("+")[0],
        "target_sha256": hash_file(pair / "target" / "model.safetensors"),
        "drafted": DRAFTED_TOKENS,
        "new_tokens": new_tokens,
        "heads": {kind: describe(kind) for kind in kinds},
    }


def hash_file(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def publish(work_dir: Path, pair: Path, out: Path, heads: dict) -> None:
    """Put heads, metrics and card in their place; heads of another kind, of the same target, stay recorded."""
    metrics = json.loads((pair / "metrics.json").read_text())
    before = metrics.get("heads", {})
    if before.get("target_sha256") == heads["target_sha256"]:
        heads["heads"] = before["heads"] | heads["heads"]
    heads["heads"] = {kind: heads["heads"][kind] for kind in HEADS if kind in heads["heads"]}
    metrics["heads"] = heads
    # Through JSON, so that the card does not depend on whether it is rendered now or from the file.
    metrics = json.loads(json.dumps(metrics))
    contents = {
        Path("metrics.json"): (json.dumps(metrics, indent=1) + "\n").encode(),
        Path("README.md"): train_pair.render_card(metrics).encode(),
    }
    for kind in heads["heads"]:
        if (work_dir / kind).exists():
            contents |= {Path(kind) / p.name: p.read_bytes() for p in sorted((work_dir / kind).iterdir())}
    train_pair.write_files(contents, out)


# ------------------------------------------------------------------------------------------------------ runs

app = typer.Typer(add_completion=False, help=__doc__, rich_markup_mode=None)


@app.command()
def train(
    work_dir: Annotated[Path, typer.Option(help="Checkpoints and intermediate results.")],
    pair: Annotated[Path, typer.Option(help="The pair whose target the heads are for.")] = PAIR,
    out: Annotated[Path | None, typer.Option(help="Where the heads go; default: the pair's folder.")] = None,
    preset: Annotated[str, typer.Option(help=f"One of {', '.join(PRESETS)}.")] = "full",
    kinds: Annotated[str, typer.Option(help="Which heads, separated by commas.")] = ",".join(HEADS),
    resume: Annotated[bool, typer.Option(help="Go on from what is in the work directory.")] = False,
    stop_after: Annotated[int | None, typer.Option(help="Stop each stage after this step.")] = None,
    threads: Annotated[int, typer.Option(help="CPU threads; results are reproducible for the same number.")] = 1,
) -> None:
    """Train heads, measure them and add them to the model card."""
    if preset not in PRESETS:
        raise typer.BadParameter(f"--preset {preset}: choose one of {', '.join(PRESETS)}")
    chosen = [kind.strip() for kind in kinds.split(",")]
    if unknown := [kind for kind in chosen if kind not in HEADS]:
        raise typer.BadParameter(f"--kinds {', '.join(unknown)}: choose from {', '.join(HEADS)}")
    settings, target_hash = PRESETS[preset], hash_file(pair / "target" / "model.safetensors")
    held = [kind for kind in chosen if (work_dir / f"{kind}.checkpoint").exists()]
    if held and not resume:
        raise typer.BadParameter(
            f"--work-dir {work_dir} holds a run of {', '.join(held)}: add --resume to go on, or name another"
        )
    record = json.loads(json.dumps({"target_sha256": target_hash, **asdict(settings)}))
    record_path = work_dir / "heads-settings.json"
    if record_path.exists() and json.loads(record_path.read_text()) != record:
        raise typer.BadParameter(
            f"--work-dir {work_dir} was made with another target or other settings than --preset {preset}: name another"
        )
    torch.set_num_threads(threads)
    target = train_pair.load_model(pair / "target")
    text = prepare_text(target, pair, settings, work_dir)
    record_path.write_text(json.dumps(record))
    finished = [kind for kind in chosen if train_head(kind, target, text, settings, work_dir, resume, stop_after)]
    if finished != chosen:
        typer.echo(f"stopped; go on with --resume --work-dir {work_dir}")
        return
    heads = measure(pair, work_dir, preset, settings, chosen)
    publish(work_dir, pair, out or pair, heads)
    means = {kind: head["acceptance"]["mean_accepted"] for kind, head in heads["heads"].items()}
    typer.echo(json.dumps({"out": str(out or pair), "mean_accepted": means}))


@app.command()
def card(pair: Annotated[Path, typer.Option(help="A folder with metrics.json.")] = PAIR) -> None:
    """Write README.md again from metrics.json."""
    (pair / "README.md").write_text(train_pair.render_card(json.loads((pair / "metrics.json").read_text())))


if __name__ == "__main__":
    app()
