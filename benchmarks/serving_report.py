"""Tables and plots of bench_serving.py's samples, from its JSON alone.

    python benchmarks/serving_report.py benchmarks/results/serving.json

A sample is one run of one arm. Runs of one round (same group of live servers, temperature, concurrency and
repeat) were taken one after the other, so every arm is divided by the reference of its own round; a cell is
the median of those ratios with their smallest and largest value.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Annotated, Any, NamedTuple

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

REFERENCE = "none"
PHASES = ("draft", "select", "verify", "sample", "host")
PHASE_MEANING = "host: the scheduler's work between two steps, and prefill batches"

Sample = dict[str, Any]
Results = dict[str, Any]


class Ratio(NamedTuple):
    """Of an arm to the reference, over the rounds that have both."""

    median: float
    low: float
    high: float
    num_rounds: int

    @property
    def loses(self) -> bool:
        return round(self.median, 2) < 1  # as printed

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f}..{self.high:.2f})"


class Cell(NamedTuple):
    """One arm at one temperature and concurrency; None where the arm has no such figure."""

    arm: str
    temperature: float
    concurrency: int
    throughput: Ratio
    e2e_p50: Ratio
    e2e_p99: Ratio
    ttft_p50: Ratio
    accept_length: float | None
    success_rate: float | None
    verified_per_step: float | None
    rows_per_step: float | None
    identical: tuple[int, int] | None
    """Outputs equal to the reference's and outputs compared; None where sampling makes them differ."""
    phase_ms: dict[str, float]


def round_key(sample: Sample) -> tuple:
    """Runs with equal keys were taken together and may be divided by each other."""
    return sample["group"], sample["temperature"], sample["concurrency"], sample["repeat"]


def pair_ratios(samples: Sequence[Sample], arm: str, metric: Callable[[Sample], float]) -> list[float]:
    """metric(arm) / metric(reference) for every round that has both."""
    reference = {round_key(s): metric(s) for s in samples if s["arm"] == REFERENCE}
    return [
        metric(s) / reference[round_key(s)] for s in samples if s["arm"] == arm and round_key(s) in reference
    ]


def summarise_ratios(ratios: Sequence[float]) -> Ratio:
    """Raises ValueError without any ratio: such a cell must not be printed."""
    if not ratios:
        raise ValueError("no round has both the arm and the reference")
    return Ratio(median(ratios), min(ratios), max(ratios), len(ratios))


def build_cells(samples: Sequence[Sample]) -> list[Cell]:
    """Every (temperature, concurrency, arm) measured beside the reference, in the order of the samples."""
    cells = []
    for temperature in sorted({s["temperature"] for s in samples}):
        for concurrency in sorted({s["concurrency"] for s in samples}):
            here = [s for s in samples if (s["temperature"], s["concurrency"]) == (temperature, concurrency)]
            for arm in dict.fromkeys(s["arm"] for s in here):
                if pair_ratios(here, arm, lambda s: 1.0):
                    cells.append(_build_cell(here, arm, temperature, concurrency))
    return cells


def _build_cell(samples: Sequence[Sample], arm: str, temperature: float, concurrency: int) -> Cell:
    mine = [s for s in samples if s["arm"] == arm]

    def ratio(name: str) -> Ratio:
        return summarise_ratios(pair_ratios(samples, arm, lambda s: s[name]))

    steps, selected, accepted = (
        sum(s[name] for s in mine) for name in ("verify_steps", "selected", "accepted")
    )
    batch_steps, rows = (sum(s[name] for s in mine) for name in ("num_steps", "verified_rows"))
    timed = [s["phase_ms"] for s in mine if s["phase_ms"]]
    return Cell(
        arm,
        temperature,
        concurrency,
        ratio("output_tokens_per_s"),
        ratio("e2e_p50_ms"),
        ratio("e2e_p99_ms"),
        ratio("ttft_p50_ms"),
        accept_length=1 + accepted / steps if steps else None,
        success_rate=accepted / selected if selected else None,
        verified_per_step=1 + selected / steps if steps else None,
        rows_per_step=rows / batch_steps if batch_steps else None,
        identical=_count_identical(samples, arm) if temperature == 0 and arm != REFERENCE else None,
        phase_ms={phase: mean(t.get(phase, 0.0) for t in timed) for phase in PHASES} if timed else {},
    )


def _count_identical(samples: Sequence[Sample], arm: str) -> tuple[int, int]:
    reference = {round_key(s): s["output_hashes"] for s in samples if s["arm"] == REFERENCE}
    pairs = [
        pair
        for s in samples
        if s["arm"] == arm and round_key(s) in reference
        for pair in zip(s["output_hashes"], reference[round_key(s)], strict=True)
    ]
    return sum(mine == theirs for mine, theirs in pairs), len(pairs)


