"""The drawing tells the truth: marks are the selection, numbers follow from them. The page says the same in a browser."""

from __future__ import annotations

import html
import re
import shutil
import subprocess
from io import StringIO

import pytest
from rich.console import Console

from tetris_sglang.tools.explain import Node, Request, count_uniform, draw, explain, list_chain, make_page, read_step, select

CAPACITIES = (0, 1, 12, 25, 60)
# A chain of three with a runner-up beside each of its first two; the target goes on through the second runner-up.
COMB = Request(
    "once",
    [
        Node("upon", 0.9, 0, 1, True),
        Node("a", 0.6, 1, 2, False),
        Node("the", 0.25, 1, 2, True),
        Node("time", 0.2, 2, 3, False),
        Node("there", 0.1, 0, 1, False),
    ],
    " hill",
)
SURE = Request("two and two", [Node("is", 0.95, 0, 1, True), Node("four", 0.9, 1, 2, True)], ".")


def print_out(call, *args, width=80, **options) -> str:
    """What a pipe sees: no colour, `width` columns."""
    output = StringIO()
    call(*args, console=Console(file=output, width=width, force_terminal=False), **options)
    return output.getvalue()


def test_the_likeliest_of_the_batch_are_marked():
    picture = print_out(draw, [COMB, SURE], 4)
    assert re.findall(r"([✓✗]) (\d+%)", picture) == [("✓", "90%"), ("✗", "60%"), ("✓", "95%"), ("✓", "90%")]
    assert "no speculation   2 tokens in a pass" in picture
    assert "uniform          5 tokens: 3 of 4 verified drafts accepted" in picture
    assert "TETRIS           5 tokens: 3 of 4 verified drafts accepted" in picture
    assert "TETRIS           6 tokens: 4 of 5" in print_out(draw, [COMB, SURE], 5)


def test_uniform_verifies_chains_alone():
    assert [node.text for node in list_chain(COMB)] == ["upon", "a", "time"]
    assert [count_uniform([COMB, SURE], capacity) for capacity in (0, 1, 2, 3, 4, 99)] == [0, 1, 2, 2, 3, 3]


def test_the_recorded_step_is_one():
    requests = read_step()
    assert len(requests) == 6
    for request in requests:
        survivals = [node.survival for node in request.nodes]
        assert survivals == sorted(survivals, reverse=True)
        for number, node in enumerate(request.nodes, start=1):
            parent = request.nodes[node.parent - 1] if node.parent else None
            assert node.parent < number and node.depth == (parent.depth + 1 if parent else 1)
            assert not node.is_right or parent is None or parent.is_right
        right = [node.depth for node in request.nodes if node.is_right]
        assert right == list(range(1, len(right) + 1))
        assert request.text and request.next


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_marks_and_totals_are_the_selection(capacity):
    requests = read_step()
    picture = print_out(explain, capacity)
    verified = [node for r, length in zip(requests, select(requests, capacity), strict=True) for node in r.nodes[:length]]
    num_right = sum(node.is_right for node in verified)
    assert (
        len(re.findall(r"✓ <?\d+%", picture)) == num_right
        and len(re.findall(r"✗ <?\d+%", picture)) == len(verified) - num_right
    )
    assert f"TETRIS         {6 + num_right:3} tokens: {num_right} of {len(verified)} verified drafts" in picture


def test_default_fits_a_terminal_and_has_no_colour_codes_in_a_pipe():
    picture = print_out(explain, width=100)
    assert max(len(line.rstrip()) for line in picture.splitlines()) <= 100
    assert "\x1b" not in picture


def test_ascii_output_needs_no_other_character():
    class AsciiFile(StringIO):
        encoding = "ascii"

    output = AsciiFile()
    explain(console=Console(file=output, width=80))
    output.getvalue().encode("ascii")
    assert re.search(r"\+ \d+%", output.getvalue())


def test_a_negative_capacity_is_refused():
    with pytest.raises(ValueError, match="capacity_tokens must be at least 0, got -1"):
        explain(-1)


def test_no_text_ends_the_pages_script(monkeypatch, tmp_path):
    path = tmp_path / "page.html"
    assert str(path) in print_out(explain, html=path, width=1000)
    page = path.read_text()
    assert page == make_page(12) and page.count("</script>") == 1 and "/*STEP*/" not in page
    assert not re.search(r"(?:src|href)=", page), "it needs nothing else"


@pytest.mark.parametrize("capacity, scheme", [*((capacity, "light") for capacity in CAPACITIES), (CAPACITIES[-1], "dark")])
def test_the_page_says_the_same_in_a_browser(capacity, scheme, tmp_path):
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no Chromium: scripts/install_test_tools.sh installs it on Debian")
    page = tmp_path / "page.html"
    explain(html=page, console=Console(file=StringIO()))
    # Headless Chromium prints what the console said, and then the page as its script has left it.
    done = subprocess.run(
        [
            *(chromium, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"),
            *("--disable-component-update", "--disable-sync", f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom"),
            *("--enable-logging=stderr", "--v=0", "--virtual-time-budget=5000"),
            *(["--force-dark-mode", "--blink-settings=preferredColorScheme=0"] if scheme == "dark" else []),
            f"{page.as_uri()}#capacity={capacity}",
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "CONSOLE" not in done.stderr, done.stderr
    requests = read_step()
    rows = re.findall(r"<tr>(.*?)</tr>", done.stdout.split('id="step"')[1].split("</table>")[0])[1:]
    found = [sorted(re.findall(r'class="node (right|wrong)"', row)) for row in rows]
    expected = [
        sorted("right" if node.is_right else "wrong" for node in request.nodes[:length])
        for request, length in zip(requests, select(requests, capacity), strict=True)
    ]
    assert found == expected
    totals = [int(n) for n in re.findall(r"<b>(\d+) tokens</b>", done.stdout)]
    num_right = sum(row.count("right") for row in expected)
    assert totals == [6, 6 + count_uniform(requests, capacity), 6 + num_right]
    texts = [html.unescape(text) for text in re.findall(r"<bdi>(.*?)</bdi>", done.stdout)]
    assert texts == [request.text.replace("\n", "⏎") for request in requests]
