"""What is installed here, and what would stop TETRIS from starting: `tetris-sglang check`."""

from __future__ import annotations

import contextlib
import ctypes.util
import io
import json
import logging
import os
import pkgutil
import platform
import warnings
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Literal, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tetris_sglang import __version__, contacts
from tetris_sglang.compat import SUPPORTED_SGLANG, check_sglang_version
from tetris_sglang.config import DEFAULT_NUM_STEPS, TetrisConfig, find_settings
from tetris_sglang.contacts import Hook
from tetris_sglang.tools.model_memory import kv_bytes_per_token, weights_bytes

ENTRY_POINT_GROUPS = ("sglang.srt.plugins", "sglang.srt.platforms")
_ENTRY_POINT = "tetris"
_SUPPORTED_RELEASE = f"Install a supported release: {' or '.join(SUPPORTED_SGLANG)}."
_STYLES = {"ok": "green", "hint": "yellow", "problem": "bold red"}


class Finding(NamedTuple):
    status: Literal["ok", "hint", "problem"]
    """problem: TETRIS would not start. hint: worth knowing."""
    subject: str
    detail: str
    """A problem's detail says the way out."""


def find(server_arguments: Sequence[str] = ()) -> list[Finding]:
    """Check everything.

    Args:
        server_arguments: as for `sglang serve`; --speculative-algorithm TETRIS is added when absent. With
            --model-path they are resolved as a server would resolve them, without loading weights.
    """
    findings = [*_check_versions(), *_check_libraries(), *_check_entry_points(), *_check_variables()]
    if any(finding.status == "problem" for finding in findings if finding.subject in ("sglang", "torch")):
        return findings
    with _quiet(), Console(stderr=True).status("importing SGLang"):
        return findings + list(_check_sglang(list(server_arguments)))


def print_table(findings: Sequence[Finding], console: Console | None = None) -> None:
    table = Table(box=None, pad_edge=False)
    for column in ("", "what", "finding"):
        table.add_column(column, overflow="fold")
    for finding in findings:
        status = Text(finding.status, _STYLES[finding.status])
        table.add_row(status, Text(finding.subject), Text(finding.detail))
    console = console or Console()
    console.print(table)
    problems = sum(finding.status == "problem" for finding in findings)
    verdict = f"{problems} problem(s) would stop TETRIS." if problems else "Nothing found that would stop TETRIS."
    console.print(f"\n{verdict}", style=_STYLES["problem" if problems else "ok"])


def print_json(findings: Sequence[Finding]) -> None:
    ok = all(finding.status != "problem" for finding in findings)
    print(json.dumps({"ok": ok, "findings": [finding._asdict() for finding in findings]}, indent=2))


# -- without importing SGLang -------------------------------------------------------------------------------------


def _check_versions() -> Iterator[Finding]:
    yield Finding("ok", "python", platform.python_version())
    yield Finding("ok", "tetris-sglang", __version__)
    try:
        yield Finding("ok", "torch", metadata.version("torch"))
    except metadata.PackageNotFoundError:
        yield Finding(
            "problem",
            "torch",
            "not installed. It comes with SGLang: make env, or pip install . in the clone.",
        )
    try:
        yield Finding("ok", "sglang", f"{check_sglang_version()}, supported")
    except RuntimeError as error:
        yield Finding("problem", "sglang", str(error))


def _check_libraries() -> Iterator[Finding]:
    if ctypes.util.find_library("numa") is None:
        yield Finding(
            "hint",
            "libnuma",
            "missing; a server starts without it. SGLang binds GPU servers to NUMA nodes with it: apt-get install libnuma1.",
        )


def _check_entry_points() -> Iterator[Finding]:
    missing = [
        group
        for group in ENTRY_POINT_GROUPS
        if not any(point.name == _ENTRY_POINT for point in metadata.entry_points(group=group))
    ]
    if missing:
        yield Finding(
            "problem",
            "entry points",
            f"not found in {', '.join(missing)}: SGLang cannot see the plugin. Install the package: make env, or "
            f"pip install -e . with this Python.",
        )
        return
    allowed, selected = os.environ.get("SGLANG_PLUGINS", ""), os.environ.get("SGLANG_PLATFORM", "")
    if allowed and _ENTRY_POINT not in [name.strip() for name in allowed.split(",")]:
        yield Finding(
            "problem",
            "SGLANG_PLUGINS",
            f"{allowed!r} does not list {_ENTRY_POINT}, so SGLang skips the plugin. Add it, or unset the variable.",
        )
    if selected:
        yield Finding(
            "problem",
            "SGLANG_PLATFORM",
            f"{selected!r} selects a hardware platform of its own; tetris is none, it extends SGLang's CPU platform. "
            f"Unset the variable.",
        )
    if not allowed and not selected:
        yield Finding("ok", "entry points", f"{_ENTRY_POINT} in {' and '.join(ENTRY_POINT_GROUPS)}, not filtered")


