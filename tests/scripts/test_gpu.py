"""The parts of the GPU tooling that need no GPU: stages and their resumption, the float64 reference, random batches."""

import json
import os
import random
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch.nn.functional import scaled_dot_product_attention

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPTS = REPOSITORY / "scripts" / "gpu"
sys.path.insert(0, str(SCRIPTS))

import check
import dry_arms
import dry_run
import ledger
import server_checks
from ragged import KINDS, HeadShape, random_batch, random_lens, reference_attention, relative_error
from stage_report import Report, recorded

SHAPE = HeadShape(heads=6, kv_heads=2, head_dim=16)


# -- batches and the reference -------------------------------------------------------------------------------


def make_batch(verify, prefix, dtype=torch.float32, seed=0):
    return random_batch(verify, prefix, SHAPE, dtype=dtype, device="cpu", seed=seed)


@pytest.mark.parametrize("kind", KINDS)
def test_lens_stay_in_bounds(kind):
    rng = random.Random(3)
    for _ in range(200):
        verify, prefix = random_lens(kind, rng, max_requests=9, max_verify=7, max_prefix=50, max_rows=20)
        assert len(verify) == len(prefix) and 1 <= len(verify) <= 9
        assert all(1 <= v <= 7 for v in verify) and sum(verify) <= 20
        assert all(0 <= p <= 50 for p in prefix)


def test_kinds_are_what_they_say():
    rng = random.Random(4)

    def lens(kind):
        return random_lens(kind, rng, max_requests=9, max_verify=7, max_prefix=50, max_rows=63)

    assert set(lens("roots")[0]) == {1} and len(lens("single request")[0]) == 1
    assert len(set(lens("even")[0])) == 1 and sorted(lens("one takes all")[0])[-2:] == [1, 7]
    assert min(lens("long prefixes")[1]) >= 25
    assert any(len(set(lens("mixed")[0])) > 1 for _ in range(5))
    with pytest.raises(ValueError, match="no such kind of batch: 'odd'"):
        lens("odd")
    with pytest.raises(ValueError, match="3 rows are not enough for 9 requests"):
        random_lens("mixed", rng, max_requests=9, max_verify=7, max_prefix=50, max_rows=3)


def test_every_token_has_a_slot_of_its_own_and_no_other_slot_holds_a_number():
    batch = make_batch([3, 1, 4], [5, 0, 2])
    assert batch.kv_lens == (8, 1, 6) and batch.num_tokens == 8 == len(batch.queries)
    assert batch.slots.dtype == torch.int32 and len(set(batch.slots.tolist())) == sum(batch.kv_lens)
    owned = torch.zeros(len(batch.keys), dtype=torch.bool)
    owned[batch.slots.long()] = True
    for pool in (batch.keys, batch.values):
        assert pool[owned].isfinite().all() and pool[~owned].isnan().all() and (~owned).any()
    assert torch.equal(make_batch([2], [2]).queries, make_batch([2], [2]).queries)
    assert not torch.equal(make_batch([2], [2]).queries, make_batch([2], [2], seed=1).queries)


def test_the_reference_is_torchs_attention():
    batch = make_batch([3, 1, 4, 1], [5, 0, 200, 31])
    actual = reference_attention(batch)
    assert actual.dtype == torch.float64 and actual.shape == (9, SHAPE.heads, SHAPE.head_dim)
    rows = actual.split(batch.verify_lens)
    for request, slots in enumerate(batch.slots.long().split(batch.kv_lens)):
        queries = batch.queries.split(batch.verify_lens)[request].double().transpose(0, 1)
        keys, values = (pool[slots].double().transpose(0, 1) for pool in (batch.keys, batch.values))
        mask = torch.ones(queries.shape[1], len(slots), dtype=torch.bool).tril(batch.prefix_lens[request])
        expected = scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=True)
        torch.testing.assert_close(rows[request], expected.transpose(0, 1), rtol=1e-12, atol=1e-12)


