"""Tables and pictures of a comparison, from samples that no server made."""

import io
import json
from dataclasses import asdict

import pytest
from rich.console import Console

from tests.tools.bench.samples import make_sample, make_settings
from tetris_sglang.tools.bench import command, report
from tetris_sglang.tools.bench.workloads import Load

TETRIS = {"verify_steps": 10, "selected": 40, "accepted": 30, "num_steps": 5, "verified_rows": 50}
OWN = {"verify_steps": 12, "selected": 48, "accepted": 24}
ARMS = {
    "none": {"family": "none", "k": 0, "extra": 0},
    "EAGLE3 k=4": {"family": "sglang", "k": 4, "extra": 0},
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
                make_sample("EAGLE3 k=4", tokens_per_s=0.9 * speed, **place, **OWN),
                make_sample(
                    "tetris k=4+2",
                    tokens_per_s=(tetris_gain + 0.1 * repeat) * speed,
                    phase_ms=phase_ms,
                    **place,
                    **TETRIS,
                ),
            ]
    provenance = {
        "gpu": None, "cpu": "Some CPU", "cores": 2, "python": "3.11", "torch": "2", "sglang": "0.5.23",
        "tetris_sglang": "0.1", "commit": "abc", "command": "python bench", "date": "2026-01-01",
    }  # fmt: skip
    return {
        "provenance": provenance,
        "settings": asdict(make_settings(repeats=2)),
        "arms": ARMS,
        "unavailable": {},
        "samples": samples,
    }


def cell_of(results, arm, concurrency):
    (found,) = [c for c in report.build_cells(results["samples"]) if (c.arm, c.load) == (arm, Load(concurrency))]
    return found


# -- ratios --------------------------------------------------------------------------------------------------


def test_a_ratio_is_taken_within_its_round_and_not_over_medians(results):
    assert report.pair_ratios(results["samples"], "tetris k=4+2", lambda s: s["output_tokens_per_s"]) == pytest.approx(
        [1.5, 1.6, 0.8, 0.9]
    )


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
    success, against_sglang, against_none, identical = verdicts_of(results).values()
    assert success.holds and success.detail == "in the one cell"  # concurrency 1 has no capacity to share
    assert not against_sglang.holds and against_sglang.detail == "tetris k=4+2 at concurrency 16: 0.85 against 0.90"
    assert not against_none.holds and against_none.detail == "tetris k=4+2 at concurrency 16: 0.85"
    assert identical.holds


def test_a_different_output_fails_the_verdict_unless_others_differ_as_much(results):
    results["samples"][2]["output_hashes"] = ["a", "x"]
    assert not verdicts_of(results)["greedy outputs equal to those without speculation"].holds
    for sample in results["samples"]:
        if sample["arm"] == "EAGLE3 k=4":
            sample["output_hashes"] = ["a", "x"]
    assert verdicts_of(results)["greedy outputs equal to those without speculation"].holds


def test_expectations_without_a_cell_are_left_out(results):
    results["samples"] = [s for s in results["samples"] if s["arm"] != "EAGLE3 k=4"]
    assert not any("SGLang's own" in expectation for expectation in verdicts_of(results))


# -- rendering -----------------------------------------------------------------------------------------------


def test_losing_cells_are_printed_as_losing(results):
    printed = io.StringIO()
    report.print_tables(results, Console(file=printed, width=200))
    rows = [line for line in printed.getvalue().splitlines() if "tetris k=4+2" in line]
    assert "1.55 (1.50..1.60)" in rows[0] and "loses" not in rows[0]
    assert "0.85 (0.80..0.90) loses" in rows[1]
    assert "fails" in printed.getvalue()


def test_the_terminal_has_milliseconds_per_phase(results):
    printed = io.StringIO()
    report.print_tables(results, Console(file=printed, width=80))
    tables = printed.getvalue().partition("milliseconds per step")[2].splitlines()
    rows = [line.split() for line in tables if "tetris k=4+2" in line and "fails" not in line]
    assert rows[:2] == [["tetris", "k=4+2", load, "3", "1", "4", "1", "1"] for load in ("1", "16")]


def test_markdown_holds_provenance_tables_and_what_was_unavailable(results):
    results["unavailable"] = {"random k=4+2": "out of memory"}
    text = report.render_markdown(results)
    assert "Some CPU, 2 cores; SGLang 0.5.23" in text
    assert "| tetris k=4+2 | 1.55 (1.50..1.60) |" in text
    assert "| tetris k=4+2 | 0.85 (0.80..0.90) loses |" in text
    shares = "3 (30.0%) | 1 (10.0%) | 4 (40.0%) | 1 (10.0%) | 1 (10.0%)"
    assert f"| tetris k=4+2 | concurrency 16 | {shares} |" in text
    assert "not measured: random k=4+2 (out of memory)" in text
    (header,) = {line for line in text.splitlines() if line.startswith("| arm | output tok/s, ratio")}
    widths = {line.count("|") for line in text.splitlines() if line.startswith("| tetris k=4+2 | 1.55")}
    assert widths == {header.count("|")}
    # Not measured in these samples.
    assert "steady" not in header
    assert "target `SmolLM2-135M-Instruct`, float32, sharegpt prompts, at most 32 to 160 output tokens" in text