def _check_variables() -> Iterator[Finding]:
    given = {name: os.environ[name] for name in find_settings()}
    sound = True
    for name, text in sorted(given.items()):
        try:
            TetrisConfig.from_environment(DEFAULT_NUM_STEPS, {name: text})
            yield Finding("ok", name, text)
        except ValueError as error:
            sound = False
            yield Finding("problem", name, str(error))
    if sound:
        try:
            config = TetrisConfig.from_environment(DEFAULT_NUM_STEPS, given)
            yield Finding("ok", "settings", f"without flags: {_describe(config)}")
        except ValueError as error:
            yield Finding("problem", "settings", str(error))


def _describe(config: TetrisConfig) -> str:
    if config.capacity_tokens is not None:
        capacity = f"{config.capacity_tokens} per step verified"
    elif config.capacity_per_request is not None:
        capacity = f"{config.capacity_per_request:g} per request verified"
    else:
        capacity = "as many verified as pay"
    return f"{config.num_steps} tokens drafted per request, {capacity}"


# -- with SGLang imported -----------------------------------------------------------------------------------------


def _check_sglang(server_arguments: list[str]) -> Iterator[Finding]:
    with _collect_errors("sglang.srt.plugins") as errors:
        from sglang.srt.plugins import load_plugins

        load_plugins()
    for error in errors:
        yield Finding("problem", "plugin", f"{error}. SGLang logs this and goes on without the plugin.")

    import torch
    from sglang.srt.speculative.spec_registry import get_spec

    from tetris_sglang import portable_cpu
    from tetris_sglang.runtime import inventory

    if get_spec("TETRIS") is None:
        yield Finding("problem", "TETRIS", "not registered with SGLang; see the problems above.")
        return
    # Before the checks below import more of SGLang than a server does at this point.
    arguments = list(_check_arguments(server_arguments))
    yield _check_device()
    for hook in inventory.HOOKS:
        yield _check_hook(hook)
    symbols = inventory.SYMBOLS
    if portable_cpu.is_active():
        from tetris_sglang.portable_cpu import inventory as cpu_inventory

        for hook in cpu_inventory.HOOKS:
            yield _check_hook(hook)
        symbols += cpu_inventory.SYMBOLS
        yield from _check_overlap_variable()
    if torch.cuda.is_available():
        from tetris_sglang.runtime.cuda import inventory as cuda_inventory

        symbols += cuda_inventory.SYMBOLS
    missing = contacts.find_missing_symbols(symbols)
    for name in missing:
        yield Finding("problem", "symbol", f"{name} is missing in this SGLang. {_SUPPORTED_RELEASE}")
    if not missing:
        yield Finding("ok", "symbols", f"all {len(symbols)} upstream symbols that TETRIS relies on are there")
    yield from arguments


def _check_device() -> Finding:
    import psutil
    import torch

    from tetris_sglang import portable_cpu

    if torch.cuda.is_available():
        device = torch.cuda.get_device_properties(0)
        return Finding("ok", "device", f"{device.name}, {device.total_memory / 2**30:.0f} GiB")
    platform_name = "portable CPU platform" if portable_cpu.is_active() else "SGLang's own CPU platform"
    return Finding(
        "ok",
        "device",
        f"CPU, {len(os.sched_getaffinity(0))} cores, {torch.backends.cpu.get_cpu_capability()}, "
        f"{psutil.virtual_memory().total / 2**30:.0f} GiB: {platform_name}",
    )


def _check_overlap_variable() -> Iterator[Finding]:
    from tetris_sglang.portable_cpu.defaults import OVERLAP_VARIABLE, wants_overlap

    try:
        wants_overlap()
    except ValueError as error:
        yield Finding("problem", OVERLAP_VARIABLE, str(error))


def _check_hook(hook: Hook) -> Finding:
    subject = hook.target.rpartition(".")[2]
    try:
        pkgutil.resolve_name(hook.target)
    except (ImportError, AttributeError) as error:
        return Finding("problem", subject, f"{error} (for: {hook.purpose}). {_SUPPORTED_RELEASE}")
    return Finding("ok", subject, hook.purpose)


