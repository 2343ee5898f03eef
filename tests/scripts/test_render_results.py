"""What README, docs and the pages of the results say in figures is what the JSONs say."""

import importlib.util
import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.tools.bench.samples import make_sample, make_settings
from tetris_sglang.tools.bench.arms import Arm

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def pages():
    spec = importlib.util.spec_from_file_location("render_results", ROOT / "scripts" / "render_results.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pages_agree_with_the_jsons(pages):
    for path, text in pages.render_all().items():
        assert path.read_text() == text, f"{path} differs: run scripts/render_results.py"


def test_every_block_is_on_some_page(pages):
    text = "".join((ROOT / name).read_text() for name in pages.PAGES)
    assert {found["name"] for found in pages._BLOCK.finditer(text)} == pages.BLOCKS.keys()
    assert text.count("<!-- results: ") == text.count("<!-- end -->") == len(pages.BLOCKS)


def test_every_file_of_the_results_is_linked_and_says_where_it_is_from(pages):
    assert {path.name for path in pages.RESULTS.iterdir()} <= {"README.md", *pages.QUESTIONS}
    for folder in pages.RESULTS.iterdir():
        if not folder.is_dir():
            continue
        page = (folder / "README.md").read_text()
        linked = set(re.findall(r"\]\((\S+?)\)", page))
        assert {path.name for path in folder.iterdir()} - {"README.md"} <= linked
        for path in folder.glob("*.json"):
            provenance = json.loads(path.read_text())["provenance"]
            assert {"commit", "date", "command", "cores"} <= provenance.keys()
            assert provenance.get("gpu") or provenance.get("cpu")


def test_links_of_the_docs_lead_somewhere():
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "benchmarks").rglob("*.md")):
        for link in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
            assert link.startswith("http") or (page.parent / link).exists(), f"{page}: {link}"


def make_results(speeds, **where):
    return {
        "provenance": {"commit": "abc", "date": "today", "command": "bench", "cpu": "some", "cores": 2},
        "settings": asdict(make_settings()),
        "arms": {arm.name: asdict(arm) for arm in speeds},
        "unavailable": {},
        "samples": [make_sample(arm.name, tokens_per_s=speed, **where) for arm, speed in speeds.items()],
    }


@pytest.fixture
def measured(pages, tmp_path, monkeypatch):
    """Two comparisons of the default, one of which loses, as bench would have written them."""
    monkeypatch.setattr(pages, "RESULTS", tmp_path)
    folder = tmp_path / "real-text"
    folder.mkdir()
    head = {
        Arm("none"): 10.0,
        Arm("auto", num_steps=6): 13.0,
        Arm("sglang", 3): 12.0,
        Arm("sglang", 1): 11.0,
    }
    (folder / "a.json").write_text(json.dumps(make_results(head, concurrency=4)))
    ngram = {Arm("none"): 10.0, Arm("control"): 10.2, Arm("auto", num_steps=12, draft="ngram"): 9.7}
    (folder / "b.json").write_text(json.dumps(make_results(ngram)))
    return pages


def test_the_overview_holds_the_default_against_the_best_of_the_others(measured):
    lines = measured.overview("real-text")().splitlines()
    assert lines[0] == "| draft | prompts | temperature | 1 in flight | 4 in flight |"
    assert lines[2:] == [
        "| eagle3 | sharegpt | 0 |  | 1.30 (1.20) |",
        "| ngram | sharegpt | 0 | 0.97 loses |  |",
        "",
        "Measured at commit abc, on some.",
    ]


def test_a_cell_below_its_floor_is_named(measured):
    text = measured.never_slower()
    assert text.startswith("At least 0.98 of no speculation in 1 of 2 cells.")
    assert "- ngram, sharegpt, temperature 0, concurrency 1: 0.97" in text and text.endswith(
        "server without speculation 1.02\n"
    )
    assert "over the loads, ngram on sharegpt: 0.970; a second server without speculation 1.020." in text
    assert "0.97" in measured.render("<!-- results: never-slower -->\nold\n<!-- end -->\n")
    page = measured.render_folder("real-text")
    assert "](a.json)" in page and "**fails**: automatic capacity at least 0.98 of no speculation" in page
    assert "[real-text](real-text/README.md)" in measured.render_index()


