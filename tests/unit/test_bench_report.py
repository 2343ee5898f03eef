"""The pure parts of the serving benchmark and of the load it shares with the demo: no server, no clock."""

import io
import json
import sys
from itertools import chain, pairwise
from pathlib import Path

import pytest
from rich.console import Console

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "benchmarks"))

import bench_serving as bench
import serving_report as report

from tetris_sglang.load import DraftCounts, StepCounts, count_drafts, parse_step_counts

OPTIONS = {
    "drafts": "standalone",
    "topk": "1",
    "concurrency": "1,16",
    "output_len": 64,
    "repeats": 3,
    "shape": "s",
    "dtype": "float32",
    "live_servers": 3,
    "phase_times": True,
    "seed": 0,
    "num_steps": 6,
}


def make_settings(**options):
    return bench.build_settings(preset=bench.QUICK, options=OPTIONS | options)


def make_sample(arm, *, tokens_per_s, repeat=0, group=0, concurrency=1, temperature=0.0, **changes):
    sample = {
        "group": group, "repeat": repeat, "arm": arm, "concurrency": concurrency, "temperature": temperature,
        "output_tokens_per_s": tokens_per_s, "ttft_p50_ms": 10.0, "e2e_p50_ms": 1e3 / tokens_per_s,
        "e2e_p99_ms": 2e3 / tokens_per_s, "verify_steps": 0, "selected": 0, "accepted": 0, "num_steps": 0,
        "verified_rows": 0, "phase_ms": {}, "output_hashes": ["a", "b"],
    }  # fmt: skip
    return sample | changes


TETRIS = {"verify_steps": 10, "selected": 40, "accepted": 30, "num_steps": 5, "verified_rows": 50}
STANDALONE = {"verify_steps": 12, "selected": 48, "accepted": 24}
ARMS = {
    "none": {"family": "none", "k": 0, "extra": 0},
    "standalone k=4": {"family": "standalone", "k": 4, "extra": 0},
    "tetris k=4+2": {"family": "tetris", "k": 4, "extra": 2},
}


@pytest.fixture
def results():
    """Two repeats at concurrency 1 and 16; the machine is twice as slow in the second repeat."""
    samples = []
    for concurrency, tetris_gain in ((1, 1.5), (16, 0.8)):
        for repeat, speed in ((0, 100.0), (1, 50.0)):
            place = {"repeat": repeat, "concurrency": concurrency}
            phase_ms = {"draft": 3.0, "select": 1.0, "verify": 4.0, "sample": 1.0, "host": 1.0}
            samples += [
                make_sample("none", tokens_per_s=speed, **place),
                make_sample("standalone k=4", tokens_per_s=0.9 * speed, **place, **STANDALONE),
                make_sample(
                    "tetris k=4+2",
                    tokens_per_s=(tetris_gain + 0.1 * repeat) * speed,
                    phase_ms=phase_ms,
                    **place,
                    **TETRIS,
                ),
            ]
    provenance = {
        "cpu": "Some CPU", "cores": 2, "python": "3.11", "torch": "2", "sglang": "0.5.23",
        "tetris_sglang": "0.1", "commit": "abc", "command": "python bench", "date": "2026-01-01",
    }  # fmt: skip
    settings = {"shape": "cpu-100m", "dtype": "float32", "output_len": 64, "repeats": 2, "seed": 0}
    return {
        "provenance": provenance,
        "settings": settings,
        "arms": ARMS,
        "unavailable": {},
        "samples": samples,
    }


def cell_of(results, arm, concurrency):
    (found,) = [
        c for c in report.build_cells(results["samples"]) if (c.arm, c.concurrency) == (arm, concurrency)
    ]
    return found


# -- ratios --------------------------------------------------------------------------------------------------


def test_a_ratio_is_taken_within_its_round_and_not_over_medians(results):
    assert report.pair_ratios(
        results["samples"], "tetris k=4+2", lambda s: s["output_tokens_per_s"]
    ) == pytest.approx([1.5, 1.6, 0.8, 0.9])