def test_the_steady_part_has_a_column_of_its_own(results):
    for sample in results["samples"]:
        sample["steady_tokens_per_s"] = sample["output_tokens_per_s"] * (1.1 if "tetris" in sample["arm"] else 1.0)
    text = report.render_markdown(results)
    assert "| arm | output tok/s, ratio | steady, ratio |" in text
    assert "| tetris k=4+2 | 1.55 (1.50..1.60) | 1.71 (1.65..1.76) |" in text and "| none | 1 | 1 |" in text


def test_latencies_are_milliseconds_beside_their_ratio(results):
    latencies = cell_of(results, "tetris k=4+2", 16).latencies
    # 80 and 45 tokens/s: half the sum of 12.5 and 22.2 ms per request; paired ratios 1 / 0.8 and 1 / 0.9.
    assert latencies["e2e_p50"].ms == pytest.approx((1e3 / 80 + 1e3 / 45) / 2)
    assert latencies["e2e_p50"].ratio == pytest.approx((1 / 0.8 + 1 / 0.9) / 2)
    assert str(latencies["ttft_p50"]) == "10 (1.00)" and str(report.Latency(1234.5, 0.5)) == "1234 (0.50)"
    text = report.render_markdown(results)
    assert "| arm | TTFT p50 | TTFT p99 | TPOT p50 | TPOT p99 | E2E p50 | E2E p99 |" in text
    assert "| tetris k=4+2 | 10 (1.00) | 20 (1.00) | 1.74 (1.18) | 3.47 (1.18) | 17.4 (1.18) | 34.7 (1.18) |" in text


def test_speed_per_user_and_what_the_cache_held(results):
    cell = cell_of(results, "none", 1)
    assert (cell.per_user_tokens_per_s, cell.cached_share) == (75.0, 0.25)


@pytest.mark.parametrize(
    ("options", "described"),
    [
        ({}, "at most 32 to 160 output tokens, drawn per prompt"),
        ({"lengths": "equal", "output_len": 50}, "50 output tokens"),
        ({"dataset_name": "sharegpt"}, "at most 96 output tokens"),
    ],
)
def test_a_report_says_how_long_answers_were(options, described):
    assert report.describe_lengths(asdict(make_settings(**options))) == described


def test_the_best_k_has_a_row_of_its_own(results):
    results["arms"]["EAGLE3 k=2"] = {"family": "sglang", "k": 2, "extra": 0}
    for sample in [s for s in results["samples"] if s["arm"] == "EAGLE3 k=4"]:
        gain = 1.5 if sample["concurrency"] == 1 else 0.5
        results["samples"].append(sample | {"arm": "EAGLE3 k=2", "output_tokens_per_s": gain * sample["output_tokens_per_s"]})
    text = report.render_markdown(results)
    at_1, at_16 = text.split("## Temperature")[1:3]
    assert "| best of EAGLE3: k=2 | 1.35 (1.35..1.35) |" in at_1
    assert "| best of EAGLE3: k=4 | 0.90 (0.90..0.90) loses |" in at_16


def test_one_k_alone_is_no_best(results):
    assert "best of" not in report.render_markdown(results)


def test_tetris_is_held_against_the_same_drafts_verified_in_full(results):
    for k, tokens_per_s in ((6, 90), (5, 10)):
        results["arms"][f"full D={k}"] = {"family": "full", "k": k}
        for repeat in (0, 1):
            results["samples"].append(make_sample(f"full D={k}", tokens_per_s=tokens_per_s, concurrency=16, repeat=repeat))
    verdict = verdicts_of(results)["throughput at least that of the same drafts verified in full"]
    assert not verdict.holds and verdict.detail == "tetris k=4+2 at concurrency 16: 0.85 against 1.35"


def test_poisson_arrivals_are_cells_of_their_own(results):
    for rate in (4.0, 0.5):
        results["samples"] += [
            make_sample(arm, tokens_per_s=rate, concurrency=None, request_rate=rate) for arm in ("none", "tetris k=4+2")
        ]
    cells = report.build_cells(results["samples"])
    assert [str(c.load) for c in cells if c.arm == "none"] == [
        "0.5 requests/s", "concurrency 1", "4 requests/s", "concurrency 16",
    ]  # fmt: skip
    assert "## Temperature 0, 0.5 requests/s" in report.render_markdown(results)