def test_each_feature_stands_beside_the_default(pages, tmp_path, monkeypatch):
    monkeypatch.setattr(pages, "RESULTS", tmp_path)
    (tmp_path / "ablations").mkdir()
    speeds = {
        Arm("none"): 10.0,
        Arm("auto", num_steps=6): 13.0,
        Arm("auto", num_steps=6, num_draft_tokens=7): 14.0,
        Arm("auto", num_steps=6, variant="calibration=off"): 11.0,
    }
    (tmp_path / "ablations" / "sharegpt.json").write_text(json.dumps(make_results(speeds)))
    rules = {Arm("none"): 10.0, Arm("auto", num_steps=6, variant="acceptance=block"): 9.0}
    counted = make_results(rules, temperature=0.7, selected=8, accepted=2, verify_steps=4)
    (tmp_path / "ablations" / "sharegpt-rules.json").write_text(json.dumps(counted))
    assert pages.ablations().splitlines()[2:] == [
        "| eagle3 | as by default | 1.30 |",
        "| eagle3 | without runners-up | 1.40 |",
        "| eagle3 | without calibration and matches | 1.10 |",
    ]
    # What wins is no default for that.
    assert pages.overview("ablations")().splitlines()[2:] == [
        "| eagle3 | sharegpt | 0 | 1.30 |",
        "",
        "Measured at commit abc, on some.",
    ]
    assert pages.acceptance_speed().splitlines()[2:] == ["| 0.7 | 1 | block | chains | 0.90 | 0.25 | 1.50 |"]


def test_the_small_steps_stand_side_by_side(pages, tmp_path, monkeypatch):
    monkeypatch.setattr(pages, "RESULTS", tmp_path)
    (tmp_path / "kernels").mkdir()
    results = [
        {"rows": rows, "vocab": vocab, "step_us": {"median": rows + vocab}, "multinomial_us": {"median": rows}}
        for rows in (1, 16, 64)
        for vocab in (5, 49_152)
    ]
    (tmp_path / "kernels" / "noise.json").write_text(json.dumps({"results": results}))
    assert pages.small_steps().splitlines()[2:] == [
        "| a row of each is drawn from 49,152 tokens, sampled requests alone | 49153 | 49168 | 49216 |",
        "| the same by `torch.multinomial` | 1 | 16 | 64 |",
    ]


def test_what_was_not_measured_is_said(pages, tmp_path, monkeypatch):
    monkeypatch.setattr(pages, "RESULTS", tmp_path)
    for name, block in pages.BLOCKS.items():
        # The suite's servers are what its flags say.
        assert name == "servers" or block() == pages.NOT_MEASURED, name


def test_an_unknown_block_is_refused(pages):
    with pytest.raises(KeyError, match="nothing"):
        pages.render("<!-- results: nothing -->\n<!-- end -->\n")


def test_trained_drafts_stand_with_what_they_cost_and_gave(pages, tmp_path, monkeypatch):
    monkeypatch.setattr(pages, "RESULTS", tmp_path)
    assert pages.trainings() == pages.trained_speed() == pages.NOT_MEASURED
    (tmp_path / "drafts").mkdir()

    def accepted(*means):
        return {temperature: {"overall": {"mean": mean}} for temperature, mean in zip(("0", "0.7", "1"), means, strict=True)}

    metrics = {"parameters": 7.94e6, "steps": 200, "seconds": 630, "peak_memory_gb": 2.51}
    metrics["provenance"] = make_results({})["provenance"]
    learnt = metrics | {"before": accepted(0.7, 0.6, 0.5), "after": accepted(0.91, 0.6, 0.55)}
    (tmp_path / "drafts" / "head-code-training.json").write_text(json.dumps(learnt))
    (tmp_path / "drafts" / "dflash-training.json").write_text(
        json.dumps(metrics | {"before": None, "after": accepted(0.2, 0.1, 0)})
    )
    cost = "7.9 | 200 | 10 | 2.5"
    assert pages.trainings().splitlines()[2:] == [
        f"| the shipped head, on Python's functions | {cost} | 0.70 \u2192 0.91 | 0.60 \u2192 0.60 | 0.50 \u2192 0.55 |",
        f"| a new DFlash draft | {cost} | \u2192 0.20 | \u2192 0.10 | \u2192 0.00 |",
    ]
    speeds = {Arm("none"): 10.0, Arm("auto", num_steps=6, draft="standalone"): 12.0, Arm("sglang", 1, draft="standalone"): 9.0}
    (tmp_path / "drafts" / "pruned-steered.json").write_text(json.dumps(make_results(speeds)))
    own = Arm("sglang", 1, draft="standalone").name
    rows = [
        "| the same, 80 steps more, steered | sharegpt | 0 | TETRIS | 1.20 |",
        f"| the same, 80 steps more, steered | sharegpt | 0 | {own} | 0.90 |",
    ]
    assert pages.trained_speed().splitlines()[2:] == rows
    # By kind, two standalone drafts would be one row.
    assert "\n".join(rows) in pages.render_folder("drafts")