# -- what is expected of TETRIS ------------------------------------------------------------------------------


class Verdict(NamedTuple):
    expectation: str
    holds: bool
    detail: str
    """The cells where it fails, or how many it was checked on."""


def judge(cells: Sequence[Cell], arms: dict[str, dict]) -> list[Verdict]:
    """Check on medians what the method promises; what no cell can check is left out."""

    def key_of(cell: Cell) -> tuple:
        arm = arms[cell.arm]
        return cell.temperature, cell.concurrency, arm["k"], *_drafting(arm)

    standalone = {key_of(c): c for c in cells if _is(arms, c, "standalone")}
    tetris = [c for c in cells if _is(arms, c, "tetris")]
    matched = [(c, standalone[key]) for c in tetris if (key := key_of(c)) in standalone]
    concurrencies = sorted({c.concurrency for c in tetris})
    best = {
        concurrency: max(
            (c for c in tetris if c.concurrency == concurrency), key=lambda c: c.throughput.median
        )
        for concurrency in concurrencies
    }
    verdicts = [
        _verdict(
            "verification success rate above STANDALONE's at equal k, where requests share a capacity",
            [
                (
                    _name(t),
                    t.success_rate > s.success_rate,
                    f"{t.success_rate:.3f} against {s.success_rate:.3f}",
                )
                for t, s in matched
                if t.concurrency > 1
            ],
        ),
        _verdict(
            "throughput at least STANDALONE's at equal k",
            [
                (
                    _name(t),
                    t.throughput.median >= s.throughput.median,
                    f"{t.throughput.median:.2f} against {s.throughput.median:.2f}",
                )
                for t, s in matched
            ],
        ),
        _verdict(
            "throughput above no speculation with the best fixed capacity",
            [(_name(c), not c.throughput.loses, f"{c.throughput.median:.2f}") for c in best.values()],
        ),
        _verdict(
            "greedy outputs equal to those without speculation",
            [
                (_name(c), c.identical[0] == c.identical[1], f"{c.identical[0]} of {c.identical[1]}")
                for c in tetris
                if c.identical
            ],
        ),
    ]
    return [verdict for verdict in verdicts if verdict is not None]


def _drafting(arm: dict) -> tuple[str, int]:
    """Kind of draft and branches; results from before there were others have neither."""
    return arm.get("draft", "standalone"), arm.get("topk", 1)


def _is(arms: dict[str, dict], cell: Cell, family: str) -> bool:
    return arms[cell.arm]["family"] == family


def _name(cell: Cell) -> str:
    return f"{cell.arm} at {cell.concurrency}" + (
        f", temperature {cell.temperature:g}" if cell.temperature else ""
    )


def _verdict(expectation: str, checks: Iterable[tuple[str, bool, str]]) -> Verdict | None:
    checks = list(checks)
    failed = [f"{name}: {detail}" for name, holds, detail in checks if not holds]
    if not checks:
        return None
    return Verdict(expectation, not failed, "; ".join(failed) or f"in all {len(checks)} cells")


# -- tables --------------------------------------------------------------------------------------------------

_COLUMNS = (
    "arm",
    "output tok/s",
    "TTFT p50",
    "E2E p50",
    "E2E p99",
    "accept length",
    "success rate",
    "verified per step",
    "rows per pass",
    "same text",
)
# What fits into a terminal of 80 columns; the Markdown has them all.
_SHORT = {
    "arm": "arm",
    "output tok/s": "output tok/s",
    "E2E p50": "E2E\np50",
    "accept length": "accept\nlength",
    "success rate": "success\nrate",
    "verified per step": "verified\nper step",
    "same text": "same\ntext",
}
_CAPTION = (
    "Ratios to no speculation, median (smallest..largest) over paired repeats; throughput above 1 wins, "
    "latency below 1 wins. Accept length: tokens emitted per request and step, bonus included. Success rate: "
    "accepted of verified drafts. Verified per step: target rows per request and step, root included."
)


