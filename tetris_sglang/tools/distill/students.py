"""The target as a teacher, and drafts as students: what each says after every token of a text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tetris_sglang.tools.distill.head_files import (
    BLOCKS,
    HEADS,
    load_head,
    make_dflash_keys,
    make_eagle3_keys,
    make_head_config,
    save_head,
)
from tetris_sglang.tools.distill.heads import DFlashHead, Eagle3Head, EagleHead, Head, TargetStates, read_target
from tetris_sglang.tools.distill.steering import steer_draft

FRESH = (Eagle3Head.kind, EagleHead.kind, DFlashHead.kind)
"""Kinds of which a new one can be made."""
NUM_BLOCK_LAYERS = 2
_ARCHITECTURES = {head.architecture for head in HEADS.values()}


class Teacher:
    """The target, which only reads.

    Args:
        folder: of a causal language model that transformers loads.
    Raises:
        ValueError: it does not.
    """

    def __init__(self, folder: Path | str, device: torch.device, dtype: torch.dtype) -> None:
        try:
            self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        except (OSError, RuntimeError, ValueError) as error:
            raise ValueError(f"--target {folder} cannot be loaded: {error}") from error
        self.model.eval().requires_grad_(False).to(device)
        self.folder, self.device = folder, device
        self.vocab_size: int = self.model.get_output_embeddings().weight.shape[0]

    def read(self, token_ids: Tensor) -> TargetStates:
        """Of [texts, length] token ids, which are padded at their ends."""
        return read_target(self.model, token_ids)


class Drafted(NamedTuple):
    """What a draft says at one place of its chains."""

    first: int
    """The text's place after whose token the first column draws."""
    rows: Tensor
    """[texts, columns, size]: what `read_logits` takes."""


class StandaloneStudent(nn.Module):
    """A language model of its own, with the target's vocabulary.

    draft_ids: [vocabulary] int64, the target's id of each token; None: they are the target's first ones.
    is_chain: whether later places of a chain depend on what the draft has made of the earlier ones.
    """

    draft_ids, is_chain, is_block = None, False, False

    def __init__(self, folder: Path | str, teacher: Teacher) -> None:
        super().__init__()
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        ours, theirs = self._tokenizer.get_vocab(), AutoTokenizer.from_pretrained(teacher.folder).get_vocab()
        if ours != theirs:
            raise ValueError(
                f"--draft {folder}: its tokenizer ({len(ours)} tokens) is not the target's ({len(theirs)}), and distillation "
                f"compares two laws token by token. Train a head instead (--draft {FRESH[0]})"
            )

    def unroll(self, token_ids: Tensor, states: TargetStates, steps: int) -> Iterator[Drafted]:
        """Chains of `steps` drafts from every place of a text, place by place of the chain."""
        yield Drafted(0, self.model(input_ids=token_ids, use_cache=False).logits)

    def read_logits(self, rows: Tensor) -> Tensor:
        """[..., vocabulary]."""
        return rows

    def save(self, folder: Path) -> None:
        """As SGLang loads it."""
        self.model.to(torch.bfloat16).save_pretrained(folder)
        self.model.float()
        self._tokenizer.save_pretrained(folder)


class HeadStudent(nn.Module):
    """A head that reads the target's states, or a DFlash draft; see `StandaloneStudent`."""

    is_chain = True

    def __init__(self, head: Head) -> None:
        super().__init__()
        self.head = head

    @property
    def is_block(self) -> bool:
        return self.head.kind in BLOCKS

    @property
    def draft_ids(self) -> Tensor | None:
        return self.head.draft_ids

    def unroll(self, token_ids: Tensor, states: TargetStates, steps: int) -> Iterator[Drafted]:
        features = self.head.features(states)[:, :-1].float()
        for step, rows in enumerate(self.head.unroll(token_ids[:, :-1], features, steps)):
            yield Drafted(1 + step, rows)

    def read_logits(self, rows: Tensor) -> Tensor:
        return self.head.read_logits(rows)

    def save(self, folder: Path) -> None:
        save_head(self.head, folder)


