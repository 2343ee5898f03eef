#!/usr/bin/env python
"""Train the model pair that everything here runs on: a small Llama target, and a draft distilled from it.

    python scripts/train_pair.py train --preset full --work-dir pair-work --out tests/pair
    python scripts/train_pair.py train --preset full --work-dir pair-work --out tests/pair --resume
    python scripts/train_pair.py card --out tests/pair

The text is what every machine with Python has: the standard library's sources, its documentation strings and
the language reference inside `pydoc_data`. Stages, each resumable: corpus, tokenizer and prompts -> target ->
target-written text -> draft -> metrics and model card. The result loads with `transformers` and with SGLang.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import inspect
import json
import os
import platform
import random
import re
import sys
import sysconfig
import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import torch.nn.functional as F
import typer
from heads_card import render_heads
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from tqdm import tqdm
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

PAD, BOS, EOS, IM_START, IM_END = SPECIAL_TOKENS = (
    "<|pad|>",
    "<|bos|>",
    "<|eos|>",
    "<|im_start|>",
    "<|im_end|>",
)
PAD_ID, BOS_ID, EOS_ID, IM_START_ID, IM_END_ID = range(len(SPECIAL_TOKENS))
STOP_IDS = [EOS_ID, IM_END_ID]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' }}"
    "{% if not loop.last or add_generation_prompt %}{{ '\\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
KINDS = ("code", "prose", "chat", "repetitive")
HELD_OUT_ONE_IN = 16
DRAFTED_TOKENS = 5  # per verification, for the measured acceptance


@dataclass(frozen=True)
class Shape:
    """A Llama architecture; head_dim and the query/key-value group size are the same for target and draft."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    head_dim: int = 64


@dataclass(frozen=True)
class Preset:
    """Everything a run depends on, so that a preset's name and seed say what was trained."""

    target: Shape
    draft: Shape
    vocab_size: int = 2048
    max_positions: int = 2048
    corpus_bytes: int | None = None  # None: everything
    batch_tokens: int = 4096
    context_tokens: int = 512
    long_context_tokens: int = 1024  # the last fifth of the steps, so that positions up to here are trained
    target_steps: int = 500
    draft_steps: int = 600
    written_sequences: int = 1024  # continuations the target writes for the draft to learn from
    written_tokens: int = 128
    prompts: int = 160
    measured_tokens: int = 96
    seed: int = 20250215


_TARGET = Shape(hidden=256, layers=5, heads=4, kv_heads=2, intermediate=704)
_DRAFT = Shape(hidden=128, layers=1, heads=2, kv_heads=1, intermediate=384)
PRESETS = {
    "full": Preset(target=_TARGET, draft=_DRAFT),
    "quick": Preset(
        target=_TARGET,
        draft=_DRAFT,
        target_steps=100,
        draft_steps=90,
        written_sequences=128,
        written_tokens=64,
    ),
    "tiny": Preset(
        target=Shape(hidden=64, layers=2, heads=2, kv_heads=1, intermediate=176),
        draft=Shape(hidden=32, layers=1, heads=2, kv_heads=1, intermediate=64),
        vocab_size=512,
        max_positions=512,
        corpus_bytes=1_000_000,
        batch_tokens=2048,
        context_tokens=128,
        long_context_tokens=256,
        target_steps=60,
        draft_steps=60,
        written_sequences=32,
        written_tokens=48,
        prompts=16,
        measured_tokens=32,
    ),
}


# ---------------------------------------------------------------------------------------------------- corpus


class Document(NamedTuple):
    source: str  # the file, topic or built-in module it comes from; the split is by source
    kind: str  # one of KINDS
    text: str
    turns: tuple[str, str] | None = None  # (user, assistant) of a chat document


# Test folders differ between distributions of Python, tables of characters are not text, and build records
# name a machine.
_SKIPPED_FOLDERS = {
    "test",
    "tests",
    "idle_test",
    "site-packages",
    "dist-packages",
    "encodings",
    "pydoc_data",
    "__pycache__",
}
_SKIPPED_FILES = re.compile(r"(^|/)(config-|_sysconfigdata|__phello__)|html/entities\.py$|\.pyc$")


def is_held_out(source: str) -> bool:
    """Whether a source is kept out of training: by a hash of its name, so alike on every machine."""
    return int.from_bytes(hashlib.sha256(source.encode()).digest()[:4], "big") % HELD_OUT_ONE_IN == 0


def render_chat(user: str, assistant: str | None = None) -> str:
    """The chat template written out; without an answer it ends where the model has to go on."""
    prompt = f"{IM_START}user\n{user}{IM_END}\n{IM_START}assistant\n"
    return prompt if assistant is None else f"{prompt}{assistant}{IM_END}"


