"""TETRIS's own settings: declared once, parsed and validated once, frozen.

A setting can be given as a server flag (`--speculative-tetris-...`), as an `Engine` argument
(`speculative_tetris_...=`) or as an environment variable (`SGLANG_TETRIS_...`). Flags and arguments are written
into the environment, so that every process of the server parses the same text with the same code.
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ENV_PREFIX = "SGLANG_TETRIS_"
ARGUMENT_PREFIX = "speculative_tetris_"

# Variables of ours that are no server settings.
_NOT_SETTINGS = frozenset({"SGLANG_TETRIS_CACHE", "SGLANG_TETRIS_CPU_OVERLAP", "SGLANG_TETRIS_DRAFT_KIND"})

MAX_NUM_STEPS = 64
DEFAULT_NUM_STEPS = 6


def _parse_positive_float(text: str) -> float:
    value = float(text)
    if not (math.isfinite(value) and value > 0):
        raise ValueError("must be a finite number above 0")
    return value


def _parse_capacity(text: str) -> float | None:
    if text.lower() == "auto":
        return None
    try:
        return _parse_positive_float(text)
    except ValueError:
        raise ValueError("must be auto or a finite number above 0") from None


def _parse_positive_int(text: str) -> int:
    value = int(text)
    if value <= 0:
        raise ValueError("must be a whole number above 0")
    return value


ALGORITHM = "TETRIS"


def is_tetris(speculative_algorithm: str | None) -> bool:
    """Of --speculative-algorithm as it was given: SGLang takes it in any case."""
    return (speculative_algorithm or "").upper() == ALGORITHM


_BOOLEANS = {
    "on": True,
    "true": True,
    "yes": True,
    "1": True,
    "off": False,
    "false": False,
    "no": False,
    "0": False,
}


def _parse_bool(text: str) -> bool:
    try:
        return _BOOLEANS[text.lower()]
    except KeyError:
        raise ValueError(f"must be one of {', '.join(_BOOLEANS)}") from None


def _one_of(choices: Sequence[str]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(f"must be one of {', '.join(choices)}")
        return text

    return parse


SELECTION_RULES = ("tetris", "uniform", "random")
ACCEPTANCE_RULES = ("coupled", "rejection", "block")
DRAFT_KINDS = ("standalone", "steered", "eagle", "eagle3", "mtp", "dflash", "ngram")
DRAFTS = ("auto", *DRAFT_KINDS)
VERIFY_PLANS = ("device", "host", "eager")


def _parse_record(text: str) -> Path:
    path = Path(text)
    if path.suffix == ".gz":
        raise ValueError("must not end in .gz: what is recorded stays readable if the server is killed")
    writable = path.is_file() if path.exists() else path.parent.is_dir()
    if not (writable and os.access(path if path.exists() else path.parent, os.W_OK)):
        raise ValueError("must name a file that can be written, in a folder that exists")
    return path


@dataclass(frozen=True)
class Setting:
    """One TETRIS setting: its field in `TetrisConfig`, its parser and its `--help` text."""

    field: str
    parse: Callable[[str], Any]
    metavar: str
    help: str

    @property
    def flag(self) -> str:
        return "--" + (ARGUMENT_PREFIX + self.field).replace("_", "-")

    @property
    def argument(self) -> str:
        return ARGUMENT_PREFIX + self.field

    @property
    def variable(self) -> str:
        return ENV_PREFIX + self.field.upper()

    def parse_text(self, text: str, given_as: str) -> Any:
        """Parse `text`; ValueError names how it was given, the value and what is allowed."""
        try:
            return self.parse(text)
        except ValueError as error:
            kind = self.metavar.lower().replace("_", " ")
            reason = str(error) if str(error).startswith("must") else f"must be a {kind}"
            raise ValueError(f"{given_as}={text!r}: {reason}. {self.help}") from None


SETTINGS: tuple[Setting, ...] = (
    Setting(
        "capacity_per_request",
        _parse_capacity,
        "NUMBER_OR_AUTO",
        "TETRIS: draft tokens verified per step, as an average over the running requests (the paper's k; the "
        "capacity is C = k * batch size), or auto: each step drafts as deep and verifies as many as pay most, or decodes "
        "plainly where none do. Default: auto.",
    ),
    Setting(
        "capacity_tokens",
        _parse_positive_int,
        "WHOLE_NUMBER",
        "TETRIS: draft tokens verified per step over the whole batch (an absolute capacity C). Excludes the bonus "
        "positions. Give this or --speculative-tetris-capacity-per-request, not both.",
    ),
    Setting(
        "selection",
        _one_of(SELECTION_RULES),
        "RULE",
        "TETRIS: which draft tokens are verified: tetris (the most likely to be accepted, batch-wide; default), "
        "uniform (the same number per request) or random. The latter two are baselines for comparisons.",
    ),
    Setting(
        "acceptance",
        _one_of(ACCEPTANCE_RULES),
        "RULE",
        "TETRIS: which drafts of sampled requests are kept: coupled (draft and target draw with the same random numbers, and "
        "what both drew is kept; default), rejection (drafts are drawn from the draft's own probabilities; runners-up "
        "are tried after them) or block (chains of such, judged as a whole). All are exact.",
    ),
    Setting(
        "calibration",
        _parse_bool,
        "on|off",
        "TETRIS: correct the draft's probabilities while serving by what was accepted, per depth and score, and by what recent "
        "texts say. Default: on.",
    ),
    Setting(
        "shared_texts",
        _parse_bool,
        "on|off",
        "TETRIS: let requests draft from one another's texts, running or lately ended, too. It never shows in an output, but "
        "how fast it comes can tell that somebody wrote the same before; cache_salt and extra_key keep texts apart. Default: "
        "off.",
    ),
    Setting(
        "draft",
        _one_of(DRAFTS),
        "KIND",
        "TETRIS: what drafts: standalone (a model of its own), eagle, eagle3 (heads on the target's states), mtp (the target's "
        "own prediction layers), dflash (a block in one pass; DFlare, too), steered (a Llama that the target's states push), "
        "ngram (no model: what followed before in the request's text), or auto: found out from the models; without "
        "--speculative-draft-model-path mtp where the target has such layers, else ngram. Default: auto.",
    ),
    Setting(
        "verify_plan",
        _one_of(VERIFY_PLANS),
        "PLAN",
        "TETRIS on GPUs: how FlashInfer plans the ragged verify pass: device (CUDA graphs, planned on the device, no wait; "
        "default), host (CUDA graphs, planned on the host after a wait for the drafts) or eager (no graph).",
    ),
    Setting(
        "phase_times",
        _parse_bool,
        "on|off",
        "TETRIS: measure the milliseconds of each phase of a step (draft, select, verify, sample, host) and report "
        "them in /server_info. Default: off.",
    ),
    Setting(
        "record",
        _parse_record,
        "FILE",
        "TETRIS: write what every step drafts, verifies and accepts to FILE, for tetris-sglang replay, which wants everything "
        "verified (a capacity as large as what a request drafts). A file of that name is replaced. Default: off.",
    ),
    Setting(
        "record_text",
        _parse_record,
        "FILE",
        "TETRIS: append the tokens of finished requests, prompts and outputs, to FILE, for tetris-sglang distill --traffic. It "
        "is users' text; at most 128 MB of it are kept, in FILE and FILE.1. Default: off.",
    ),
)
_BY_VARIABLE = {setting.variable: setting for setting in SETTINGS}
_BY_ARGUMENT = {setting.argument: setting for setting in SETTINGS}


@dataclass(frozen=True)
class TetrisConfig:
    """Validated TETRIS settings.

    num_steps: tokens drafted per request and step (D), from --speculative-num-steps.
    capacity_per_request: C = capacity_per_request * batch size, or None.
    capacity_tokens: absolute C in draft tokens per step, or None. Neither: the capacity sets itself.
    """

    num_steps: int
    capacity_per_request: float | None
    capacity_tokens: int | None
    selection: str = "tetris"
    acceptance: str = "coupled"
    calibration: bool = True
    shared_texts: bool = False
    phase_times: bool = False
    verify_plan: str = "device"
    draft: str = "auto"
    record: Path | None = None
    record_text: Path | None = None

    @property
    def draws_drafts(self) -> bool:
        """Whether drafts of sampled requests are drawn from the draft's own law."""
        return self.acceptance != "coupled"

    @property
    def capacity_is_automatic(self) -> bool:
        return self.capacity_per_request is None and self.capacity_tokens is None

    @classmethod
    def from_environment(cls, num_steps: int, environment: Mapping[str, str] = os.environ) -> TetrisConfig:
        """Parse every `SGLANG_TETRIS_*` variable.

        Raises:
            ValueError: naming the variable or flag, its value and the way out.
        """
        if not 1 <= num_steps <= MAX_NUM_STEPS:
            raise ValueError(
                f"--speculative-num-steps={num_steps}: TETRIS drafts between 1 and {MAX_NUM_STEPS} tokens per "
                f"request. Choose a value in that range (typically 3 to 8), or drop --speculative-algorithm TETRIS "
                f"to serve without speculation."
            )
        values: dict[str, Any] = {}
        for variable in find_settings(environment):
            text = environment[variable]
            setting = _BY_VARIABLE.get(variable)
            if setting is None:
                raise ValueError(f"{variable}={text!r}: no such TETRIS variable. {_suggest(variable, _BY_VARIABLE)}")
            if text == "":
                continue
            values[setting.field] = setting.parse_text(text, f"{setting.flag} (or {variable})")
        if values.get("capacity_per_request") is not None and "capacity_tokens" in values:
            raise ValueError(
                f"--speculative-tetris-capacity-per-request={values['capacity_per_request']} and "
                f"--speculative-tetris-capacity-tokens={values['capacity_tokens']} are both given (as flags or as "
                f"SGLANG_TETRIS_* variables): they are two forms of one capacity. Remove one of them."
            )
        values.setdefault("capacity_per_request", None)
        values.setdefault("capacity_tokens", None)
        return cls(num_steps=num_steps, **values)


