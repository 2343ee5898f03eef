"""The command line: quick help, check's findings and exit code, demo's and explain's options."""

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tetris_sglang import contacts
from tetris_sglang.tools import check as check_module
from tetris_sglang.tools.check import Finding, find, print_json, print_table
from tetris_sglang.tools.cli import app

PAIR = Path(__file__).parents[2] / "tests" / "pair"
MODELS = ["--model-path", str(PAIR / "target"), "--speculative-draft-model-path", str(PAIR / "draft")]


@pytest.fixture
def run():
    runner = CliRunner()
    return lambda *arguments: runner.invoke(app, arguments, prog_name="tetris-sglang")


def problems(findings) -> dict[str, str]:
    return {finding.subject: finding.detail for finding in findings if finding.status == "problem"}


COMMANDS = [command.name or command.callback.__name__ for command in app.registered_commands]


# -- help ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [["--help"], *([name, "--help"] for name in COMMANDS)])
def test_help_imports_neither_torch_nor_sglang(arguments):
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "tetris_sglang", *arguments],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "Usage: tetris-sglang" in done.stdout
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "tetris_sglang.tools.cli" in imported
    assert not {name for name in imported if name.partition(".")[0] in ("torch", "sglang", "transformers")}


def test_unknown_command(run):
    result = run("chekc")
    assert result.exit_code == 2 and "No such command 'chekc'" in result.output


# -- explain and demo ---------------------------------------------------------------------------------------------


def test_explain_draws_what_is_asked_for(run):
    result = run("explain", "--capacity-tokens", "5")
    assert result.exit_code == 0 and "; 5 of them may be verified." in result.output


def test_explain_refuses_bad_values(run):
    result = run("explain", "--capacity-tokens", "-1")
    assert result.exit_code == 2 and "capacity_tokens must be at least 0, got -1" in result.output


def test_top_says_who_does_not_answer(run):
    result = run("top", "127.0.0.1:9")
    assert result.exit_code == 2 and "127.0.0.1:9 is no running SGLang server" in result.output


def test_demo_gets_its_options(run, monkeypatch):
    import tetris_sglang.tools.demo

    calls = []
    monkeypatch.setattr(tetris_sglang.tools.demo, "demo", lambda **options: calls.append(options))
    assert run("demo").exit_code == 0
    assert run("demo", "--repeats", "1", "--model-path", "a", "--draft-model-path", "b").exit_code == 0
    assert calls == [{}, {"repeats": 1, "model_path": "a", "draft_model_path": "b"}]


@pytest.mark.parametrize(
    "options, message",
    [
        (["--repeats", "0"], "--repeats 0: give 1 or more"),
        (["--model-path", "a"], "--model-path and --draft-model-path belong together"),
    ],
)
def test_demo_refuses_bad_options(run, options, message):
    result = run("demo", *options)
    assert result.exit_code == 2 and message in " ".join(result.output.split())


def test_models_says_where_everything_is_or_why_not(run, monkeypatch):
    import tetris_sglang.tools.fetch
    import tetris_sglang.tools.real_model

    monkeypatch.setattr(tetris_sglang.tools.real_model, "ensure_target", lambda: "/cache/smollm2")
    monkeypatch.setattr(tetris_sglang.tools.fetch, "fetch", lambda file: f"/cache/{file.name}")
    result = run("models")
    assert result.exit_code == 0
    assert "SmolLM2-135M-Instruct: /cache/smollm2\nHumanEval: /cache/HumanEval.jsonl.gz\n" in result.output

    def refuse():
        raise tetris_sglang.tools.fetch.NotFetched("no index")

    monkeypatch.setattr(tetris_sglang.tools.real_model, "ensure_target", refuse)
    result = run("models")
    assert result.exit_code == 2 and "error: no index" in result.output


def test_demo_options_are_parameters_of_the_demo():
    import inspect

    from tetris_sglang.tools.cli import demo as command
    from tetris_sglang.tools.demo import demo

    assert set(inspect.signature(command).parameters) <= set(inspect.signature(demo).parameters)


# -- check, without SGLang ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("status, code", [("ok", 0), ("hint", 0), ("problem", 1)])
def test_exit_code_of_check(run, monkeypatch, status, code):
    monkeypatch.setattr(check_module, "find", lambda arguments: [Finding(status, "it", " ".join(arguments))])
    result = run("check", "--model-path", "m", "--tp", "2")
    assert result.exit_code == code and "--model-path m --tp 2" in result.output
    result = run("check", "--json", "--model-path", "m")
    assert result.exit_code == code
    assert json.loads(result.output) == {
        "ok": code == 0,
        "findings": [{"status": status, "subject": "it", "detail": "--model-path m"}],
    }