def test_reports_are_rendered_from_the_json_alone(results, tmp_path):
    path = tmp_path / "serving.json"
    path.write_text(json.dumps(results))
    markdown, picture = command.write_reports(json.loads(path.read_text()), path)
    assert markdown.read_text() == report.render_markdown(results)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_goals_of_the_automatic_capacity():
    """Against no speculation, the best fixed capacity and the best of the others, each cell by itself."""
    throughput = {
        "none": (1.0, 1.0), "EAGLE3 k=3": (1.2, 1.0), "tetris k=3+1": (1.3, 0.9), "auto D=6": (1.28, 1.2),
        "auto useless D=6": (0.97, 1.1),
    }  # fmt: skip
    arms = {
        "none": {"family": "none"},
        "EAGLE3 k=3": {"family": "sglang", "k": 3},
        "tetris k=3+1": {"family": "tetris", "k": 3, "extra": 1},
        "auto D=6": {"family": "auto", "num_steps": 6},
        "auto useless D=6": {"family": "auto", "num_steps": 6, "draft": "useless"},
    }
    samples = [
        make_sample(arm, tokens_per_s=100 * ratios[i], concurrency=concurrency)
        for arm, ratios in throughput.items()
        for i, concurrency in enumerate((1, 16))
    ]
    verdicts = {v.expectation: v for v in report.judge(report.build_cells(samples), arms)}
    plain = verdicts["automatic capacity at least 0.98 of no speculation"]
    assert (plain.holds, plain.detail) == (False, "auto useless D=6 at concurrency 1: 0.97")
    fixed = verdicts["automatic capacity at least 0.98 of the best fixed one, and of no speculation"]
    assert (fixed.holds, fixed.detail) == (False, "auto useless D=6 at concurrency 1: 0.97")
    others = verdicts["automatic capacity at least 1.15 of the best arm without TETRIS, from 16 requests on"]
    assert others.holds and others.detail == "in the one cell"
    # As good as it is over the whole run, while all requests are in flight it is not.
    steady = [s | {"steady_tokens_per_s": 100 if "auto" in s["arm"] else 90} for s in samples]
    verdicts = {v.expectation: v for v in report.judge(report.build_cells(steady), arms)}
    in_flight = verdicts["the same while all requests are in flight"]
    assert (in_flight.holds, in_flight.detail) == (False, "auto D=6 at concurrency 16: 1.11")
    assert verdicts[others.expectation].holds
    # Without any other arm there is nothing to say.
    alone = [sample for sample in samples if not sample["arm"].startswith("EAGLE3")]
    assert others.expectation not in {v.expectation for v in report.judge(report.build_cells(alone), arms)}


def judge_throughput(ratios: dict[str, float], arms: dict[str, dict]) -> dict[str, report.Verdict]:
    samples = [make_sample(arm, tokens_per_s=100 * ratio, concurrency=4) for arm, ratio in {"none": 1.0, **ratios}.items()]
    cells = report.build_cells(samples)
    return {v.expectation: v for v in report.judge(cells, {"none": {"family": "none"}} | arms)}


def test_where_every_draft_is_wrong_choosing_is_not_judged():
    """But the automatic capacity is: it must not lose by much."""
    arms = {
        "EAGLE3 useless k=2": {"family": "sglang", "k": 2, "draft": "useless"},
        "tetris useless k=2+1": {"family": "tetris", "k": 2, "extra": 1, "draft": "useless"},
        "auto useless D=6": {"family": "auto", "num_steps": 6, "draft": "useless"},
    }
    verdicts = judge_throughput(dict(zip(arms, (0.6, 0.5, 0.99), strict=True)), arms)
    assert list(verdicts) == [
        "automatic capacity at least 0.98 of no speculation",
        "automatic capacity at least 0.98 of the best fixed one, and of no speculation",
        "greedy outputs equal to those without speculation",
    ]
    assert all(verdict.holds for verdict in verdicts.values())


def test_of_many_cells_that_fail_the_worst_are_named():
    ratios = {f"tetris k={k}+1": 1.0 - 0.1 * k for k in (3, 1, 5, 2, 4)}
    arms = {name: {"family": "tetris", "k": int(name[9]), "extra": 1} for name in ratios}
    arms |= {f"EAGLE3 k={k}": {"family": "sglang", "k": k} for k in range(1, 6)}
    ratios |= {f"EAGLE3 k={k}": 1.0 for k in range(1, 6)}
    verdict = judge_throughput(ratios, arms)["throughput at least that of SGLang's own at equal k"]
    named = "; ".join(f"tetris k={k}+1 at concurrency 4: {1 - 0.1 * k:.2f} against 1.00" for k in (5, 4, 3, 2))
    assert verdict.detail == f"in 5 of 5 cells, the worst: {named}"


def test_an_interrupted_run_says_what_it_did_not_come_to(results):
    del results["samples"][2:]
    results["unavailable"] = {"adaptive eagle": "needs a GPU"}
    left = results["arms"].keys() - {sample["arm"] for sample in results["samples"]}
    assert left
    expected = dict.fromkeys(left, "the run ended before it") | results["unavailable"]
    assert report.find_unmeasured(results) == expected