def test_the_error_is_that_of_the_worst_row_and_nothing_passes_that_is_not_finite():
    expected = torch.ones(3, 2, 4, dtype=torch.float64)
    actual = expected.clone()
    actual[1] *= 1.01
    assert relative_error(actual, expected) == pytest.approx(0.01)
    actual[2, 0, 0] = torch.nan
    assert relative_error(actual, expected) == float("inf")


# -- stages --------------------------------------------------------------------------------------------------


def test_every_stage_has_a_letter_a_function_and_less_than_eight_minutes():
    assert sorted(stage.letter for stage in check.STAGES) == list("abcdefghi")
    for stage in check.STAGES:
        module, _, function = stage.run.partition(":")
        assert f"def {function}(report: Report)" in (SCRIPTS / f"{module}.py").read_text()
        assert stage.limit_s + check._GRACE_S <= 480


def test_stages_are_chosen_by_letter_once():
    assert [stage.letter for stage in check.choose_stages("c,a,c")] == ["c", "a"]
    with pytest.raises(ValueError, match="no such stage z; there are a, c, d, g, i, h, e, b, f"):
        check.choose_stages("a,z")


@pytest.fixture
def stage():
    return check.Stage("x", "an example", "nowhere:run")


def child(body: str) -> list[str]:
    """A stage's process; `report` is its report on disk."""
    return [sys.executable, "-S", "-c", f"import json, sys, time\nreport = open('x.json', 'w')\n{body}"]


def read(folder: Path) -> dict:
    return json.loads((folder / "x.json").read_text())


PASSED = "json.dump({'stage': 'x', 'status': 'passed', 'findings': []}, report); report.flush(); print('hello')"


def test_a_stage_that_passed_is_skipped_and_no_other(tmp_path, stage):
    assert not check.has_passed(tmp_path, stage)
    for text, expected in (('{"status": "failed"}', False), ("{", False), ('{"status": "passed"}', True)):
        (tmp_path / "x.json").write_text(text)
        assert check.has_passed(tmp_path, stage) is expected


def test_a_stages_output_goes_to_its_log(tmp_path, stage, monkeypatch, capfdbinary):
    monkeypatch.chdir(tmp_path)
    assert check.run_stage(stage, tmp_path, 30, child(PASSED)) == "passed"
    assert (tmp_path / "x.log").read_bytes() == b"hello\n" and check.has_passed(tmp_path, stage)


def test_a_stage_that_died_or_was_late_has_failed(tmp_path, stage, monkeypatch):
    monkeypatch.chdir(tmp_path)
    unfinished = "json.dump({'stage': 'x', 'status': 'running', 'findings': []}, report); report.flush()"
    assert check.run_stage(stage, tmp_path, 30, child(f"{unfinished}; sys.exit(3)")) == "failed"
    assert read(tmp_path)["error"] == "ended with 3"
    assert check.run_stage(stage, tmp_path, 0.3, child(f"{PASSED}; time.sleep(60)")) == "failed"
    assert read(tmp_path)["error"] == "stopped after 0 s"


def test_an_old_report_does_not_speak_for_a_stage_that_wrote_none(tmp_path, stage):
    (tmp_path / "x.json").write_text('{"status": "passed", "findings": []}')
    assert check.run_stage(stage, tmp_path, 30, [sys.executable, "-S", "-c", ""]) == "failed"


def test_results_leave_as_one_file(tmp_path, stage, monkeypatch):
    out, elsewhere = tmp_path / "gpu-check", tmp_path / "elsewhere"
    out.mkdir(), elsewhere.mkdir()
    monkeypatch.chdir(out)
    monkeypatch.setenv("OUT", str(elsewhere))
    check.run_stage(stage, out, 30, child(PASSED))
    (archive,) = elsewhere.iterdir()
    with tarfile.open(archive) as tar:
        assert sorted(tar.getnames()) == ["x.json", "x.log"]