def test_samples_without_a_reference_in_their_round_do_not_count():
    samples = [
        make_sample("none", tokens_per_s=10, repeat=0),
        make_sample("tetris k=4+2", tokens_per_s=20, repeat=0),
        make_sample("tetris k=4+2", tokens_per_s=90, repeat=1),
        make_sample("none", tokens_per_s=10, repeat=1, group=1),
    ]
    assert report.pair_ratios(samples, "tetris k=4+2", lambda s: s["output_tokens_per_s"]) == [2]
    assert [c.arm for c in report.build_cells(samples[2:])] == ["none"]


def test_a_ratio_tells_its_median_and_spread():
    ratio = report.summarise_ratios([1.2, 0.7, 0.9])
    assert ratio == (0.9, 0.7, 1.2, 3)
    assert str(ratio) == "0.90 (0.70..1.20)"
    assert ratio.loses
    with pytest.raises(ValueError, match="no round"):
        report.summarise_ratios([])


def test_counts_are_summed_over_repeats_before_they_are_divided(results):
    for sample in results["samples"]:
        if sample["arm"] == "tetris k=4+2" and sample["concurrency"] == 16 and sample["repeat"] == 1:
            sample |= {
                "verify_steps": 30,
                "selected": 60,
                "accepted": 20,
                "num_steps": 15,
                "verified_rows": 90,
            }
    cell = cell_of(results, "tetris k=4+2", 16)
    assert cell.accept_length == 1 + 50 / 40
    assert cell.success_rate == 50 / 100
    assert cell.verified_per_step == 1 + 100 / 40
    assert cell.rows_per_step == 140 / 20


def test_equal_outputs_are_counted_against_the_reference_of_the_same_round(results):
    results["samples"][2]["output_hashes"] = ["a", "x"]
    assert cell_of(results, "tetris k=4+2", 1).identical == (3, 4)
    assert cell_of(results, "none", 1).identical is None


def test_sampled_outputs_are_not_compared():
    samples = [make_sample(arm, tokens_per_s=1, temperature=1.0) for arm in ("none", "tetris k=4+2")]
    assert [c.identical for c in report.build_cells(samples)] == [None, None]


# -- verdicts ------------------------------------------------------------------------------------------------


def verdicts_of(results):
    cells = report.build_cells(results["samples"])
    return {v.expectation: v for v in report.judge(cells, results["arms"])}


def test_verdicts_name_the_cells_that_fail(results):
    success, against_standalone, against_none, identical = verdicts_of(results).values()
    assert success.holds and success.detail == "in all 1 cells"  # concurrency 1 has no capacity to share
    assert (
        not against_standalone.holds and against_standalone.detail == "tetris k=4+2 at 16: 0.85 against 0.90"
    )
    assert not against_none.holds and against_none.detail == "tetris k=4+2 at 16: 0.85"
    assert identical.holds


def test_a_different_output_fails_the_verdict(results):
    results["samples"][2]["output_hashes"] = ["a", "x"]
    assert not verdicts_of(results)["greedy outputs equal to those without speculation"].holds


def test_expectations_without_a_cell_are_left_out(results):
    results["samples"] = [s for s in results["samples"] if s["arm"] != "standalone k=4"]
    assert not any("STANDALONE" in expectation for expectation in verdicts_of(results))


# -- rendering -----------------------------------------------------------------------------------------------


def test_losing_cells_are_printed_as_losing(results):
    printed = io.StringIO()
    report.print_tables(results, Console(file=printed, width=200))
    rows = [line for line in printed.getvalue().splitlines() if "tetris k=4+2" in line]
    assert "1.55 (1.50..1.60)" in rows[0] and "loses" not in rows[0]
    assert "0.85 (0.80..0.90) loses" in rows[1]
    assert "fails" in printed.getvalue()