def find_settings(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Variables that are read as settings, also those that are none."""
    return [name for name in environment if name.startswith(ENV_PREFIX) and name not in _NOT_SETTINGS]


_exported: dict[str, str] = {}


def export_arguments(arguments: MutableMapping[str, Any], environment: MutableMapping[str, str] = os.environ) -> None:
    """Move `speculative_tetris_*` keyword arguments out of `arguments` into the environment.

    What an earlier call, for an earlier Engine of the process, put there is taken out first.

    Raises:
        ValueError: an unknown TETRIS argument, or a value that does not parse.
    """
    for variable, text in _exported.items():
        if environment.get(variable) == text:
            del environment[variable]
    _exported.clear()
    for name in [name for name in arguments if name.startswith(ARGUMENT_PREFIX)]:
        setting = _BY_ARGUMENT.get(name)
        if setting is None:
            raise ValueError(f"{name}={arguments[name]!r}: no such TETRIS argument. {_suggest(name, _BY_ARGUMENT)}")
        value = arguments.pop(name)
        if value is None:
            continue
        setting.parse_text(str(value), name)
        environment[setting.variable] = _exported[setting.variable] = str(value)


def _suggest(name: str, known: Mapping[str, Setting]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"Did you mean {close[0]}? " if close else ""
    return f"{hint}Known: {', '.join(sorted(known))}."
