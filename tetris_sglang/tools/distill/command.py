"""`tetris-sglang distill`."""

from __future__ import annotations

import itertools
import json
import resource
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs
from torch import Tensor
from transformers import AutoTokenizer

from tetris_sglang.tools.bench.results import collect_provenance
from tetris_sglang.tools.distill.card import render_card
from tetris_sglang.tools.distill.corpus import Question, Text, read_prompts, read_texts, write_texts
from tetris_sglang.tools.distill.divergence import DIVERGENCES
from tetris_sglang.tools.distill.lesson import Accepted, Lesson, judge
from tetris_sglang.tools.distill.steering import SteeredDraft
from tetris_sglang.tools.distill.students import (
    FRESH,
    HeadStudent,
    StandaloneStudent,
    Teacher,
    default_layer_ids,
    is_standalone,
    load_student,
    make_student,
    steer_student,
)
from tetris_sglang.tools.distill.training import Course, train

WRITERS = ("target", "draft", "both")
TEMPERATURES = (0.0, 0.7, 0.0, 1.0)
"""At which prompts are answered, in turn."""
CHAINS = (2, 3, 2, 5)
"""Lengths of a head's chains, in turn: long ones are dear, and once they are learnt, more text helps more."""
TEXTS, CHECKPOINT = "texts.jsonl", "checkpoint"
_WAIT = timedelta(hours=12)
"""For the process that writes the texts."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Of `tetris-sglang distill`; see its --help.

    Raises:
        ValueError: they do not fit together; the message names one.
    """

    target: str
    draft: str
    out: Path
    work_dir: Path
    prompts: Sequence[Path] = ()
    traffic: Sequence[Path] = ()
    writer: str = "target"
    divergence: str = "forward-kl"
    greedy_share: float = 0.5
    steps: int = 300
    batch_tokens: int = 2048
    rate: float | None = None
    max_tokens: int = 448
    max_texts: int = 4000
    held_out: int = 64
    chain: int = 5
    layer_ids: Sequence[int] | None = None
    vocabulary: int = 6144
    intermediate: int | None = None
    mask_token: str | None = None
    steer: bool = False
    server_flags: Sequence[str] = ()
    seed: int = 0
    resume: bool = False
    stop_after: int | None = None

    def __post_init__(self) -> None:
        if self.divergence not in DIVERGENCES:
            raise ValueError(f"--divergence {self.divergence}: one of {', '.join(DIVERGENCES)}")
        if self.writer not in WRITERS:
            raise ValueError(f"--writer {self.writer}: one of {', '.join(WRITERS)}")
        if not self.prompts and not self.traffic:
            raise ValueError("nothing to learn from: give --prompts, --traffic or both")
        if not 0 <= self.greedy_share <= 1:
            raise ValueError(f"--greedy-share {self.greedy_share}: a share is from 0 to 1")
        if not self.is_fresh and not Path(self.draft).is_dir():
            raise ValueError(f"--draft {self.draft}: no such folder, and no new draft's kind ({', '.join(FRESH)})")
        if self.writer != "target" and (self.is_fresh or not is_standalone(Path(self.draft))):
            raise ValueError(f"--writer {self.writer}: {self.draft} writes no texts of its own, a standalone draft does")
        if self.steer and (self.is_fresh or not is_standalone(Path(self.draft))):
            raise ValueError(f"--steer: {self.draft} is no standalone draft. Give one, or leave the flag out")
        if self.out.exists() and any(self.out.iterdir()):
            raise ValueError(f"--out {self.out} is not empty: give another folder")
        if self.checkpoint.exists() and not self.resume:
            raise ValueError(f"{self.checkpoint} is there: add --resume to go on, or give another --work-dir")

    @property
    def is_fresh(self) -> bool:
        return self.draft in FRESH

    @property
    def checkpoint(self) -> Path:
        return self.work_dir / CHECKPOINT

    @property
    def made_with(self) -> dict[str, Any]:
        """What may not change between a training's beginning and its end."""
        names = ("divergence", "greedy_share", "batch_tokens", "chain", "seed", "steps", "rate", "steer")
        return {"target": str(self.target), "draft": str(self.draft)} | {name: getattr(self, name) for name in names}


