"""Training that can be ended at any moment and goes on, in one process or several (`torchrun`, `accelerate launch`)."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, set_seed
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from tqdm import tqdm

from tetris_sglang.tools.distill.corpus import Text, pad, steps_of
from tetris_sglang.tools.distill.lesson import Lesson
from tetris_sglang.tools.distill.students import Teacher

WARM_UP_STEPS, FALLING_SHARE = 32, 0.5
MAX_GRADIENT_NORM = 1.0
ADAM_RATE_BESIDE_MUON = 2e-3
SAVE_EVERY_S = 120.0


@dataclass
class Course:
    """How far a training has come; beside it lies what accelerate saves."""

    made_with: dict[str, Any]
    """The options that may not change on the way."""
    step: int = 0
    losses: list[float] = field(default_factory=list)
    before: dict[str, Any] | None = None
    """What was accepted before the first step."""
    seconds: float = 0.0

    @classmethod
    def read(cls, folder: Path, made_with: dict[str, Any]) -> Course:
        """Of a checkpoint.

        Raises:
            ValueError: it is of a training with other options.
        """
        course = cls(**json.loads((folder / "course.json").read_text()))
        changed = {name: old for name, old in course.made_with.items() if made_with.get(name) != old}
        if changed:
            told = ", ".join(f"{name} was {old}, is {made_with.get(name)}" for name, old in changed.items())
            raise ValueError(f"{folder} is of another training: {told}. Give the same options, or another --work-dir")
        return course


def make_optimizers(student: nn.Module, rate: float, uses_muon: bool) -> list[torch.optim.Optimizer]:
    """AdamW; or Muon (arXiv:2502.16982) for matrices and AdamW for the rest, which new heads learn faster with."""
    parameters = [p for p in student.parameters() if p.requires_grad]
    if not uses_muon:
        return [torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.95), weight_decay=0.0)]
    matrices, others = [p for p in parameters if p.ndim == 2], [p for p in parameters if p.ndim != 2]
    return [
        torch.optim.Muon(matrices, lr=rate, weight_decay=0.0),
        torch.optim.AdamW(others, lr=ADAM_RATE_BESIDE_MUON, betas=(0.9, 0.95), weight_decay=0.0),
    ]


class InFloat32(TorchFunctionMode):
    """What torch.optim.Muon would compute in bfloat16, which most CPUs multiply a hundred times slower."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return args[0].clone() if func is Tensor.bfloat16 else func(*args, **(kwargs or {}))


def rate_at(step: int, num_steps: int) -> float:
    """Of the whole rate: a short rise, and a fall over the second half."""
    return min(1.0, (step + 1) / WARM_UP_STEPS, max(0.0, (num_steps - step) / num_steps / FALLING_SHARE))


def train(
    accelerator: Accelerator,
    lesson: Lesson,
    teacher: Teacher,
    texts: Sequence[Text],
    course: Course,
    checkpoint: Path,
    *,
    num_steps: int,
    chains: Sequence[int],
    batch_tokens: int,
    rate: float,
    uses_muon: bool,
    seed: int,
    stop_after: int | None = None,
) -> None:
    """Train from where `course` stands to `num_steps`; saves on the way, and at the end.

    Args:
        checkpoint: a folder; it is there iff course.step is above 0.
        chains: lengths of the chains, in turn.
        batch_tokens: of each process, padding included.
        stop_after: end early, after this step.
    """
    set_seed(seed)
    optimizers = make_optimizers(lesson.student, rate, uses_muon)
    prepared, *optimizers = accelerator.prepare(lesson, *optimizers)
    if course.step:
        accelerator.load_state(str(checkpoint))
    last = num_steps if stop_after is None else min(stop_after, num_steps)
    parameters = [p for p in prepared.parameters() if p.requires_grad]
    rank, ranks, is_main = accelerator.process_index, accelerator.num_processes, accelerator.is_main_process
    batches = steps_of(texts, batch_tokens, seed, course.step, rank, ranks)
    bar = tqdm(total=num_steps, initial=course.step, desc="distill", unit="step", mininterval=2, disable=not is_main)
    saved_at = begun_at = time.monotonic()
    seconds_before = course.seconds
    prepared.train()
    while course.step < last:
        batch = pad(next(batches)).to(accelerator.device)
        states = teacher.read(batch.token_ids)
        with accelerator.autocast():
            loss, right = prepared(batch.token_ids, batch.is_learnt, states, chains[course.step % len(chains)])
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(parameters, MAX_GRADIENT_NORM)
        share = rate_at(course.step, num_steps)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = share * group.setdefault("whole_lr", group["lr"])
            with InFloat32() if accelerator.device.type == "cpu" else nullcontext():
                optimizer.step()
            optimizer.zero_grad()
        loss, right = (float(accelerator.reduce(value.detach(), "mean")) for value in (loss, right))
        if loss != loss:
            raise ValueError(
                f"the loss is no number after step {course.step}: a lower --rate helps; {checkpoint} is from before"
            )
        course.step += 1
        course.losses.append(loss)
        bar.set_postfix(loss=f"{loss:.3f}", right=f"{right:.3f}", refresh=False)
        bar.update()
        # One process's clock decides.
        if broadcast_object_list([time.monotonic() - saved_at > SAVE_EVERY_S])[0] or course.step == last:
            course.seconds, saved_at = seconds_before + time.monotonic() - begun_at, time.monotonic()
            save(accelerator, course, checkpoint)
    bar.close()
    if course.step < num_steps and is_main:
        tqdm.write(f"stopped after step {course.step} of {num_steps}: --resume goes on")


def save(accelerator: Accelerator, course: Course, checkpoint: Path) -> None:
    """Whole or not at all: what was there stays until the new one is complete."""
    new = checkpoint.with_suffix(".new")
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)
    accelerator.wait_for_everyone()
    accelerator.save_state(str(new), safe_serialization=False)  # of tied weights, too
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        (new / "course.json").write_text(json.dumps(asdict(course)))
        shutil.rmtree(checkpoint, ignore_errors=True)
        new.rename(checkpoint)
    accelerator.wait_for_everyone()