def test_markup_in_a_finding_is_printed_as_it_is(capsys):
    findings = [Finding("problem", "[bold]", "path [/tmp] [red]x[/red]")]
    print_table(findings)
    print_json(findings)
    assert capsys.readouterr().out.count("path [/tmp] [red]x[/red]") == 2


def test_versions(monkeypatch):
    assert not problems(check_module._check_versions())
    monkeypatch.setattr(metadata, "version", lambda name: "0.5.99")
    assert "SGLang 0.5.99 is installed" in problems(check_module._check_versions())["sglang"]


def test_an_unsupported_sglang_is_not_imported(monkeypatch):
    monkeypatch.setattr(metadata, "version", lambda name: "0.5.99")
    monkeypatch.setattr(check_module, "_check_sglang", lambda arguments: pytest.fail("imported SGLang"))
    assert "pip install 'sglang==0.5.23'" in problems(find())["sglang"]


def test_a_missing_library_is_a_hint(monkeypatch):
    monkeypatch.setattr(check_module.ctypes.util, "find_library", lambda name: None)
    (finding,) = check_module._check_libraries()
    assert finding.status == "hint" and "apt-get install libnuma1" in finding.detail
    monkeypatch.setattr(check_module.ctypes.util, "find_library", lambda name: f"lib{name}.so.1")
    assert not list(check_module._check_libraries())


def test_entry_points_of_this_installation():
    (finding,) = check_module._check_entry_points()
    assert finding.status == "ok"


def test_entry_points_that_are_not_installed(monkeypatch):
    monkeypatch.setattr(metadata, "entry_points", lambda group: [])
    detail = problems(check_module._check_entry_points())["entry points"]
    assert "sglang.srt.plugins, sglang.srt.platforms" in detail and "make env" in detail


@pytest.mark.parametrize("value, filtered", [("tetris", False), ("other, tetris", False), ("other", True), ("tetri", True)])
def test_filter_by_sglang_plugins(environment, value, filtered):
    environment["SGLANG_PLUGINS"] = value
    found = problems(check_module._check_entry_points())
    assert ("SGLANG_PLUGINS" in found) == filtered
    if filtered:
        assert repr(value) in found["SGLANG_PLUGINS"] and "unset" in found["SGLANG_PLUGINS"]


@pytest.mark.parametrize("value", ["tetris", "other"])
def test_filter_by_sglang_platform(environment, value):
    environment["SGLANG_PLATFORM"] = value
    assert repr(value) in problems(check_module._check_entry_points())["SGLANG_PLATFORM"]


def test_variables(environment):
    environment["SGLANG_TETRIS_CAPACITY_TOKENS"] = "8"
    assert list(check_module._check_variables()) == [
        Finding("ok", "SGLANG_TETRIS_CAPACITY_TOKENS", "8"),
        Finding("ok", "settings", "without flags: 6 tokens drafted per request, 8 per step verified"),
    ]
    environment["SGLANG_TETRIS_CAPACITY_PER_REQUEST"] = "2"
    assert "both given" in problems(check_module._check_variables())["settings"]
    environment["SGLANG_TETRIS_CAPACITY_TOKENS"] = "none"
    environment["SGLANG_TETRIS_CAPACITIES"] = "3"
    assert set(problems(check_module._check_variables())) == {
        "SGLANG_TETRIS_CAPACITY_TOKENS",
        "SGLANG_TETRIS_CAPACITIES",
    }


@pytest.mark.parametrize("value, sound", [("0", True), ("1", True), ("yes", False)])
def test_the_variable_for_overlap_scheduling_on_cpus(environment, value, sound):
    environment["SGLANG_TETRIS_CPU_OVERLAP"] = value
    found = problems(check_module._check_overlap_variable())
    assert found == ({} if sound else {"SGLANG_TETRIS_CPU_OVERLAP": f"SGLANG_TETRIS_CPU_OVERLAP={value!r}: must be 0 or 1"})


# -- check, with SGLang -------------------------------------------------------------------------------------------


