"""What README and docs say in figures is what the JSONs say."""

import importlib.util
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


def test_a_changed_figure_is_noticed(pages):
    text = (ROOT / "docs" / "paper.md").read_text()
    assert " points)" in text
    changed = text.replace(" points)", "0 points)", 1)
    assert pages.render(changed) == text


def test_an_unknown_block_is_refused(pages):
    with pytest.raises(KeyError, match="nothing"):
        pages.render("<!-- results: nothing -->\n<!-- end -->\n")