def _chat(source: str, user: str, assistant: str) -> Document:
    return Document(source, "chat", render_chat(user, assistant), (user, assistant))


def _pick(options: tuple[str, ...], key: str) -> str:
    return options[hashlib.sha256(key.encode()).digest()[0] % len(options)]


_EXPLAIN = ("Explain {}.", "What does {} do?", "Describe {}.", "What is {}?")


def _documents_of_file(path: Path, source: str) -> Iterator[Document]:
    """The file itself, its long documentation strings as prose, and its documented symbols as chat."""
    try:
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
    except (UnicodeDecodeError, SyntaxError, ValueError):  # e.g. lib2to3's samples in other encodings
        return
    yield Document(source, "code", text)
    module = source.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    if overview := ast.get_docstring(tree):
        yield _chat(source, _pick(_EXPLAIN, source).format(f"the module {module}"), overview)
        if len(overview) > 300:
            yield Document(source, "prose", overview)
    lines = text.splitlines()

    def walk(node: ast.AST, prefix: str) -> Iterator[Document]:
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            name = f"{prefix}.{child.name}"
            documentation = ast.get_docstring(child)
            if documentation and len(documentation) > 20:
                yield _chat(source, _pick(_EXPLAIN, name).format(name), documentation)
                code = textwrap.dedent("\n".join(lines[child.lineno - 1 : child.end_lineno]))
                summary = documentation.split("\n\n")[0].replace("\n", " ")
                if not isinstance(child, ast.ClassDef) and len(code) < 2000:
                    if _pick(("write", "document"), name) == "write":
                        yield _chat(source, f"Write the function {child.name}. {summary}", code)
                    else:
                        bare = code.replace(documentation, "...")
                        yield _chat(source, f"What does this code do?\n\n{bare}", summary)
            if isinstance(child, ast.ClassDef):
                yield from walk(child, name)

    yield from walk(tree, module)


def _documents_of_builtins() -> Iterator[Document]:
    """Documentation strings of the modules written in C."""
    for module_name in sorted(n for n in sys.builtin_module_names if not n.startswith("_")):
        source = f"builtin:{module_name}"
        module = importlib.import_module(module_name)
        for name, value in sorted(vars(module).items()):
            members = [(f"{module_name}.{name}", value)]
            if inspect.isclass(value):
                members += [(f"{module_name}.{name}.{n}", v) for n, v in sorted(vars(value).items()) if n[0] != "_"]
            for qualified, member in members:
                documentation = getattr(member, "__doc__", None)
                if name[0] != "_" and callable(member) and isinstance(documentation, str) and len(documentation) > 20:
                    qualified = qualified.removeprefix("builtins.")
                    yield _chat(source, _pick(_EXPLAIN, qualified).format(qualified), inspect.cleandoc(documentation))