def test_markdown_holds_provenance_tables_and_what_was_unavailable(results):
    results["unavailable"] = {"random k=4+2": "out of memory"}
    text = report.render_markdown(results)
    assert "Some CPU, 2 cores; SGLang 0.5.23" in text
    assert "| tetris k=4+2 | 1.55 (1.50..1.60) |" in text
    assert "| tetris k=4+2 | 0.85 (0.80..0.90) loses |" in text
    assert "| tetris k=4+2 | 16 | 30.0% | 10.0% | 40.0% | 10.0% | 10.0% |" in text
    assert "unavailable: random k=4+2 (out of memory)" in text
    widths = {line.count("|") for line in text.splitlines() if line.startswith("| tetris k=4+2 | 1.55")}
    assert widths == {len(report._COLUMNS) + 1}


def test_reports_are_rendered_from_the_json_alone(results, tmp_path):
    path = tmp_path / "serving.json"
    path.write_text(json.dumps(results))
    markdown, picture = report.write_reports(json.loads(path.read_text()), path)
    assert markdown.read_text() == report.render_markdown(results)
    assert picture.read_bytes().startswith(b"\x89PNG")


# -- arms, groups, order -------------------------------------------------------------------------------------


def test_flags_verify_k_and_draft_k_and_extra():
    flags = bench.Arm("tetris", 4, 2).flags(Path("draft"), phase_times=False)
    assert flags[flags.index("--speculative-num-steps") + 1] == "6"
    assert flags[flags.index("--speculative-tetris-capacity-per-request") + 1] == "4"
    assert "--speculative-tetris-phase-times" not in flags
    flags = bench.Arm("standalone", 4).flags(Path("draft"), phase_times=True)
    assert flags[flags.index("--speculative-num-steps") + 1] == "4"
    assert flags[flags.index("--speculative-num-draft-tokens") + 1] == "5"
    assert bench.Arm("none").flags(Path("draft"), phase_times=True) == []


def test_an_absolute_capacity_is_an_arm_of_its_own():
    settings = make_settings(arms="none,standalone,tetris", k="none", capacity_tokens="8,32", num_steps=5)
    arms = settings.build_arms()
    assert [arm.name for arm in arms] == ["none", "tetris C=8, D=5", "tetris C=32, D=5"]
    flags = arms[2].flags(Path("draft"), phase_times=False)
    assert flags[flags.index("--speculative-num-steps") + 1] == "5"
    assert flags[flags.index("--speculative-tetris-capacity-tokens") + 1] == "32"
    assert "--speculative-tetris-capacity-per-request" not in flags


def test_other_drafts_and_trees_are_arms_of_their_own():
    settings = make_settings(
        arms="none,standalone,tetris", k="2,6", extra="4", capacity_tokens="none", num_steps=3,
        drafts="eagle3,ngram", topk="1,2",
    )  # fmt: skip
    arms = {arm.name: arm for arm in settings.build_arms()}
    assert list(arms) == [
        "none",
        *("EAGLE3 k=2", "tetris eagle3 k=2+4", "EAGLE3 k=6", "tetris eagle3 k=6+4"),
        *("EAGLE3 topk=2 k=6", "tetris eagle3 topk=2 k=6+4"),
        *("NGRAM k=2", "tetris ngram k=2+4", "NGRAM k=6", "tetris ngram k=6+4"),
        "tetris ngram topk=2 k=6+4",
    ]

    def flags(name, draft=Path("head")):
        given = arms[name].flags(draft, phase_times=False)
        return dict(zip(given[::2], given[1::2], strict=True))

    assert flags("EAGLE3 topk=2 k=6") == {
        "--speculative-algorithm": "EAGLE3",
        "--speculative-draft-model-path": "head",
        "--speculative-num-steps": "3",
        "--speculative-eagle-topk": "2",
        "--speculative-num-draft-tokens": "7",
    }
    tree = flags("tetris eagle3 topk=2 k=6+4")
    assert tree["--speculative-num-draft-tokens"] == "11" and tree["--speculative-num-steps"] == "3"
    assert tree["--speculative-tetris-capacity-per-request"] == "6"
    assert "--speculative-draft-model-path" not in flags("tetris ngram k=2+4", None)