def distill(options: Options) -> dict[str, Any] | None:
    """Make a draft better at what the target writes; returns what `metrics.json` has, or None where it stopped early.

    Raises:
        ValueError: what was given does not fit together; the message names the option.
    """
    checkpoint = options.checkpoint
    course = Course.read(checkpoint, options.made_with) if checkpoint.exists() else Course(options.made_with)
    options.work_dir.mkdir(parents=True, exist_ok=True)
    has_gpu = torch.cuda.is_available()
    accelerator = Accelerator(
        cpu=not has_gpu,
        mixed_precision="bf16" if has_gpu else "no",  # which takes most CPUs ten times as long
        kwargs_handlers=[InitProcessGroupKwargs(timeout=_WAIT)],
    )
    files = [*options.traffic, *_write(accelerator, options)]
    dtype = torch.bfloat16 if accelerator.device.type == "cuda" else torch.float32
    teacher = Teacher(options.target, accelerator.device, dtype)
    lengths = {"max_tokens": options.max_tokens, "min_output_tokens": options.chain + 2}
    texts = [text for path in files for text in read_texts(path, vocab_size=teacher.vocab_size, **lengths)]
    judged, learnt = split(texts, options.held_out)
    student = _find_student(options, teacher, learnt).to(accelerator.device)

    def measure() -> dict[str, Any]:
        with accelerator.autocast():
            return summarise(judge(student.eval(), teacher, judged, options.chain, options.batch_tokens))

    if course.before is None and not options.is_fresh:
        course.before = measure()
    is_head = isinstance(student, HeadStudent)
    is_model = not is_head or student.head.kind == SteeredDraft.kind
    train(
        accelerator,
        Lesson(student, DIVERGENCES[options.divergence], options.greedy_share),
        teacher,
        learnt,
        course,
        checkpoint,
        num_steps=options.steps,
        chains=[min(n, options.chain) for n in CHAINS] if is_head and not student.is_block else [options.chain],
        batch_tokens=options.batch_tokens,
        rate=options.rate if options.rate is not None else _default_rate(not is_model, options.is_fresh),
        uses_muon=not is_model,
        seed=options.seed,
        stop_after=options.stop_after,
    )
    if course.step < options.steps:
        return None
    metrics = _summarise_run(course, measure(), learnt, len(judged), student, accelerator.num_processes)
    if accelerator.is_main_process:
        options.out.mkdir(parents=True, exist_ok=True)
        student.save(options.out)
        (options.out / "metrics.json").write_text(json.dumps(metrics, indent=1) + "\n")
        (options.out / "README.md").write_text(render_card(metrics))
    accelerator.wait_for_everyone()
    return metrics


def _write(accelerator: Accelerator, options: Options) -> list[Path]:
    """The answers to the prompts; what an earlier call has written stays."""
    if not options.prompts:
        return []
    writers = {"target": options.target, "draft": options.draft}
    if options.writer != "both":
        writers = {options.writer: writers[options.writer]}
    paths = [options.work_dir / f"{name}-{TEXTS}" for name in writers]
    if accelerator.is_main_process:
        # A float32 model would be served in float16, which most CPUs multiply ten times slower.
        dtype = ["--dtype", "float32"] if accelerator.device.type == "cpu" else []
        questions = _ask(options.target, options.prompts, options.max_tokens, options.max_texts)
        for path, model in zip(paths, writers.values(), strict=True):
            arguments = ["--model-path", str(model), "--random-seed", str(options.seed), *dtype, *options.server_flags]
            log_path = path.with_suffix(".log")
            write_texts(path, questions, arguments, max_tokens=options.max_tokens, seed=options.seed, log_path=log_path)
    accelerator.wait_for_everyone()
    return paths