def load_student(draft: Path, teacher: Teacher) -> StandaloneStudent | HeadStudent:
    """A draft that is there, found out from its config.

    Raises:
        ValueError: no such folder, or it does not fit the target.
    """
    config = _read_config(draft)
    if _is_model(config):
        return StandaloneStudent(draft, teacher)
    hidden, read = teacher.model.config.get_text_config().hidden_size, config.get("target_hidden_size", config["hidden_size"])
    if read != hidden or config["vocab_size"] != teacher.vocab_size:
        raise ValueError(
            f"--draft {draft} is a head for states of {read} values and {config['vocab_size']} tokens, the "
            f"target has {hidden} and {teacher.vocab_size}: it belongs to another one"
        )
    head = load_head(draft, teacher.model).train()
    head.embedding, head.target_head = head.embedding.float(), head.target_head.float()
    return HeadStudent(head)


def is_standalone(draft: Path) -> bool:
    """Whether a draft is a language model of its own.

    Raises:
        ValueError: no config to read.
    """
    return _is_model(_read_config(draft))


def _is_model(config: dict[str, Any]) -> bool:
    return not _ARCHITECTURES.intersection(config.get("architectures") or ())


def _read_config(draft: Path) -> dict[str, Any]:
    try:
        return json.loads((draft / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"--draft {draft}: no config.json to read: {error}. New ones: {', '.join(FRESH)}") from error


def make_student(
    kind: str,
    teacher: Teacher,
    *,
    layer_ids: list[int],
    vocabulary: Tensor,
    intermediate: int,
    chain: int,
    mask_token: str | None,
) -> HeadStudent:
    """A new head or DFlash draft, which begins by passing the target's own last state on.

    Args:
        kind: one of FRESH. layer_ids: of the target, whose outputs it reads, ascending.
        vocabulary: [tokens] int64, ascending: the target's ids that it can draft. intermediate: of its feed-forward layers.
        chain: drafts of a block. mask_token: of a block's rows; one that no text has.
    Raises:
        ValueError: a layer that the target does not have, or an unknown mask.
    """
    config = teacher.model.config.get_text_config()
    if not all(0 <= layer < config.num_hidden_layers - 1 for layer in layer_ids):
        raise ValueError(f"--layer-ids {layer_ids}: SGLang captures layers 0 to {config.num_hidden_layers - 2} of this target")
    weights = teacher.model.get_input_embeddings().weight.detach(), teacher.model.get_output_embeddings().weight.detach()
    weights = tuple(weight.float() for weight in weights)
    made = make_head_config(config, HEADS[kind].architecture, intermediate)
    if kind == EagleHead.kind:
        return HeadStudent(EagleHead(made, *weights))
    if kind == Eagle3Head.kind:
        head = Eagle3Head(made | make_eagle3_keys(len(vocabulary), layer_ids), *weights)
        head.set_draft_ids(vocabulary)
        head.norm.weight.data.copy_(_last_norm(teacher))
        return HeadStudent(head)
    tokenizer = AutoTokenizer.from_pretrained(teacher.folder)
    mask_id = tokenizer.convert_tokens_to_ids(mask_token) if mask_token else None
    if mask_id is None or mask_id == tokenizer.unk_token_id:
        raise ValueError(f"--mask-token {mask_token}: name a token of the target that no text has, for a block's open places")
    block = DFlashHead(made | make_dflash_keys(chain + 1, layer_ids, mask_id, NUM_BLOCK_LAYERS), *weights)
    block.norm.weight.data.copy_(_last_norm(teacher))
    block.vocabulary = vocabulary
    return HeadStudent(block)


def steer_student(draft: Path, teacher: Teacher, layer_ids: list[int]) -> HeadStudent:
    """A standalone draft, and what will steer it.

    Raises:
        ValueError: its tokenizer is not the target's, or it is no Llama.
    """
    alone = StandaloneStudent(draft, teacher)
    weights = teacher.model.get_input_embeddings().weight.detach(), teacher.model.get_output_embeddings().weight.detach()
    return HeadStudent(steer_draft(alone.model, layer_ids, *(weight.float() for weight in weights)))


def _last_norm(teacher: Teacher) -> Tensor:
    """The weights of the norm before the target's output layer; ones where it has another kind."""
    norm = getattr(teacher.model.base_model, "norm", None)
    hidden = teacher.model.config.get_text_config().hidden_size
    return torch.ones(hidden) if norm is None else norm.weight.detach().float().cpu()


def default_layer_ids(folder: Path | str) -> list[int]:
    """Early, in the middle, and the last that SGLang can capture (as EAGLE-3's own heads, arXiv:2503.01840)."""
    num_layers = AutoConfig.from_pretrained(folder).get_text_config().num_hidden_layers
    return sorted({min(2, num_layers - 2), num_layers // 2, num_layers - 2})