def test_every_flag_is_one_that_tetris_declares():
    from tetris_sglang.config import SETTINGS

    declared = {setting.flag for setting in SETTINGS}
    for family in ("tetris", "uniform", "random"):
        given = {
            f for f in bench.Arm(family, 4, 2).flags(Path("d"), True) if f.startswith("--speculative-tetris-")
        }
        assert given and given <= declared


def test_every_group_has_the_reference_and_every_arm_is_in_one_group():
    arms = make_settings(arms="none,standalone,tetris,uniform", k="1,2", extra="1,2").build_arms()
    first = "none", "standalone k=1", "tetris k=1+1", "uniform k=1+1", "tetris k=1+2", "uniform k=1+2"
    assert tuple(arm.name for arm in arms[:6]) == first
    groups = bench.group_arms(arms, live_servers=4)
    assert all(group[0] == arms[0] and len(group) <= 4 for group in groups)
    assert [arm for group in groups for arm in group[1:]] == arms[1:]
    assert bench.group_arms(arms[:1], live_servers=4) == [arms[:1]]
    assert bench.group_arms(arms, live_servers=1) == [arms]


def test_order_is_a_permutation_that_changes_from_repeat_to_repeat():
    arms = [bench.Arm("tetris", k) for k in range(1, 5)]
    orders = [bench.order_arms(arms, repeat) for repeat in range(4)]
    assert all(sorted(order, key=lambda a: a.k) == arms for order in orders)
    assert len({order[0] for order in orders}) > 1
    follows = {tuple(pair) for order in orders for pair in pairwise(order)}
    assert any((b, a) in follows for a, b in follows)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"arms": "none,eagle"}, "eagle"),
        ({"k": "1,x"}, "--k '1,x'"),
        ({"k": "0"}, "--k '0'"),
        ({"temperature": "-1"}, "--temperature '-1'"),
        ({"live_servers": 0}, "--live-servers 0"),
        ({"concurrency": "none"}, "--concurrency 'none'"),
        ({"num_steps": 0}, "--num-steps 0"),
        ({"repeats": 0}, "--repeats 0"),
        ({"output_len": 3}, "--output-len 3"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        make_settings(**options)


def test_prompts_cover_the_concurrency():
    settings = make_settings()
    assert (settings.num_prompts(1), settings.num_prompts(16)) == (4, 32)


# -- resumption ----------------------------------------------------------------------------------------------


@pytest.fixture
def interrupted(tmp_path):
    """A file with one complete round and one that an arm is missing from."""
    settings = make_settings(arms="none,tetris", k="4", extra="2", capacity_tokens="none")
    arms = settings.build_arms()
    file = bench.ResultsFile(tmp_path / "serving.json", settings, arms, resume=False)
    for arm, repeat in (("none", 0), ("tetris k=4+2", 0), ("tetris k=4+2", 1)):
        file.add(make_sample(arm, tokens_per_s=1, repeat=repeat))
    return tmp_path / "serving.json", settings, arms


def test_resume_keeps_complete_rounds_only(interrupted):
    path, settings, arms = interrupted
    file = bench.ResultsFile(path, settings, arms, resume=True)
    file.drop_incomplete(bench.group_arms(arms, settings.live_servers))
    assert [(s["arm"], s["repeat"]) for s in file.results["samples"]] == [("none", 0), ("tetris k=4+2", 0)]
    assert file.has_round((0, 0.0, 1, 0)) and not file.has_round((0, 0.0, 1, 1))
    assert file.results["provenance"]["resumed_from"]["cores"]


def test_a_round_without_an_unavailable_arm_is_complete(interrupted):
    path, settings, arms = interrupted
    file = bench.ResultsFile(path, settings, arms, resume=True)
    file.add(make_sample("none", tokens_per_s=1, repeat=2))
    file.mark_unavailable(arms[1], "it crashed")
    resumed = bench.ResultsFile(path, settings, arms, resume=True)
    resumed.drop_incomplete(bench.group_arms(arms, settings.live_servers))
    assert resumed.has_round((0, 0.0, 1, 2)) and not resumed.has_round((0, 0.0, 1, 1))
    assert resumed.results["unavailable"] == {"tetris k=4+2": "it crashed"}


def test_resume_refuses_other_settings(interrupted):
    path, _, arms = interrupted
    other = make_settings(arms="none,tetris", k="4", extra="2", capacity_tokens="none", output_len=32)
    with pytest.raises(ValueError, match="output_len=64"):
        bench.ResultsFile(path, other, arms, resume=True)


def test_resume_accepts_results_from_before_a_setting_existed(interrupted):
    path, settings, arms = interrupted
    results = json.loads(path.read_text())
    del results["settings"]["server_flags"]
    path.write_text(json.dumps(results))
    assert len(bench.ResultsFile(path, settings, arms, resume=True).results["samples"]) == 3
    flagged = make_settings(
        arms="none,tetris", k="4", extra="2", capacity_tokens="none", server_flags="--dtype x"
    )
    with pytest.raises(ValueError, match="server_flags=None"):
        bench.ResultsFile(path, flagged, arms, resume=True)


class Recorder:
    """Takes the place of servers: every run of every arm that starts is noted."""

    def __init__(self, monkeypatch, fails: str = ""):
        self.started, self.frozen = [], []
        monkeypatch.setattr(bench, "check_memory", lambda count: None)
        monkeypatch.setattr(bench, "start_all", self.start_all)
        monkeypatch.setattr(bench, "measure", self.measure)
        self.fails = fails

    def start_all(self, processes, warm_up):
        self.started.append(len(processes))
        return [None] * len(processes)

    def measure(self, server, texts, settings, concurrency, temperature):
        self.frozen.append(server.is_frozen_between_runs)
        if server.arm.name == self.fails:
            raise bench.RunFailed("it went away")
        return make_sample(server.arm.name, tokens_per_s=1, concurrency=concurrency)


@pytest.mark.parametrize("fails", ["", "standalone k=4"])
def test_one_server_after_the_other_takes_its_own_missing_rounds(tmp_path, monkeypatch, fails):
    settings = make_settings(k="4", extra="2", capacity_tokens="none", live_servers=1, repeats=1)
    arms = settings.build_arms()
    file = bench.ResultsFile(tmp_path / "serving.json", settings, arms, resume=False)
    file.add(make_sample("none", tokens_per_s=1, concurrency=1))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"text": "some words"}))
    recorder = Recorder(monkeypatch, fails)
    run = bench.Bench(settings, file, Path("target"), {"standalone": Path("draft")}, prompts, tmp_path)
    run.run(bench.group_arms(arms, settings.live_servers))
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
        arms="none,standalone,auto", k="2", drafts="standalone,perfect", capacity_tokens="none", live_servers=8,
        repeats=1,
    )  # fmt: skip
    arms = settings.build_arms()
    assert [arm.name for arm in arms] == [
        "none", "auto D=6", "standalone k=2", "auto perfect D=6", "standalone perfect k=2",
    ]  # fmt: skip
    flags = arms[3].flags(Path("draft"), phase_times=True)
    assert flags == [
        *("--speculative-algorithm", "TETRIS", "--speculative-draft-model-path", "draft"),
        *("--speculative-num-steps", "6"),
    ]
    assert arms[4].flags(Path("draft"), True)[:2] == ["--speculative-algorithm", "STANDALONE"]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"text": "some words"}))
    recorder = Recorder(monkeypatch)
    file = bench.ResultsFile(tmp_path / "serving.json", settings, arms, resume=False)
    paths = {"standalone": Path("draft"), "perfect": Path("target")}
    bench.Bench(settings, file, Path("target"), paths, prompts, tmp_path).run([arms])
    assert recorder.started == [1, 1, 3]