def _repetitive(documents: list[Document], rng: random.Random) -> Iterator[Document]:
    """Blocks of a few lines written again and again: teaches copying, which small models learn late."""
    for document in documents:
        if document.kind != "code":
            continue
        lines = document.text.splitlines()
        for _ in range(max(1, len(lines) // 150)):
            if block := cut_block(lines, rng):
                yield Document(document.source, "repetitive", block * rng.randint(3, 8))


def cut_block(lines: list[str], rng: random.Random) -> str | None:
    """One to six consecutive lines that say something, or None where chance picked too few."""
    start, count = rng.randrange(max(1, len(lines))), rng.randint(1, 6)
    block = "\n".join(lines[start : start + count]) + "\n"
    return block if 20 <= len(block.strip()) <= 400 else None


def collect_documents(max_bytes: int | None, seed: int) -> list[Document]:
    """All documents of this Python, in an order that depends on the seed only.

    Args:
        max_bytes: stop taking files once this much text is held; None for all.
        seed: of the order and of the blocks that are repeated.
    """
    from pydoc_data.topics import topics

    rng = random.Random(seed)
    stdlib = Path(sysconfig.get_path("stdlib"))
    files = [
        (path, path.relative_to(stdlib).as_posix())
        for path in sorted(stdlib.rglob("*.py"))
        if not _SKIPPED_FOLDERS & set(path.relative_to(stdlib).parts)
        and not _SKIPPED_FILES.search(path.relative_to(stdlib).as_posix())
    ]
    rng.shuffle(files)
    documents: list[Document] = []
    taken_bytes = 0
    for path, source in files:
        if max_bytes is not None and taken_bytes >= max_bytes:
            break
        new = list(_documents_of_file(path, source))
        taken_bytes += sum(len(d.text) for d in new)
        documents += new
    documents += [Document(f"pydoc_data/topics:{name}", "prose", text) for name, text in sorted(topics.items())]
    if max_bytes is None:
        documents += _documents_of_builtins()
    documents += _repetitive(documents, rng)
    rng.shuffle(documents)
    return documents


# ------------------------------------------------------------------------------------------------- tokenizer


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE without a normaliser: every text survives encode and decode."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=list(SPECIAL_TOKENS),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(f"the corpus yields {tokenizer.get_vocab_size()} tokens, not {vocab_size}: take more text")
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_positions: int) -> None:
    """Write what `AutoTokenizer` reads. No token is added by itself: a prompt is encoded as it stands."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "bos_token": BOS,
        "eos_token": EOS,
        "additional_special_tokens": [IM_START, IM_END],
        "model_max_length": max_positions,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def encode_documents(tokenizer: Tokenizer, documents: list[Document]) -> Tensor:
    """One stream of token ids; plain text begins with BOS, and each document ends with EOS or <|im_end|>."""
    stream: list[int] = []
    for document, encoding in zip(documents, tokenizer.encode_batch([d.text for d in documents]), strict=True):
        stream += encoding.ids if document.kind == "chat" else [BOS_ID, *encoding.ids, EOS_ID]
    return torch.tensor(stream, dtype=torch.int16)


def batch_at(stream: Tensor, step: int, batch_tokens: int, context_tokens: int, seed: int) -> Tensor:
    """The batch of a step, a function of its arguments alone, so that a resumed run sees the same data.

    Returns: [batch_tokens // context_tokens, context_tokens + 1] int64; each epoch visits every window
    once, in its own order and from its own offset.
    """
    rows = batch_tokens // context_tokens
    windows = (len(stream) - 1) // context_tokens - 1
    if windows < rows:
        raise ValueError(f"{len(stream)} tokens of text cannot fill a batch of {rows} x {context_tokens}")
    steps_per_epoch = windows // rows
    epoch, position = divmod(step, steps_per_epoch)
    generator = torch.Generator().manual_seed(seed * 1009 + epoch)
    offset = int(torch.randint(context_tokens, (1,), generator=generator))
    chosen = torch.randperm(windows, generator=generator)[position * rows : (position + 1) * rows]
    starts = offset + chosen * context_tokens
    return torch.stack([stream[s : s + context_tokens + 1] for s in starts.tolist()]).long()


# ---------------------------------------------------------------------------------------------------- models


def build_model(shape: Shape, preset: Preset, seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=preset.vocab_size,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=preset.max_positions,
        tie_word_embeddings=True,
        pad_token_id=PAD_ID,
        bos_token_id=BOS_ID,
        eos_token_id=STOP_IDS,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config)


def round_to_bfloat16(model: torch.nn.Module) -> None:
    """Give the float32 weights the values that will be shipped."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())


def save_model(model: LlamaForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Write a Hugging Face folder with bfloat16 weights; `model` itself stays float32."""
    folder.mkdir(parents=True, exist_ok=True)
    shipped = LlamaForCausalLM(model.config)
    shipped.load_state_dict(model.state_dict())
    shipped = shipped.bfloat16()
    shipped.generation_config = GenerationConfig(bos_token_id=BOS_ID, pad_token_id=PAD_ID, eos_token_id=STOP_IDS)
    shipped.save_pretrained(folder)
    save_tokenizer(tokenizer, folder, model.config.max_position_embeddings)


def load_model(folder: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


class Muon(torch.optim.Optimizer):
    """Momentum whose update of a matrix is orthogonalised by a Newton-Schulz iteration (Jordan et al., 2024).

    In float32: `torch.optim.Muon` iterates in bfloat16, four times slower on CPUs without bfloat16 units.
    """

    def __init__(self, parameters: Iterable[Tensor], lr: float, momentum: float = 0.95):
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                velocity = state.setdefault("velocity", torch.zeros_like(parameter))
                velocity.lerp_(parameter.grad, 1 - group["momentum"])
                update = orthogonalize(parameter.grad.lerp(velocity, group["momentum"]))
                scale = max(1.0, parameter.shape[0] / parameter.shape[1]) ** 0.5
                parameter.add_(update, alpha=-group["lr"] * scale)


def orthogonalize(matrix: Tensor, iterations: int = 5) -> Tensor:
    """Push all singular values towards 1; the coefficients are those published with Muon."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(iterations):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


class Trainer:
    """A model with its optimisers at some step; saves and restores all of it.

    The learning rate warms up over 16 steps, stays, and falls linearly to 0 over the last half.
    """

    max_grad_norm: float | None = None

    def __init__(self, model: torch.nn.Module, total_steps: int, checkpoint: Path):
        def is_matrix(name: str, parameter: Tensor) -> bool:
            return parameter.ndim == 2 and "embed" not in name and "lm_head" not in name

        matrices = [p for n, p in model.named_parameters() if is_matrix(n, p)]
        others = [p for n, p in model.named_parameters() if not is_matrix(n, p)]
        self.model, self.total_steps, self.checkpoint = model, total_steps, checkpoint
        self.optimizers = self.make_optimizers(matrices, others)
        self.base_rates = [[g["lr"] for g in o.param_groups] for o in self.optimizers]
        self.step_index = 0
        self.losses: list[float] = []

    def make_optimizers(self, matrices: list[Tensor], others: list[Tensor]) -> list[torch.optim.Optimizer]:
        return [
            Muon(matrices, lr=0.02),
            torch.optim.AdamW(others, lr=4e-3, betas=(0.9, 0.95), weight_decay=0.0),
        ]

    def rate(self) -> float:
        done = self.step_index / self.total_steps
        return min(1.0, (self.step_index + 1) / 16, 2 * (1 - done))

    def apply(self, loss: Tensor) -> None:
        loss.backward()
        if self.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.max_grad_norm)
        rate = self.rate()
        for optimizer, base_rates in zip(self.optimizers, self.base_rates, strict=True):
            for group, base in zip(optimizer.param_groups, base_rates, strict=True):
                group["lr"] = base * rate
            optimizer.step()
        self.model.zero_grad(set_to_none=True)
        self.losses.append(loss.item())
        self.step_index += 1

    def state(self) -> dict:
        return {
            "model": self.model.state_dict(),
            "optimizers": [o.state_dict() for o in self.optimizers],
            "step_index": self.step_index,
            "losses": self.losses,
        }

    def save(self) -> None:
        partial = self.checkpoint.with_suffix(".partial")
        torch.save(self.state(), partial)
        os.replace(partial, self.checkpoint)

    def restore(self) -> None:
        self.take_over(torch.load(self.checkpoint, weights_only=True))

    def take_over(self, state: dict) -> None:
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step_index, self.losses = state["step_index"], state["losses"]


def next_token_loss(model: LlamaForCausalLM, tokens: Tensor) -> Tensor:
    logits = model(tokens[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def distillation_loss(draft: LlamaForCausalLM, target: LlamaForCausalLM, tokens: Tensor) -> Tensor:
    """KL from the target's distribution (sampled requests) plus cross-entropy to its argmax (greedy ones)."""
    with torch.no_grad():
        target_logits = target(tokens[:, :-1], use_cache=False).logits.flatten(0, 1)
    draft_log_probs = draft(tokens[:, :-1], use_cache=False).logits.flatten(0, 1).log_softmax(-1)
    divergence = F.kl_div(draft_log_probs, target_logits.log_softmax(-1), log_target=True, reduction="batchmean")
    return 0.5 * divergence + 0.5 * F.nll_loss(draft_log_probs, target_logits.argmax(-1))


def run_steps(trainer: Trainer, loss_at, name: str, stop_after: int | None, checkpoint_every: int = 50) -> bool:
    """Run until the last step, or until `stop_after`; say whether the last step was reached."""
    last = trainer.total_steps if stop_after is None else min(stop_after, trainer.total_steps)
    with tqdm(total=trainer.total_steps, initial=trainer.step_index, desc=name, unit="step", mininterval=2) as bar:
        while trainer.step_index < last:
            trainer.apply(loss_at(trainer.step_index))
            bar.set_postfix(loss=f"{trainer.losses[-1]:.3f}", refresh=False)
            bar.update()
            if trainer.step_index % checkpoint_every == 0:
                trainer.save()
    trainer.save()
    return trainer.step_index == trainer.total_steps


@torch.no_grad()
def write_text(target: LlamaForCausalLM, stream: Tensor, preset: Preset) -> Tensor:
    """Let the target continue training text, half greedily, half sampled: the draft is judged on such text.

    Returns: [written_sequences, 64 + written_tokens] int16, the first 64 of each row being the given text.
    """
    given_tokens, rows = 64, min(64, preset.written_sequences)
    generator = torch.Generator().manual_seed(preset.seed + 1)
    torch.manual_seed(preset.seed + 2)
    batches = []
    for index in tqdm(range(preset.written_sequences // rows), desc="target writes", unit="batch"):
        starts = torch.randint(len(stream) - given_tokens, (rows,), generator=generator)
        given = torch.stack([stream[s : s + given_tokens] for s in starts.tolist()]).long()
        written = target.generate(
            given,
            attention_mask=torch.ones_like(given),
            max_new_tokens=preset.written_tokens,
            eos_token_id=-1,  # after an end it goes on with another document, as the training stream does
            do_sample=index % 2 == 1,
            top_k=0,
            pad_token_id=PAD_ID,
        )
        batches.append(written.to(torch.int16))
    return torch.cat(batches)


# ------------------------------------------------------------------------------------------ prompts, metrics


def build_prompts(documents: list[Document], tokenizer: Tokenizer, count: int, seed: int) -> list[dict]:
    """Prompts of every kind from held-out sources, 8 to 400 tokens, none occurring in the training text."""
    rng = random.Random(seed)
    trained_text = "\0".join(d.text for d in documents if not is_held_out(d.source))
    per_kind = count // len(KINDS)
    wanted_lengths = [round(8 * (400 / 8) ** ((i + 0.5) / per_kind)) for i in range(per_kind)]
    prompts = []
    for kind in KINDS:
        held_out = [d for d in documents if d.kind == kind and is_held_out(d.source)]
        if kind == "chat":
            held_out = [d for d in held_out if d.turns[0] not in trained_text]
            found = _chat_prompts(held_out, wanted_lengths, tokenizer)
        else:
            found = _text_prompts(held_out, wanted_lengths, tokenizer, trained_text, rng)
        if len(found) < per_kind:
            raise ValueError(f"only {len(found)} of {per_kind} {kind} prompts found: hold out more text")
        prompts += [{"id": f"{kind}-{i:03d}", "kind": kind, **prompt} for i, prompt in enumerate(found)]
    return prompts


def _chat_prompts(documents: list[Document], wanted_lengths: list[int], tokenizer: Tokenizer) -> list[dict]:
    """For each wanted length the unused question that comes closest."""
    questions = {d.turns[0]: d.source for d in documents}
    lengths = {user: len(tokenizer.encode(render_chat(user)).ids) for user in questions}
    prompts = []
    for wanted in wanted_lengths[: len(questions)]:
        user = min(lengths, key=lambda u: (abs(lengths[u] - wanted), u))
        del lengths[user]
        prompts.append(
            {
                "source": questions[user],
                "text": render_chat(user),
                "messages": [{"role": "user", "content": user}],
            }
        )
    return prompts


def _text_prompts(
    documents: list[Document],
    wanted_lengths: list[int],
    tokenizer: Tokenizer,
    trained_text: str,
    rng: random.Random,
) -> list[dict]:
    """Excerpts that start at some line and have exactly the wanted lengths."""
    weights = [len(d.text) ** 0.5 for d in documents]
    prompts = []
    for wanted in wanted_lengths if documents else []:
        for _ in range(200):
            document = rng.choices(documents, weights)[0]
            lines = document.text.splitlines(keepends=True)
            start = rng.randrange(len(lines))
            following = lines[start:] * (20 if document.kind == "repetitive" else 1)
            ids = tokenizer.encode("".join(following[:200])).ids[:wanted]
            text = tokenizer.decode(ids)
            if len(ids) == wanted == len(tokenizer.encode(text).ids) and text.strip() and text not in trained_text:
                prompts.append({"source": document.source, "text": text})
                break
    return prompts


@torch.no_grad()
def measure_acceptance(
    target: LlamaForCausalLM, draft: LlamaForCausalLM, prompt_ids: list[int], new_tokens: int
) -> tuple[int, int]:
    """Speculate on one prompt, greedily, five tokens at a time, and count.

    While a chain is accepted the draft reads exactly the target's own text, so one teacher-forced pass of the
    draft over that text gives every chain. Chains that would reach beyond the text are not counted.

    Returns: (accepted tokens, verifications).
    """
    given = torch.tensor([prompt_ids])
    text = target.generate(
        given,
        attention_mask=torch.ones_like(given),
        max_new_tokens=new_tokens,
        do_sample=False,
        pad_token_id=PAD_ID,
    )
    agrees = (draft(text[:, :-1], use_cache=False).logits.argmax(-1) == text[:, 1:])[0, len(prompt_ids) - 1 :].tolist()
    accepted = verifications = 0
    position = 1  # the first token comes from the prefill
    while position + DRAFTED_TOKENS <= len(agrees):
        chain = agrees[position : position + DRAFTED_TOKENS]
        length = chain.index(False) if False in chain else DRAFTED_TOKENS
        accepted, verifications, position = accepted + length, verifications + 1, position + length + 1
    return accepted, verifications


@torch.no_grad()
def measure_agreement(target: LlamaForCausalLM, draft: LlamaForCausalLM, batches: Iterable[Tensor]) -> float:
    """The share of positions where target and draft find the same token likeliest."""
    same = [
        (target(b[:, :-1], use_cache=False).logits.argmax(-1) == draft(b[:, :-1], use_cache=False).logits.argmax(-1))
        for b in batches
    ]
    return torch.cat([s.flatten() for s in same]).float().mean().item()


def summarize_acceptance(prompts: list[dict], counts: dict[str, tuple[int, int]]) -> dict:
    """Mean accepted tokens per verification, overall and by kind."""
    totals: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for prompt in prompts:
        for key in ("overall", prompt["kind"]):
            totals[key][0] += counts[prompt["id"]][0]
            totals[key][1] += counts[prompt["id"]][1]
    return {key: round(accepted / max(1, verifications), 3) for key, (accepted, verifications) in totals.items()}


def measure(preset_name: str, preset: Preset, run: Run) -> dict:
    """All numbers of the model card."""
    target, draft = load_model(run.work_dir / "target"), load_model(run.work_dir / "draft")
    held_out = encode_documents(run.tokenizer, [d for d in run.documents if is_held_out(d.source)])
    batches = [batch_at(held_out, i, preset.batch_tokens, preset.context_tokens, preset.seed) for i in range(8)]
    counts: dict[str, tuple[int, int]] = {}
    for prompt in tqdm(run.prompts, desc="acceptance", unit="prompt"):
        ids = run.tokenizer.encode(prompt["text"]).ids
        counts[prompt["id"]] = measure_acceptance(target, draft, ids, preset.measured_tokens)

    def losses(name: str, steps: int) -> dict:
        history = torch.load(run.work_dir / f"{name}.checkpoint", weights_only=True)["losses"]
        tail = max(1, len(history) // 20)
        return {"steps": steps, "tokens": steps * preset.batch_tokens, "first_loss": round(history[0], 3),
                "last_loss": round(sum(history[-tail:]) / tail, 3)}  # fmt: skip

    with torch.no_grad():
        held_out_loss = {
            name: round(sum(next_token_loss(model, b).item() for b in batches) / len(batches), 3)
            for name, model in (("target", target), ("draft", draft))
        }
    trained = [d for d in run.documents if not is_held_out(d.source)]
    lengths = sorted(len(run.tokenizer.encode(p["text"]).ids) for p in run.prompts)
    return {
        "preset": preset_name,
        "settings": asdict(preset),
        "python": platform.python_version(),
        "torch": torch.__version__.split("+")[0],
        "corpus": {
            "sources_trained": len({d.source for d in trained}),
            "sources_held_out": len({d.source for d in run.documents if is_held_out(d.source)}),
            "tokens_trained": len(run.stream),
            "tokens_held_out": len(held_out),
            "characters_by_kind": dict(sum((Counter({d.kind: len(d.text)}) for d in trained), Counter())),
        },
        "parameters": {name: sum(p.numel() for p in m.parameters()) for name, m in (("target", target), ("draft", draft))},
        "training": {
            "target": losses("target", preset.target_steps),
            "draft": losses("draft", preset.draft_steps),
        },
        "held_out_loss": held_out_loss,
        "top1_agreement": round(measure_agreement(target, draft, batches), 3),
        "acceptance": {
            "drafted": DRAFTED_TOKENS,
            "new_tokens": preset.measured_tokens,
            "mean_accepted": summarize_acceptance(run.prompts, counts),
            "accepted_and_verifications": counts,
        },
        "prompts": {
            "count": len(run.prompts),
            "tokens_min_median_max": [lengths[0], lengths[len(lengths) // 2], lengths[-1]],
            "sources": sorted({p["source"] for p in run.prompts}),
        },
    }


def render_card(metrics: dict) -> str:
    """The model card, from the measured numbers alone."""
    settings, corpus, prompts = metrics["settings"], metrics["corpus"], metrics["prompts"]
    acceptance = metrics["acceptance"]
    accepted = acceptance["mean_accepted"]

    def architecture(name: str) -> str:
        shape, parameters = settings[name], metrics["parameters"][name]
        heads = f"{shape['heads']} / {shape['kv_heads']} of {shape['head_dim']}"
        sizes = f"{shape['layers']} | {shape['hidden']} | {shape['intermediate']}"
        return f"{parameters / 1e6:.2f} M | {sizes} | {heads}"

    def learning(name: str) -> str:
        history, held_out_loss = metrics["training"][name], metrics["held_out_loss"][name]
        losses = f"{history['first_loss']:.2f} -> {history['last_loss']:.2f} | {held_out_loss:.2f}"
        return f"{history['steps']} | {history['tokens'] / 1e6:.2f} M | {losses}"

    def spread(kind: str) -> str:
        """The mean, and the values that a tenth of the prompts stay below and above."""
        counts = acceptance["accepted_and_verifications"]
        means = sorted(a / v for key, (a, v) in counts.items() if v and (kind == "overall" or key.startswith(kind)))
        return f"{accepted[kind]:.2f} | {means[len(means) // 10]:.2f} | {means[-1 - len(means) // 10]:.2f}"

    heads = render_heads(metrics["heads"], KINDS) if "heads" in metrics else ""

    kinds = "\n".join(f"| {kind} | {spread(kind)} |" for kind in (*KINDS, "overall"))
    characters = ", ".join(f"{kind} {corpus['characters_by_kind'].get(kind, 0) / 1e6:.1f} M" for kind in KINDS)
    shortest, median, longest = prompts["tokens_min_median_max"]
    sources = ",\n".join(f"`{s}`" for s in prompts["sources"])
    return f"""# The model pair

A Llama-architecture target and a draft distilled from it, small enough to live in the repository. They exist
to exercise speculative decoding: the text they write looks like Python and its documentation, and means
little. Made by `scripts/train_pair.py` (preset `{metrics["preset"]}`, seed {settings["seed"]}); this card is
rendered from `metrics.json`.

| | parameters | layers | hidden | intermediate | query / kv heads |
|---|---|---|---|---|---|
| `target/` | {architecture("target")} |
| `draft/` | {architecture("draft")} |

- Byte-level BPE of {settings["vocab_size"]} tokens, shared; tied embeddings.
- {settings["max_positions"]} positions, the first {settings["long_context_tokens"]} of them trained.
- Stored as bfloat16, so `--dtype float32` and `--dtype bfloat16` serve the same weights.
- Nothing is added to a prompt. Generation ends at `<|eos|>` (text) or `<|im_end|>` (chat).
- The chat template knows any role; the training chats have one user turn ("Explain ...", "What does this code
  do?", "Write the function ...").

## Data

The standard library of Python {metrics["python"]}: its sources, documentation strings, and the language
reference in `pydoc_data` (PSF licence). Test folders, character tables and build records are left out.
Characters by kind of document: {characters}; "chat" pairs a
question on a symbol with its documentation string or source, "repetitive" repeats a few lines. A source goes
to training or is held out by a hash of its name:

| | sources | tokens |
|---|---|---|
| training | {corpus["sources_trained"]} | {corpus["tokens_trained"] / 1e6:.2f} M |
| held out | {corpus["sources_held_out"]} | {corpus["tokens_held_out"] / 1e6:.2f} M |

## Training

Steps of {settings["batch_tokens"]} tokens.

| | steps | tokens | training loss | held-out next-token loss |
|---|---|---|---|---|
| target | {learning("target")} |
| draft | {learning("draft")} |

The target learns the next token. The draft learns the target: half KL from its distribution, half
cross-entropy to its likeliest token (the draft's training loss is that sum), on training text and, every
other step, on {settings["written_sequences"]} texts written by the target. On held-out text both find the
same token likeliest at {metrics["top1_agreement"]:.1%} of the positions.

## Acceptance

Greedy, {acceptance["drafted"]} tokens drafted per verification, {acceptance["new_tokens"]} new tokens per
prompt, float32, over `prompts.jsonl`: mean over all verifications, and the spread of the prompts' own means.

| kind | mean accepted of {acceptance["drafted"]} | a tenth of the prompts below | a tenth above |
|---|---|---|---|
{kinds}
{heads}
## Prompts

`prompts.jsonl`: {prompts["count"]} prompts of {shortest} to {longest} tokens (median {median}), fields `id`,
`kind`, `source`, `text` and, for chat, `messages` (`text` is then the rendered template). All come from
held-out sources, and none occurs verbatim in the training text. Sources:
{sources}.
"""


# ------------------------------------------------------------------------------------------------------ runs


@dataclass
class Run:
    """What all stages of a run share."""

    work_dir: Path
    documents: list[Document]
    tokenizer: Tokenizer
    stream: Tensor  # training tokens
    prompts: list[dict]


def prepare(preset: Preset, work_dir: Path) -> Run:
    """Corpus, tokenizer and prompts; the same for the same Python and preset."""
    work_dir.mkdir(parents=True, exist_ok=True)
    documents = collect_documents(preset.corpus_bytes, preset.seed)
    trained = [d for d in documents if not is_held_out(d.source)]
    tokenizer = train_tokenizer((d.text for d in trained if d.kind != "repetitive"), preset.vocab_size)
    stream = encode_documents(tokenizer, trained)
    return Run(
        work_dir,
        documents,
        tokenizer,
        stream,
        build_prompts(documents, tokenizer, preset.prompts, preset.seed),
    )


def train_target(preset: Preset, run: Run, resume: bool = False, stop_after: int | None = None) -> LlamaForCausalLM | None:
    """Train the target; None when stopped before its last step."""
    model = build_model(preset.target, preset, preset.seed).train()
    trainer = Trainer(model, preset.target_steps, run.work_dir / "target.checkpoint")
    if resume and trainer.checkpoint.exists():
        trainer.restore()

    def loss_at(step: int) -> Tensor:
        is_long = step >= 0.8 * preset.target_steps
        context_tokens = preset.long_context_tokens if is_long else preset.context_tokens
        return next_token_loss(model, batch_at(run.stream, step, preset.batch_tokens, context_tokens, preset.seed))

    if not run_steps(trainer, loss_at, "target", stop_after):
        return None
    round_to_bfloat16(model)
    save_model(model, run.tokenizer, run.work_dir / "target")
    return model.eval()


def train_draft(
    preset: Preset, run: Run, target: LlamaForCausalLM, resume: bool = False, stop_after: int | None = None
) -> LlamaForCausalLM | None:
    """Distil the draft from the target; None when stopped before its last step."""
    written_path = run.work_dir / "written.pt"
    if resume and written_path.exists():
        written = torch.load(written_path, weights_only=True)
    else:
        written = write_text(target, run.stream, preset)
        torch.save(written, written_path)
    model = build_model(preset.draft, preset, preset.seed + 3).train()
    trainer = Trainer(model, preset.draft_steps, run.work_dir / "draft.checkpoint")
    if resume and trainer.checkpoint.exists():
        trainer.restore()
    written_rows = preset.batch_tokens // written.shape[1]

    def loss_at(step: int) -> Tensor:
        if step % 2:
            generator = torch.Generator().manual_seed(preset.seed * 1013 + step)
            tokens = written[torch.randint(len(written), (written_rows,), generator=generator)].long()
        else:
            tokens = batch_at(run.stream, step // 2, preset.batch_tokens, preset.context_tokens, preset.seed + 4)
        return distillation_loss(model, target, tokens)

    if not run_steps(trainer, loss_at, "draft", stop_after):
        return None
    round_to_bfloat16(model)
    save_model(model, run.tokenizer, run.work_dir / "draft")
    return model.eval()


def publish(run: Run, metrics: dict, out: Path) -> None:
    """Put the finished pair in its place. Heads of an earlier target lose their section of the card."""
    texts = {
        "prompts.jsonl": "".join(json.dumps(p) + "\n" for p in run.prompts),
        "metrics.json": json.dumps(metrics, indent=1) + "\n",
        "README.md": render_card(metrics),
    }
    contents = {Path(name): text.encode() for name, text in texts.items()}
    for name in ("target", "draft"):
        for path in sorted((run.work_dir / name).iterdir()):
            contents[Path(name) / path.name] = path.read_bytes()
    write_files(contents, out)


def write_files(contents: dict[Path, bytes], out: Path) -> None:
    """Write files below `out`, each replaced at once and the weights last."""
    for name, content in sorted(contents.items(), key=lambda item: item[0].suffix == ".safetensors"):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        partial = out / name.with_name(f".{name.name}.partial")
        partial.write_bytes(content)
        os.replace(partial, out / name)


app = typer.Typer(add_completion=False, help=__doc__, rich_markup_mode=None)


@app.command()
def train(
    out: Annotated[
        Path,
        typer.Option(help="Where the pair goes: target/, draft/, prompts.jsonl, metrics.json, README.md."),
    ],
    work_dir: Annotated[Path, typer.Option(help="Checkpoints and intermediate results.")],
    preset: Annotated[str, typer.Option(help=f"One of {', '.join(PRESETS)}.")] = "full",
    resume: Annotated[bool, typer.Option(help="Go on from what is in the work directory.")] = False,
    stop_after: Annotated[int | None, typer.Option(help="Stop the current stage after this step.")] = None,
    threads: Annotated[int, typer.Option(help="CPU threads; results are reproducible for the same number.")] = 1,
) -> None:
    """Train a pair, measure it and write its model card."""
    if preset not in PRESETS:
        raise typer.BadParameter(f"--preset {preset}: choose one of {', '.join(PRESETS)}")
    settings = PRESETS[preset]
    if not resume and any(work_dir.glob("*.checkpoint")):
        raise typer.BadParameter(f"--work-dir {work_dir} holds a run: add --resume to go on, or name another folder")
    settings_path = work_dir / "settings.json"
    if resume and settings_path.exists() and json.loads(settings_path.read_text()) != asdict(settings):
        raise typer.BadParameter(f"--work-dir {work_dir} was made with other settings than --preset {preset}: name another")
    torch.set_num_threads(threads)
    run = prepare(settings, work_dir)
    settings_path.write_text(json.dumps(asdict(settings)))
    print(f"{len(run.documents)} documents, {len(run.stream)} training tokens, {len(run.prompts)} prompts")
    target = train_target(settings, run, resume, stop_after)
    draft = target and train_draft(settings, run, target, resume, stop_after)
    if draft is None:
        print(f"stopped; go on with --resume --work-dir {work_dir}")
        return
    metrics = measure(preset, settings, run)
    publish(run, metrics, out)
    print(json.dumps({"out": str(out), "mean_accepted": metrics["acceptance"]["mean_accepted"]}))


@app.command()
def card(out: Annotated[Path, typer.Option(help="A folder with metrics.json.")]) -> None:
    """Write README.md again from metrics.json."""
    (out / "README.md").write_text(render_card(json.loads((out / "metrics.json").read_text())))


if __name__ == "__main__":
    app()