def test_everything_is_found_here(plugins):
    findings = find(MODELS)
    assert not problems(findings)
    details = {finding.subject: finding.detail for finding in findings}
    assert details["sglang"] == "0.5.23, supported"
    assert details["attention backend"] == "torch_ragged"
    assert details["arguments"] == "accepted: 6 tokens drafted per request, as many verified as pay"
    assert details["draft"] == "standalone, chains with 1 runner-up of each token"
    assert details["vocabulary"] == "the target's"
    assert "target: 0.01 GiB of weights, 2.5 KiB of keys and values a token; draft: 0.00 GiB" in details["memory"]
    assert "cores" in details["device"] and "portable CPU platform" in details["device"]
    for target in ("add_cli_args", "_validate_one_request", "_add_speculative", "_verify_uses_greedy"):
        assert target in details


def test_a_draft_without_a_model_is_said(plugins, environment):
    arguments = ["--model-path", str(PAIR / "target")]
    details = {finding.subject: finding.detail for finding in check_module._check_arguments(arguments)}
    assert details["draft"] == "ngram, chains"


def test_a_draft_s_shape_is_said(plugins):
    arguments = [*MODELS, "--speculative-num-steps", "3", "--speculative-num-draft-tokens", "7"]
    details = {finding.subject: finding.detail for finding in check_module._check_arguments(arguments)}
    assert details["draft"] == "standalone, chains with 1 runner-up of each token"


def test_models_are_optional(plugins):
    backend, models = check_module._check_arguments([])
    assert backend == Finding("ok", "attention backend", "torch_ragged")
    assert models.status == "hint" and "--speculative-draft-model-path" in models.detail


@pytest.mark.parametrize(
    "arguments, parts",
    [
        (["--speculative-num-steps", "0"], ["--speculative-num-steps=0", "between 1 and 64"]),
        (
            ["--speculative-tetris-capacity-tokens", "0"],
            ["--speculative-tetris-capacity-tokens='0'", "above 0"],
        ),
        (["--speculative-tetris-capacity", "3"], ["--speculative-tetris-capacity"]),
        (
            ["--speculative-draft-model-path", "/no/such"],
            ["--speculative-draft-model-path /no/such", "Give a folder"],
        ),
        (["--enable-mixed-chunk"], ["--enable-mixed-chunk", "Remove that flag"]),
        (["--nonsense", "3"], ["--nonsense 3"]),
    ],
    ids=lambda value: " ".join(value) if value[0].startswith("--") and len(value) < 3 else "",
)
def test_arguments_that_would_stop_tetris(plugins, capsys, arguments, parts):
    detail = problems(check_module._check_arguments([*MODELS, *arguments]))["arguments"]
    for part in parts:
        assert part in detail
    assert "usage:" not in detail and "usage:" not in capsys.readouterr().err


def test_another_algorithm_is_pointed_out(plugins):
    arguments = ["--model-path", str(PAIR / "target"), "--speculative-algorithm", "NGRAM"]
    (finding,) = check_module._check_arguments(arguments)
    assert finding == Finding("hint", "arguments", "--speculative-algorithm NGRAM is not TETRIS.")


def test_the_attention_backend_of_a_gpu_is_flashinfer(plugins, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert Finding("ok", "attention backend", "flashinfer") in list(check_module._check_arguments([]))


def test_a_device_that_cannot_serve_is_named_with_the_way_out(plugins, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    detail = problems(check_module._check_arguments([]))["device"]
    assert "--device cuda" in detail and "--device cpu" in detail


def test_a_missing_symbol_is_a_problem(plugins, monkeypatch):
    monkeypatch.setattr(contacts, "find_missing_symbols", lambda symbols: ["sglang.srt.Gone (why)"])
    detail = problems(find())["symbol"]
    assert "sglang.srt.Gone (why)" in detail and "Install a supported release: 0.5.23" in detail


def test_a_missing_target_of_a_hook_is_a_problem():
    hook = contacts.Hook("sglang.srt.server_args.ServerArgs.gone", "ours", "AFTER", "flags", "ever")
    finding = check_module._check_hook(hook)
    assert finding.status == "problem" and finding.subject == "gone" and "for: flags" in finding.detail


def test_a_plugin_that_fails_to_load_is_a_problem(plugins, monkeypatch):
    """SGLang logs the exception of a plugin and goes on; check says it."""
    import logging

    import sglang.srt.plugins

    def load_plugins():
        try:
            raise RuntimeError("cannot register")
        except RuntimeError:
            logging.getLogger("sglang.srt.plugins").exception("Failed to execute general plugin: tetris")

    monkeypatch.setattr(sglang.srt.plugins, "load_plugins", load_plugins)
    assert problems(find())["plugin"].startswith("Failed to execute general plugin: tetris: cannot register")