def _check_arguments(server_arguments: list[str]) -> Iterator[Finding]:
    if not server_arguments:
        from tetris_sglang.runtime.arguments import ATTENTION_BACKENDS, validate_device

        try:
            device = validate_device(None)
        except ValueError as error:
            yield Finding("problem", "device", str(error))
        else:
            yield Finding("ok", "attention backend", ATTENTION_BACKENDS[device][0])
        yield Finding(
            "hint",
            "models",
            "not checked: give --model-path, --speculative-draft-model-path and what else the server will get.",
        )
        return
    if not any(argument.startswith("--speculative-algorithm") for argument in server_arguments):
        server_arguments = [*server_arguments, "--speculative-algorithm", "TETRIS"]

    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.server_args import prepare_server_args

    usage = io.StringIO()
    try:
        with contextlib.redirect_stderr(usage):
            args = prepare_server_args(server_arguments)
        args.resolve_once()
    except SystemExit:
        yield Finding("problem", "arguments", usage.getvalue().rpartition("error: ")[2].strip())
        return
    except Exception as error:
        yield Finding("problem", "arguments", f"{type(error).__name__}: {error}")
        return
    resolved = resolving_view(args)
    if resolved.speculative_algorithm != "TETRIS":
        yield Finding("hint", "arguments", f"--speculative-algorithm {resolved.speculative_algorithm} is not TETRIS.")
        return
    yield Finding("ok", "attention backend", str(resolved.attention_backend))
    config = TetrisConfig.from_environment(resolved.speculative_num_steps)
    from tetris_sglang.runtime.drafts.kind import current_kind
    from tetris_sglang.runtime.drafts.spec import count_children

    num_children = count_children(resolved.speculative_num_steps, resolved.speculative_num_draft_tokens)
    shape = "chains" if num_children == 1 else f"chains with {num_children - 1} runner-up of each token"
    yield Finding("ok", "draft", f"{current_kind()}, {shape}")
    yield Finding("ok", "arguments", f"accepted: {_describe(config)}")
    yield from _check_models(resolved)


def _check_models(args) -> Iterator[Finding]:
    """What the models take, and what a standalone draft's vocabulary has in common with the target's."""
    from tetris_sglang.runtime.arguments import load_config
    from tetris_sglang.runtime.drafts.kind import HEADS, MTP, NGRAM, STANDALONE, current_kind

    kind, trusted = current_kind(), args.trust_remote_code
    target = load_config(args.model_path, "--model-path", trusted, args.revision)
    dtype = None if args.dtype in ("auto", "half") else args.dtype
    kv_dtype = dtype or str(getattr(target, "dtype", None)).removeprefix("torch.")
    kv_dtype = kv_dtype if args.kv_cache_dtype == "auto" else args.kv_cache_dtype
    target_kv = kv_bytes_per_token(target, kv_dtype)
    parts = [f"target: {_gigabytes(args.model_path, dtype)}, {target_kv / 1024:.1f} KiB of keys and values a token"]
    if kind != NGRAM:
        path = args.speculative_draft_model_path
        draft = load_config(path, "--speculative-draft-model-path", trusted, args.speculative_draft_model_revision)
        draft_kv = kv_bytes_per_token(draft, kv_dtype, num_layers=1 if kind == MTP else None)
        weights = "in the target's weights" if path == args.model_path else _gigabytes(path, dtype)
        parts.append(f"draft: {weights}, {draft_kv / 1024:.1f} KiB a token ({draft_kv / target_kv:.0%} more)")
        if kind in HEADS:
            parts.append("the target's states beside them: kept for the last tokens of each request")
    if args.device == "cpu" and kv_dtype == "float32":
        parts.append("weights a second time, laid out for few rows (portable CPU platform)")
    yield Finding("ok", "memory", "; ".join(parts))
    if kind == STANDALONE:
        yield _check_vocabularies(args, target.vocab_size, draft.vocab_size)


def _gigabytes(path: str, dtype: str | None) -> str:
    size = weights_bytes(Path(path), dtype)
    return "weights not at hand" if size is None else f"{size / 2**30:.2f} GiB of weights"


def _check_vocabularies(args, target_size: int, draft_size: int) -> Finding:
    from tetris_sglang.drafting.vocabulary import describe_share
    from tetris_sglang.runtime.drafts.tokenizers import find_vocabulary

    try:
        vocabulary = find_vocabulary(args, target_size, draft_size)
    except ValueError as error:
        return Finding("problem", "vocabulary", str(error))
    return Finding("ok", "vocabulary", "the target's" if vocabulary is None else describe_share(vocabulary, draft_size)[1])


# -- SGLang's output ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep SGLang's log and warnings out of the findings."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


@contextlib.contextmanager
def _collect_errors(logger_name: str) -> Iterator[list[str]]:
    """The errors that are logged meanwhile, in place of their output."""
    errors: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            cause = record.exc_info[1] if record.exc_info else None
            errors.append(record.getMessage() + (f": {cause}" if cause else ""))

    logger, collector = logging.getLogger(logger_name), Collector(logging.ERROR)
    logger.addHandler(collector)
    logger.propagate, propagate = False, logger.propagate
    try:
        yield errors
    finally:
        logger.removeHandler(collector)
        logger.propagate = propagate
