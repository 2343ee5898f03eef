"""What README and docs say in figures is what the JSONs say."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def pages():
    spec = importlib.util.spec_from_file_location("render_results", ROOT / "scripts" / "render_results.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pages_agree_with_the_jsons(pages):
    for name in pages.PAGES:
        text = (ROOT / name).read_text()
        assert pages.render(text) == text, f"{name} differs: run scripts/render_results.py"


def test_every_block_is_on_some_page(pages):
    text = "".join((ROOT / name).read_text() for name in pages.PAGES)
    assert {found["name"] for found in pages._BLOCK.finditer(text)} == pages.BLOCKS.keys()
    assert text.count("<!-- results: ") == text.count("<!-- end -->") == len(pages.BLOCKS)


def test_overview_holds_the_default_against_the_best_of_the_others(pages):
    samples = json.loads((pages.RESULTS / "heads_auto.json").read_text())["samples"]
    at_16 = [s for s in samples if s["concurrency"] == 16]
    reference = {s["group"]: s["output_tokens_per_s"] for s in at_16 if s["arm"] == "none"}
    ratios = {
        s["arm"]: s["output_tokens_per_s"] / reference[s["group"]]
        for s in at_16
        if "eagle3" in s["arm"].lower()
    }
    ours = ratios.pop("auto eagle3 D=6+6")
    assert len(ratios) == 3 and "adaptive eagle3" in ratios
    row = next(line for line in pages.overview().splitlines() if line.startswith("| EAGLE3"))
    assert f"| {ours:.2f} ({max(ratios.values()):.2f}) |" in row


def test_goals_name_every_cell_that_misses_them(pages):
    lines = pages.goals().splitlines()
    aim = "at least 1.15 of the best arm without TETRIS, from 16 requests on"
    goal = next(line for line in lines if aim in line)
    found, of = map(int, re.findall(r"\d+", goal.split("|")[2]))
    _, _, after = pages.missed_goals().partition(f"{aim}, missed in:\n\n")
    missed = after.split("\n\n")[0].strip().split("\n")
    judged = [s for s in pages.OVERVIEW if s.draft not in ("useless", "perfect")]
    assert of == sum(load.concurrency >= 16 for setting in judged for load in setting.read()) > 0
    assert len(missed) == of - found
    assert all(float(cell.rsplit(": ")[1]) < 1.15 for cell in missed)


def test_a_changed_figure_is_noticed(pages):
    text = (ROOT / "docs" / "paper.md").read_text()
    assert " points)" in text
    changed = text.replace(" points)", "0 points)", 1)
    assert pages.render(changed) == text


def test_an_unknown_block_is_refused(pages):
    with pytest.raises(KeyError, match="nothing"):
        pages.render("<!-- results: nothing -->\n<!-- end -->\n")