def test_findings_are_on_disk_before_the_stage_ends(tmp_path, capsys):
    report = Report(tmp_path / "x.json", "x", "an example")
    report.expect("one", True)
    with recorded(report, "two"):
        raise RuntimeError("no")
    report.record("three", 3)
    described = read(tmp_path)
    assert [finding["ok"] for finding in described["findings"]] == [True, False]
    assert described["exceptions"] == ["two: RuntimeError: no"] and described["data"] == {"three": 3}
    assert described["status"] == "running" and "FAIL two: RuntimeError: no" in capsys.readouterr().out


def test_the_summary_names_what_failed(tmp_path, stage, capsys):
    findings = [{"what": "speed", "ok": False, "detail": "3 us"}, {"what": "sense", "ok": True, "detail": ""}]
    described = {"status": "failed", "findings": findings, "error": "late", "seconds": 1.5}
    (tmp_path / "x.json").write_text(json.dumps(described))
    assert not check.print_summary(tmp_path, [stage], Console(width=160))
    printed = capsys.readouterr().out
    assert "speed (3 us); late" in printed and "1 of 2" in printed


# -- what stages read ----------------------------------------------------------------------------------------


def test_captures_are_read_from_sglangs_log():
    log = (
        "[2026] Capture target verify CUDA graph end. bs=[1, 2], elapsed=3.25 s, mem usage=0.50 GB, avail mem=9 GB.\n"
        "[2026] Capture draft decode CUDA graph end. elapsed=1.00 s, mem usage=0.10 GB, avail mem=8 GB.\n"
    )
    assert server_checks.parse_captures(log) == [
        {"graphs": "target verify", "seconds": 3.25, "gib": 0.5},
        {"graphs": "draft decode", "seconds": 1.0, "gib": 0.1},
    ]


def test_outputs_differ_where_tokens_do_and_not_in_length():
    assert server_checks.first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert server_checks.first_difference([1, 2, 3], [1, 2]) is None


CASE = {
    "case": "greedy, 1 in flight", "temperature": 0, "holds": True, "says": "well", "num_tokens": 16, "num_best": 16,
    "regret": 0.0, "p": None, "steps": 8, "selected": 10, "accepted": 8,
}  # fmt: skip
LEDGER = dict.fromkeys(ledger.Ledger._fields, 0.0) | {"callers": {}, "waits": {}}
ROW = {
    "arm": "perfect", "error": None, "cases": [CASE | {"accepted": 10}], "tracebacks": 0, "not computed": 0,
    "not tested": False, "lost": None, "seconds": 1.0, "ledger": LEDGER,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"error": "gone"}, "gone"),
        ({"tracebacks": 1}, "1 tracebacks"),
        ({"not computed": 2}, "2 not computed"),
        ({"cases": [CASE | {"holds": False, "says": "wrong", "accepted": 10}]}, "greedy, 1 in flight: wrong"),
        ({"cases": [CASE]}, "0.80 of what was verified was accepted, not 0.95"),
        ({"not tested": True}, "nothing was tested"),
        ({"lost": 0.2}, "20% fewer drafts accepted than on the CPU platform"),
        ({"ledger": LEDGER | {"waits": {"cudaStreamSynchronize by x": 1.0}}}, "a step waits: cudaStreamSynchronize by x, 1.00"),
        ({"ledger": None}, "no decode step was counted"),
    ],
)
def test_a_dry_run_names_what_does_not_hold(change, fault):
    assert dry_run.find_faults(ROW) == []
    assert [fault in found for found in dry_run.find_faults(ROW | change)] == [True]


def test_flags_of_the_cpu_twin():
    flags = dry_run.on_cpu([*dry_run.ARMS["host plan"].flags, "--speculative-num-draft-tokens", "7"])
    assert "--model-path" in flags and flags[-2:] == ["--speculative-num-draft-tokens", "7"]
    for gone in ("cuda", "flashinfer", "--cuda-graph-bs-decode", "4", "--disable-prefill-cuda-graph", "host"):
        assert flags.count(gone) == (1 if gone == "4" else 0), gone  # 4 is the depth, too