def _ask(target: str, prompts: Sequence[Path], max_tokens: int, max_texts: int) -> list[Question]:
    """The files' prompts in turn, one user's turn each; those without room for an answer of the same length are left out."""
    tokenizer = AutoTokenizer.from_pretrained(target)

    def encode(text: str) -> list[int]:
        if tokenizer.chat_template is None:
            return list(tokenizer(text)["input_ids"])
        messages = [{"role": "user", "content": text}]
        return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"])

    kinds = [[(path.stem, text) for text in read_prompts(path)] for path in prompts]
    mixed = [each for several in itertools.zip_longest(*kinds) for each in several if each is not None]
    encoded = [(kind, encode(text)) for kind, text in mixed[:max_texts]]
    fitting = [(kind, ids) for kind, ids in encoded if 0 < len(ids) <= max_tokens // 2]
    if not fitting:
        raise ValueError(f"--max-tokens {max_tokens}: no prompt leaves room for an answer of its own length")
    return [Question(ids, TEMPERATURES[i % len(TEMPERATURES)], kind) for i, (kind, ids) in enumerate(fitting)]


def split(texts: Sequence[Text], held_out: int) -> tuple[list[Text], list[Text]]:
    """The texts that judge, of every temperature and kind some, evenly through the files; and those that are learnt from.

    Texts of a prompt that judges are not learnt from.

    Raises:
        ValueError: fewer than four times as many as are to be held out.
    """
    if held_out < 1 or len(texts) < 4 * held_out:
        raise ValueError(f"--held-out {held_out}: of {len(texts)} texts 1 to {len(texts) // 4} can be kept back")
    groups: dict[tuple[float, str], list[Text]] = {}
    for text in texts:
        groups.setdefault((text.temperature, text.kind), []).append(text)
    share = held_out / len(texts)
    judged = []
    for group in groups.values():
        count = max(1, round(share * len(group)))
        judged += [group[int((i + 0.5) * len(group) / count)] for i in range(count)]
    prompts = {tuple(text.token_ids[: text.prompt_tokens].tolist()) for text in judged}
    learnt = [text for text in texts if tuple(text.token_ids[: text.prompt_tokens].tolist()) not in prompts]
    if not learnt:
        raise ValueError(f"--held-out {held_out}: all texts answer the prompts that would be kept back")
    return judged, learnt


def _find_student(options: Options, teacher: Teacher, learnt: Sequence[Text]) -> StandaloneStudent | HeadStudent:
    vocabulary = _frequent_tokens(learnt, teacher.vocab_size, options.vocabulary)
    layer_ids = list(options.layer_ids) if options.layer_ids is not None else default_layer_ids(teacher.folder)
    if not options.is_fresh:
        if options.steer:
            return steer_student(Path(options.draft), teacher, layer_ids)
        student = load_student(Path(options.draft), teacher)
        if student.is_block:
            student.head.vocabulary = vocabulary
        return student
    config = teacher.model.config.get_text_config()
    return make_student(
        options.draft,
        teacher,
        layer_ids=layer_ids,
        vocabulary=vocabulary,
        intermediate=options.intermediate or config.intermediate_size,
        chain=options.chain,
        mask_token=options.mask_token,
    )


def _frequent_tokens(texts: Sequence[Text], vocab_size: int, count: int) -> Tensor:
    """[count or fewer] int64, ascending: those that the target wrote most."""
    written = torch.cat([text.token_ids[text.prompt_tokens :] for text in texts])
    counts = torch.bincount(written, minlength=vocab_size)
    return counts.sort(descending=True, stable=True).indices[: min(count, vocab_size)].sort().values


def _default_rate(is_head: bool, is_fresh: bool) -> float:
    if is_head:
        return 0.02 if is_fresh else 0.005
    return 1e-4


def summarise(found: Mapping[str, Mapping[str, Accepted]]) -> dict[str, dict[str, dict[str, Any]]]:
    """By temperature and kind: drafts accepted per pass, and the rates at the chain's places."""
    return {
        temperature: {
            kind: {"mean": round(accepted.mean, 4), "rates": [round(rate, 4) for rate in accepted.rates]}
            for kind, accepted in kinds.items()
        }
        for temperature, kinds in found.items()
    }


def _summarise_run(
    course: Course,
    after: dict[str, Any],
    learnt: Sequence[Text],
    num_judged: int,
    student: StandaloneStudent | HeadStudent,
    num_processes: int,
) -> dict[str, Any]:
    counts: dict[str, dict[str, int]] = {}
    for text in learnt:
        count = counts.setdefault(text.kind, {"texts": 0, "prompt_tokens": 0, "output_tokens": 0})
        count["texts"] += 1
        count["prompt_tokens"] += text.prompt_tokens
        count["output_tokens"] += len(text.token_ids) - text.prompt_tokens
    tail = max(1, len(course.losses) // 20)
    made_with = course.made_with
    return {
        "provenance": collect_provenance(),
        "made_with": made_with | {name: Path(made_with[name]).name for name in ("target", "draft")},
        "parameters": sum(p.numel() for p in student.parameters()),
        "steps": course.step,
        "processes": num_processes,
        "seconds": round(course.seconds, 1),
        "peak_memory_gb": round(_read_peak_memory() / 1e9, 2),
        "first_loss": round(sum(course.losses[:tail]) / tail, 4),
        "last_loss": round(sum(course.losses[-tail:]) / tail, 4),
        "texts": {"learnt": dict(sorted(counts.items())), "held_out": num_judged},
        "before": course.before,
        "after": after,
    }


def _read_peak_memory() -> int:
    """Bytes that this process has taken at most: of its GPU, or of the machine."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