def test_without_resume_earlier_samples_are_dropped(interrupted):
    path, settings, arms = interrupted
    assert bench.ResultsFile(path, settings, arms, resume=False).results["samples"] == []


# -- provenance and the machine ------------------------------------------------------------------------------


def test_provenance_names_processor_versions_and_command(tmp_path, monkeypatch):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\nflags\t: x\n")
    assert bench.read_cpu_model(cpuinfo) == "Some CPU @ 2 GHz"
    monkeypatch.setattr(sys, "argv", ["/somewhere/bench_serving.py", "--k", "1,2"])
    provenance = bench.collect_provenance()
    assert provenance["command"] == "python benchmarks/bench_serving.py --k 1,2"
    assert provenance["sglang"] == "0.5.23"
    assert str(REPOSITORY) not in json.dumps(provenance)


def test_too_many_live_servers_are_refused_before_they_start(tmp_path):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9000000 kB\nMemAvailable: 6291456 kB\n")
    bench.check_memory(1, meminfo)
    with pytest.raises(ValueError, match="6.0 GiB are available"):
        bench.check_memory(2, meminfo)


def test_the_reason_of_a_failed_start_is_its_last_error():
    log = "the server ended with code 1.\nINFO a\nRuntimeError: no such backend\nINFO bye"
    assert bench.last_words(log) == "RuntimeError: no such backend"
    assert bench.last_words("no answer after 600 s.\nINFO last") == "INFO last"