def test_a_step_costs_what_the_ledger_counts():
    rows = [
        {"phase": "decode", "caller": caller, "what": what, "count": count}
        for caller, what, count in (
            ("runtime.worker", "steps", 2), ("runtime.texts", "aten::add.Tensor", 6), ("runtime.texts", "triton find", 2),
            ("runtime.worker", "graph launch", 4), ("", "in a graph: aten::mm", 20), ("", "fresh memory", 9),
            ("runtime.plan", "host plan of flashinfer", 2), ("runtime.plan", "copy cpu to cuda, pinned", 2),
            ("", "cudaMemcpyAsync pinned to device", 4), ("", "cudaEventRecord", 7),
            ("runtime.step", "copy cuda to cpu, pageable, blocking", 1), ("runtime.step", "wait: aten::nonzero", 1),
            ("", "cudaMemcpyAsync pageable to device", 2),
        )
    ] + [
        {"phase": "decode", "caller": "runtime.host_copy", "what": "cudaStreamSynchronize", "count": 0.3},
    ]  # fmt: skip
    found = ledger.summarise(rows, 2)
    assert (found.launches, found.graph_launches, found.in_graphs, found.host_plans) == (4, 2, 10, 1)
    assert (found.pinned_copies, found.pageable_copies) == (3, 1)
    assert found.syncs == pytest.approx(1.15)  # shown, and forgiven
    assert found.callers == {"runtime.texts": 4}
    assert set(found.waits) == {
        "copy cuda to cpu, pageable, blocking by runtime.step", "wait: aten::nonzero by runtime.step",
        "cudaMemcpyAsync pageable to device by the runtime",
    }  # fmt: skip


def test_wider_heads_are_the_same_function(tmp_path):
    from transformers import AutoModelForCausalLM

    dry_arms.widen_heads(dry_arms.TARGET, tmp_path / "wide")
    ids = torch.arange(40, 60)[None]
    small, wide = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        for folder in (dry_arms.TARGET, tmp_path / "wide")
    )
    assert wide.config.head_dim == 2 * small.config.head_dim
    with torch.no_grad():
        torch.testing.assert_close(wide(ids).logits, small(ids).logits, rtol=1e-4, atol=1e-4)


# -- scripts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", sorted(SCRIPTS.rglob("*.sh")), ids=lambda path: path.name)
def test_shell_scripts_parse(script):
    subprocess.run(["bash", "-n", script], check=True)
    assert os.access(script, os.X_OK)


def test_installing_a_bundle_unpacks_once_and_puts_the_checkout_first(tmp_path):
    bundle, target = tmp_path / "bundle", tmp_path / "site"
    bundle.mkdir()
    (tmp_path / "module.py").write_text("")
    with tarfile.open(bundle / "sglang-0-test.tar.xz", "w:xz") as tar:
        tar.add(tmp_path / "module.py", "module.py")
    command = ["bash", SCRIPTS / "install_bundle.sh", bundle, target]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def install() -> dict[str, str]:
        exports = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
        printed = subprocess.run(
            ["bash", "-euc", f"{exports}\nenv"], check=True, capture_output=True, text=True, env=environment
        ).stdout
        return dict(line.split("=", 1) for line in printed.splitlines() if "=" in line)

    first = install()
    assert first["PYTHONPATH"] == f"{REPOSITORY}:{target}"
    assert first["FLASHINFER_CUDA_ARCH_LIST"] == "9.0a"
    (target / "module.py").write_text("# kept")
    install()
    assert (target / "module.py").read_text() == "# kept"


@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
def test_make_lists_the_three_targets():
    listed = subprocess.run(["make", "help"], cwd=REPOSITORY, check=True, capture_output=True, text=True).stdout
    assert all(f"make {target} " in listed for target in ("gpu-bundle", "gpu-dry-run", "gpu-check"))