def _row(cell: Cell) -> list[str]:
    def number(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    throughput = f"{cell.throughput} loses" if cell.throughput.loses else str(cell.throughput)
    return [
        cell.arm,
        "1" if cell.arm == REFERENCE else throughput,
        *(
            "1" if cell.arm == REFERENCE else f"{r.median:.2f}"
            for r in (cell.ttft_p50, cell.e2e_p50, cell.e2e_p99)
        ),
        number(cell.accept_length, ".2f"),
        number(cell.success_rate, ".3f"),
        number(cell.verified_per_step, ".2f"),
        number(cell.rows_per_step, ".1f"),
        "" if cell.identical is None else f"{cell.identical[0]}/{cell.identical[1]}",
    ]


def _tables(cells: Sequence[Cell]) -> list[tuple[str, list[Cell]]]:
    """(title, rows) for every temperature and concurrency."""
    keys = dict.fromkeys((c.temperature, c.concurrency) for c in cells)
    return [
        (
            f"temperature {t:g}, concurrency {n}",
            [c for c in cells if (c.temperature, c.concurrency) == (t, n)],
        )
        for t, n in keys
    ]


def print_tables(results: Results, console: Console) -> None:
    cells = build_cells(results["samples"])
    for title, rows in _tables(cells):
        table = Table(
            title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False
        )
        for header in _SHORT.values():
            table.add_column(header, justify="left" if header == "arm" else "right", no_wrap=True)
        for cell in rows:
            is_reference = cell.arm == REFERENCE
            colour = "dim" if is_reference else "red" if cell.throughput.loses else "green"
            shown = dict(zip(_COLUMNS, _row(cell), strict=True))
            table.add_row(*(Text(shown[c], style=colour if c == "output tok/s" else "") for c in _SHORT))
        console.print(table)
    console.print(_CAPTION, style="dim")
    _print_phases(cells, console)
    for verdict in judge(cells, results["arms"]):
        mark = "[green]holds[/]" if verdict.holds else "[red]fails[/]"
        console.print(f"{mark}  {verdict.expectation}: {verdict.detail}", highlight=False)
    for arm, reason in results["unavailable"].items():
        console.print(f"[yellow]unavailable[/]  {arm}: {reason}", highlight=False)


def _print_phases(cells: Sequence[Cell], console: Console) -> None:
    timed = [c for c in cells if c.phase_ms]
    if not timed:
        return
    table = Table(
        title="where a step's time goes",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    for column in ("arm", "concurrency", *PHASES):
        table.add_column(column, justify="left" if column == "arm" else "right")
    for cell in timed:
        table.add_row(cell.arm, str(cell.concurrency), *(f"{share:.1%}" for share in _shares(cell)))
    console.print(table)
    console.print(PHASE_MEANING, style="dim")


def _shares(cell: Cell) -> list[float]:
    total = sum(cell.phase_ms.values())
    return [cell.phase_ms[phase] / total for phase in PHASES]


def render_markdown(results: Results) -> str:
    cells, lines = build_cells(results["samples"]), []

    def add_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        lines.append("| " + " | ".join(columns) + " |")
        lines.append("|" + "---|" * len(columns))
        lines.extend("| " + " | ".join(row) + " |" for row in rows)
        lines.append("")

    provenance, settings = results["provenance"], results["settings"]
    lines += [
        "# Serving comparison",
        "",
        (
            f"{_machine(provenance)}; SGLang {provenance['sglang']}, torch "
            f"{provenance['torch']}, tetris-sglang {provenance['tetris_sglang']} at {provenance['commit']}; "
            f"{provenance['date']}; target shape `{settings['shape']}`, {settings['dtype']}, "
            f"{settings['output_len']} output tokens, {settings['repeats']} interleaved repeats, "
            f"seed {settings['seed']}."
        ),
        "",
        f"    {provenance['command']}",
        "",
        _CAPTION,
        "",
    ]
    for title, rows in _tables(cells):
        lines += [f"## {title[0].upper()}{title[1:]}", ""]
        add_table(_COLUMNS, map(_row, rows))
    if timed := [c for c in cells if c.phase_ms]:
        lines += ["## Where a step's time goes", "", f"Shares of a step; {PHASE_MEANING}.", ""]
        add_table(
            ("arm", "concurrency", *PHASES),
            ([c.arm, str(c.concurrency), *(f"{share:.1%}" for share in _shares(c))] for c in timed),
        )
    lines += ["## Expectations", ""]
    lines += [
        f"- {'holds' if v.holds else '**fails**'}: {v.expectation} ({v.detail})"
        for v in judge(cells, results["arms"])
    ]
    lines += [f"- unavailable: {arm} ({reason})" for arm, reason in results["unavailable"].items()]
    return "\n".join(lines) + "\n"


def _machine(provenance: dict[str, Any]) -> str:
    parts = provenance.get("gpu"), provenance["cpu"], f"{provenance['cores']} cores"
    return ", ".join(part for part in parts if part)


# -- plot ----------------------------------------------------------------------------------------------------


def plot(results: Results, path: Path) -> None:
    """Throughput against concurrency, success rate against capacity, phase times; a row per temperature."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    cells, arms = build_cells(results["samples"]), results["arms"]
    temperatures = sorted({c.temperature for c in cells})
    figure, axes = pyplot.subplots(
        len(temperatures), 3, figsize=(17, 5 * len(temperatures)), squeeze=False, layout="constrained"
    )
    for (left, middle, right), temperature in zip(axes, temperatures, strict=True):
        here = [c for c in cells if c.temperature == temperature]
        _plot_throughput(left, [c for c in here if c.arm != REFERENCE], arms)
        _plot_success(middle, here, arms)
        _plot_phases(right, [c for c in here if c.phase_ms])
        left.set_title(f"output throughput, temperature {temperature:g}")
    provenance = results["provenance"]
    figure.suptitle(f"{_machine(provenance)}, shape {results['settings']['shape']}", fontsize=9)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


_STYLES = {
    "standalone": ("tab:orange", "s", "--"),
    "tetris": ("tab:blue", "o", "-"),
    "uniform": ("tab:green", "^", ":"),
    "random": ("tab:red", "x", ":"),
    "auto": ("tab:purple", "D", "-"),
}


def _plot_throughput(axis, cells: Sequence[Cell], arms: dict[str, dict]) -> None:
    names = list(dict.fromkeys(c.arm for c in cells))
    for index, arm in enumerate(names):
        mine = [c for c in cells if c.arm == arm]
        colour, marker, line = _STYLES[arms[arm]["family"]]
        ratios = [c.throughput for c in mine]
        spread = [[r.median - r.low for r in ratios], [r.high - r.median for r in ratios]]
        # Side by side within 10%, so that error bars do not hide each other.
        shift = 1 + 0.1 * (index / max(1, len(names) - 1) - 0.5)
        axis.errorbar(
            [c.concurrency * shift for c in mine],
            [r.median for r in ratios],
            yerr=spread,
            color=colour,
            alpha=0.35 + 0.65 * (index + 1) / len(names),
            marker=marker,
            linestyle=line,
            capsize=3,
            label=arm,
        )
    axis.axhline(1, color="black", linewidth=1)
    axis.set_xscale("log", base=2)
    ticks = sorted({c.concurrency for c in cells})
    axis.set_xticks(ticks, [str(tick) for tick in ticks])
    axis.set(xlabel="concurrency", ylabel="ratio to no speculation (median, smallest..largest)")
    axis.legend(fontsize=7)


def _plot_success(axis, cells: Sequence[Cell], arms: dict[str, dict]) -> None:
    concurrency = max(c.concurrency for c in cells)
    series: dict[tuple, list[tuple[int, float]]] = {}
    for c in cells:
        arm = arms[c.arm]
        if c.concurrency == concurrency and c.success_rate is not None and arm["k"]:
            key = arm["family"], arm["extra"], *_drafting(arm)
            series.setdefault(key, []).append((arm["k"], c.success_rate))
    for (family, extra, draft, topk), points in series.items():
        colour, marker, line = _STYLES[family]
        label = family if family == "standalone" else f"{family}, {extra} extra drafts"
        if draft != "standalone":
            label = label.replace("standalone", "SGLang's own") + f", {draft}"
        if topk > 1:
            label += f", topk {topk}"
        axis.plot(
            *zip(*sorted(points), strict=True), color=colour, marker=marker, linestyle=line, label=label
        )
    axis.set(
        xlabel="verified drafts per request (k)",
        ylabel="accepted / verified drafts",
        title=f"verification success rate, concurrency {concurrency}",
    )
    axis.set_xticks(sorted({k for points in series.values() for k, _ in points}))
    axis.legend(fontsize=7)


def _plot_phases(axis, cells: Sequence[Cell]) -> None:
    axis.set(ylabel="share of a step", title="where a step's time goes")
    if not cells:
        axis.text(0.5, 0.5, "not measured (--no-phase-times)", ha="center", transform=axis.transAxes)
        return
    labels = [f"{c.arm}\n@{c.concurrency}" for c in cells]
    bottoms = [0.0] * len(cells)
    for index, phase in enumerate(PHASES):
        heights = [_shares(c)[index] for c in cells]
        axis.bar(labels, heights, bottom=bottoms, label=phase)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    axis.tick_params(axis="x", labelrotation=90, labelsize=7)
    axis.legend(fontsize=7, loc="lower right", framealpha=0.9)


def write_reports(results: Results, json_path: Path) -> list[Path]:
    """Write the Markdown table and the plot beside the JSON; returns their paths."""
    markdown, picture = json_path.with_suffix(".md"), json_path.with_suffix(".png")
    markdown.write_text(render_markdown(results))
    plot(results, picture)
    return [markdown, picture]


def main(results: Annotated[Path, typer.Argument(help="What bench_serving.py wrote.")]) -> None:
    """Print the tables again and rewrite the Markdown and the plot."""
    loaded = json.loads(results.read_text())
    print_tables(loaded, Console())
    write_reports(loaded, results)


if __name__ == "__main__":
    typer.run(main)