# -- counts --------------------------------------------------------------------------------------------------


def test_draft_counts_use_one_definition_for_standalone_and_tetris():
    shared = {"spec_verify_ct": 10, "spec_num_correct_drafts": 20}
    standalone = count_drafts([shared | {"spec_num_proposed_drafts": 40}] * 2)
    assert standalone == DraftCounts(verify_steps=20, selected=80, accepted=40)
    tetris = count_drafts([shared | {"spec_num_proposed_drafts": 60, "spec_num_selected_drafts": 25}])
    assert (tetris.accept_length, tetris.success_rate, tetris.verified_per_step) == (3.0, 0.8, 3.5)
    assert count_drafts([{"completion_tokens": 5}]).success_rate is None


def test_step_counts_since_an_earlier_reading_undo_the_running_means():
    before = parse_step_counts({"num_steps": 10, "verified_rows": 100, "draft_ms": 2.0})
    after = parse_step_counts({"num_steps": 40, "verified_rows": 400, "draft_ms": 5.0, "verify_ms": 3.0})
    assert after.since(before) == StepCounts(30, 300, {"draft": (5.0 * 40 - 2.0 * 10) / 30, "verify": 4.0})
    assert after.since(after) == StepCounts()
    assert after.since(before).rows_per_step == 10


def test_every_repeat_takes_other_prompts_of_every_kind(tmp_path):
    kinds = ("code", "prose", "chat")
    lines = [json.dumps({"kind": kind, "text": f"{kind} {i}"}) for kind in kinds for i in range(4)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    texts = bench.read_prompts(tmp_path / "prompts.jsonl")
    repeats = [bench.take_prompts(texts, 3, repeat) for repeat in range(5)]
    assert repeats[0] == ["code 0", "prose 0", "chat 0"] and repeats[1] == ["code 1", "prose 1", "chat 1"]
    assert sorted(chain(*repeats[:4])) == sorted(texts) and repeats[4] == repeats[0]


def test_prompts_that_run_out_begin_again_a_word_later():
    texts = ["one two three", "four five six"]
    extended = bench.extend_prompts(texts, 5)
    assert extended[:2] == texts and len(extended) == 6
    assert extended[2:] == ["two three", "five six", "three", "six"]
    assert bench.extend_prompts(texts, 2) == texts


def test_the_dataset_is_one_that_sglang_bench_serving_reads(tmp_path):
    from sglang.benchmark.datasets.custom import sample_custom_requests

    class Tokenizer:
        def encode(self, text):
            return list(text)

    texts = [f"def f{i}():\n" for i in range(5)]
    dataset = bench.write_dataset(texts, tmp_path / "dataset.jsonl")
    rows = sample_custom_requests(str(dataset), 5, Tokenizer(), fixed_output_len=64)
    assert sorted(row.prompt for row in rows) == texts
    assert {row.output_len for row in rows} == {64}
