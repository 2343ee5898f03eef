"""Tables of a comparison, from its JSON alone.

Runs of one round (same group of live servers, temperature, load and repeat) were taken one after the other or in turns, so
every arm is divided by the reference of its own round; a cell is the median of those ratios with their smallest and largest
value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import mean, median
from typing import Any, NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tetris_sglang.tools.bench.arms import CONTROL, REFERENCE, Arm
from tetris_sglang.tools.bench.results import Results, Sample, round_key
from tetris_sglang.tools.bench.workloads import EQUAL, Load, find_length_range
from tetris_sglang.tools.load import DraftCounts

PHASES = ("draft", "select", "verify", "sample", "host")
PHASE_MEANING = "host: the scheduler's work between two steps, and prefill batches"
LATENCIES = ("ttft_p50", "ttft_p99", "tpot_p50", "tpot_p99", "e2e_p50", "e2e_p99")


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
        if self.num_rounds == 1:
            return f"{self.median:.2f}"
        return f"{self.median:.2f} ({self.low:.2f}..{self.high:.2f})"


class Latency(NamedTuple):
    """Medians over the repeats."""

    ms: float
    ratio: float
    """To the reference."""

    def __str__(self) -> str:
        return f"{self.ms:.0f} ({self.ratio:.2f})" if self.ms >= 100 else f"{self.ms:.3g} ({self.ratio:.2f})"


class Cell(NamedTuple):
    """One arm at one temperature and load; None where the arm has no such figure."""

    arm: str
    temperature: float
    load: Load
    throughput: Ratio
    steady: Ratio | None
    """Throughput while all of the load's requests were in flight."""
    tokens_per_s: float
    per_user_tokens_per_s: float
    latencies: dict[str, Latency]
    """By LATENCIES."""
    accept_length: float | None
    success_rate: float | None
    verified_per_step: float | None
    rows_per_step: float | None
    cached_share: float | None
    """Of the prompts' tokens, those found in the prefix cache."""
    identical: tuple[int, int] | None
    """Outputs equal to the reference's and outputs compared; None where sampling makes them differ."""
    phase_ms: dict[str, float]

    @property
    def phase_shares(self) -> dict[str, float]:
        total = sum(self.phase_ms.values())
        return {phase: ms / total for phase, ms in self.phase_ms.items()}


def pair_ratios(samples: Sequence[Sample], arm: str, metric: Callable[[Sample], float]) -> list[float]:
    """metric(arm) / metric(reference) for every round that has both."""
    reference = {round_key(s): metric(s) for s in samples if s["arm"] == REFERENCE}
    return [metric(s) / reference[round_key(s)] for s in samples if s["arm"] == arm and round_key(s) in reference]


def summarise_ratios(ratios: Sequence[float]) -> Ratio:
    """Raises ValueError without any ratio: such a cell must not be printed."""
    if not ratios:
        raise ValueError("no round has both the arm and the reference")
    return Ratio(median(ratios), min(ratios), max(ratios), len(ratios))


def build_cells(samples: Sequence[Sample]) -> list[Cell]:
    """Every (temperature, load, arm) measured beside the reference, in the order of the samples."""
    cells = []
    for temperature in sorted({s["temperature"] for s in samples}):
        for load in sorted({Load.of(s) for s in samples}, key=lambda load: load.value):
            here = [s for s in samples if (s["temperature"], Load.of(s)) == (temperature, load)]
            for arm in dict.fromkeys(s["arm"] for s in here):
                if pair_ratios(here, arm, lambda s: 1.0):
                    cells.append(_build_cell(here, arm, temperature, load))
    return cells


def _build_cell(samples: Sequence[Sample], arm: str, temperature: float, load: Load) -> Cell:
    mine = [s for s in samples if s["arm"] == arm]

    def total(name: str) -> float:
        return sum(s[name] for s in mine)

    def latency(name: str) -> Latency:
        ratios = pair_ratios(samples, arm, lambda s: s[f"{name}_ms"])
        return Latency(median(s[f"{name}_ms"] for s in mine), summarise_ratios(ratios).median)

    drafts = DraftCounts(*map(total, ("verify_steps", "selected", "accepted")))
    batch_steps, prompt_tokens = total("num_steps"), total("prompt_tokens")
    # Arrivals at random times have no steady part.
    steady = [s for s in samples if s["steady_tokens_per_s"]]
    steady_ratios = pair_ratios(steady, arm, lambda s: s["steady_tokens_per_s"])
    timed = [s["phase_ms"] for s in mine if s["phase_ms"]]
    return Cell(
        arm,
        temperature,
        load,
        summarise_ratios(pair_ratios(samples, arm, lambda s: s["output_tokens_per_s"])),
        summarise_ratios(steady_ratios) if steady_ratios else None,
        tokens_per_s=median(s["output_tokens_per_s"] for s in mine),
        per_user_tokens_per_s=median(s["per_user_tokens_per_s"] for s in mine),
        latencies={name: latency(name) for name in LATENCIES},
        accept_length=drafts.accept_length,
        success_rate=drafts.success_rate,
        verified_per_step=drafts.verified_per_step,
        rows_per_step=total("verified_rows") / batch_steps if batch_steps else None,
        cached_share=total("cached_tokens") / prompt_tokens if prompt_tokens else None,
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


class Check(NamedTuple):
    """Whether one cell is as expected."""

    cell: Cell
    holds: bool
    rank: float
    """The smaller, the worse."""
    detail: str

    @property
    def name(self) -> str:
        temperature = f", temperature {self.cell.temperature:g}" if self.cell.temperature else ""
        return f"{self.cell.arm} at {self.cell.load}{temperature}"


_MAX_NAMED = 4
"""Failing cells of a verdict; the tables have them all."""


class Verdict(NamedTuple):
    expectation: str
    checks: tuple[Check, ...]
    """Of the cells that it could be checked on; at least one."""

    @property
    def failed(self) -> list[Check]:
        """The worst first."""
        return sorted((check for check in self.checks if not check.holds), key=lambda check: check.rank)

    @property
    def holds(self) -> bool:
        return not self.failed

    @property
    def detail(self) -> str:
        """The cells where it fails, or how many it was checked on."""
        failed, num_cells = self.failed, len(self.checks)
        if not failed:
            return f"in all {num_cells} cells" if num_cells > 1 else "in the one cell"
        named = "; ".join(f"{check.name}: {check.detail}" for check in failed[:_MAX_NAMED])
        if len(failed) > _MAX_NAMED:
            return f"in {len(failed)} of {num_cells} cells, the worst: {named}"
        return named


def judge(cells: Sequence[Cell], described: dict[str, dict]) -> list[Verdict]:
    """Check on medians what the method promises; what no cell can check is left out.

    Args:
        described: the JSON's arms, by name.
    """
    arms = {name: Arm(**arm) for name, arm in described.items()}

    def of_family(family: str) -> list[Cell]:
        return [c for c in cells if arms[c.arm].family == family]

    def place_of(cell: Cell) -> tuple:
        arm = arms[cell.arm]
        return cell.temperature, cell.load, arm.draft, arm.topk

    own = {(place_of(c), arms[c.arm].k): c for c in of_family("sglang")}
    full = {(place_of(c), arms[c.arm].k): c for c in of_family("full")}
    fixed = of_family("tetris")
    # Where every draft is wrong there is nothing to choose.
    tetris = [c for c in fixed if arms[c.arm].draft != "useless"]
    at_equal_k, of_equal_drafts = [], []
    for cell in tetris:
        arm = arms[cell.arm]
        if other := own.get((place_of(cell), arm.k)):
            at_equal_k.append((cell, other))
        drafted = arm.num_steps if arm.capacity_tokens else arm.k + arm.extra
        if other := full.get((place_of(cell), drafted)):
            of_equal_drafts.append((cell, other))
    by_place: dict[tuple, list[Cell]] = {}
    for cell in tetris:
        by_place.setdefault(place_of(cell), []).append(cell)
    best = [max(cells, key=lambda c: c.throughput.median) for cells in by_place.values()]

    def has_equal_texts(cell: Cell) -> bool:
        """All, or as large a share as without TETRIS, where a near-tie may fall otherwise, too."""
        same, total = cell.identical
        others = [c.identical for c in (*of_family(CONTROL), *of_family("sglang")) if place_of(c)[:2] == place_of(cell)[:2]]
        yardsticks = [found for found in others if found] or [(1, 1)]
        return all(same * other_total >= other_same * total for other_same, other_total in yardsticks)

    def compare_auto(share: float, families: Sequence[str], of: Sequence[Cell], measure: str = "throughput") -> list[Check]:
        """Of each automatic cell, whether it reaches this share of the best of its rivals and no speculation."""
        compared = []
        for cell in of:
            rivals = [c for family in families for c in of_family(family) if place_of(c)[:3] == place_of(cell)[:3]]
            ratios = [getattr(c, measure) for c in (cell, *rivals)]
            if None in ratios:
                continue
            reached = ratios[0].median / max([1.0, *(ratio.median for ratio in ratios[1:])])
            compared.append(Check(cell, round(reached, 2) >= share, reached, f"{reached:.2f}"))
        return compared

    others = [family for family in ("sglang", "adaptive") if of_family(family)]
    auto = of_family("auto")
    loaded = [c for c in auto if (c.load.concurrency or 0) >= 16 and arms[c.arm].draft != "useless"]
    verdicts = [
        _verdict("automatic capacity at least 0.98 of no speculation", compare_auto(0.98, (), auto)),
        _verdict(
            "automatic capacity at least 0.98 of the best fixed one, and of no speculation",
            compare_auto(0.98, ("tetris", "sglang"), auto) if fixed or own else [],
        ),
        _verdict(
            "automatic capacity at least 1.15 of the best arm without TETRIS, from 16 requests on",
            compare_auto(1.15, others, loaded) if others else [],
        ),
        _verdict(
            "the same while all requests are in flight",
            compare_auto(1.15, others, loaded, measure="steady") if others else [],
        ),
        _verdict(
            "verification success rate above that of SGLang's own at equal k, where requests share a capacity",
            [
                Check(
                    t,
                    t.success_rate > s.success_rate,
                    t.success_rate - s.success_rate,
                    f"{t.success_rate:.3f} against {s.success_rate:.3f}",
                )
                for t, s in at_equal_k
                # Where nothing was verified there is no rate.
                if t.load.concurrency != 1 and None not in (t.success_rate, s.success_rate)
            ],
        ),
        _verdict("throughput at least that of SGLang's own at equal k", _compare_throughput(at_equal_k)),
        _verdict(
            "throughput at least that of the same drafts verified in full",
            _compare_throughput(of_equal_drafts),
        ),
        _verdict(
            "throughput above no speculation with the best fixed capacity",
            [Check(c, not c.throughput.loses, c.throughput.median, f"{c.throughput.median:.2f}") for c in best],
        ),
        _verdict(
            "greedy outputs equal to those without speculation",
            [
                Check(
                    c,
                    has_equal_texts(c),
                    c.identical[0] / c.identical[1],
                    f"{c.identical[0]} of {c.identical[1]}",
                )
                for c in (*fixed, *auto)
                if c.identical
            ],
        ),
    ]
    return [verdict for verdict in verdicts if verdict is not None]


def _compare_throughput(pairs: Iterable[tuple[Cell, Cell]]) -> list[Check]:
    return [
        Check(
            mine,
            mine.throughput.median >= other.throughput.median,
            mine.throughput.median / other.throughput.median,
            f"{mine.throughput.median:.2f} against {other.throughput.median:.2f}",
        )
        for mine, other in pairs
    ]


def _verdict(expectation: str, checks: Sequence[Check]) -> Verdict | None:
    """None where there is nothing to check."""
    return Verdict(expectation, tuple(checks)) if checks else None


# -- tables --------------------------------------------------------------------------------------------------

_COLUMNS = (
    "arm",
    "output tok/s, ratio",
    "steady, ratio",
    "output tok/s",
    "per-user tok/s",
    "accept length",
    "success rate",
    "verified per step",
    "rows per pass",
    "cached prompt",
    "same text",
)
# What fits into a terminal of 80 columns; the Markdown has them all.
_SHORT = {
    "arm": "arm",
    "output tok/s, ratio": "output tok/s",
    "accept length": "accept\nlength",
    "success rate": "success\nrate",
    "verified per step": "verified\nper step",
    "same text": "same\ntext",
}
_CAPTION = (
    "Ratios to no speculation, median (smallest..largest) over paired repeats; throughput above 1 wins, "
    "latency below 1 wins. Steady: output tok/s while as many requests are in flight as the load says, without the run's end. "
    "Per-user tok/s: a request's output over its whole latency, the median request. Accept length: "
    "tokens emitted per request and step, bonus included. Success rate: accepted of verified drafts. Verified per step: "
    "target rows per request and step, root included."
)
_LATENCY_CAPTION = "Latency in milliseconds, median over the repeats (ratio to no speculation)"


def _row(cell: Cell) -> list[str]:
    def number(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    throughput = f"{cell.throughput} loses" if cell.throughput.loses else str(cell.throughput)
    return [
        cell.arm,
        "1" if cell.arm == REFERENCE else throughput,
        "" if cell.steady is None else "1" if cell.arm == REFERENCE else str(cell.steady),
        f"{cell.tokens_per_s:.1f}",
        f"{cell.per_user_tokens_per_s:.1f}",
        number(cell.accept_length, ".2f"),
        number(cell.success_rate, ".3f"),
        number(cell.verified_per_step, ".2f"),
        number(cell.rows_per_step, ".1f"),
        number(cell.cached_share, ".0%"),
        "" if cell.identical is None else f"{cell.identical[0]}/{cell.identical[1]}",
    ]


def add_best(cells: Sequence[Cell], arms: dict[str, dict]) -> list[Cell]:
    """The cells of one place, and of each speculation of SGLang's own the k with most throughput once more."""
    candidates: dict[str, list[Cell]] = {}
    for cell in cells:
        arm = Arm(**arms[cell.arm])
        if arm.family == "sglang":
            candidates.setdefault(cell.arm.rpartition(" k=")[0], []).append(cell)
    best = [(title, max(rivals, key=lambda c: c.throughput.median)) for title, rivals in candidates.items() if len(rivals) > 1]
    return [*cells, *(c._replace(arm=f"best of {title}: k={arms[c.arm]['k']}") for title, c in best)]


def _tables(cells: Sequence[Cell], arms: dict[str, dict]) -> list[tuple[str, list[Cell]]]:
    """(title, rows) for every temperature and load."""
    keys = dict.fromkeys((c.temperature, c.load) for c in cells)
    return [
        (
            f"temperature {temperature:g}, {load}",
            add_best([c for c in cells if (c.temperature, c.load) == (temperature, load)], arms),
        )
        for temperature, load in keys
    ]


def print_tables(results: Results, console: Console) -> None:
    cells = build_cells(results["samples"])
    for title, rows in _tables(cells, results["arms"]):
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
        for header in _SHORT.values():
            table.add_column(header, justify="left" if header == "arm" else "right", no_wrap=True)
        for cell in rows:
            is_reference = cell.arm == REFERENCE
            colour = "dim" if is_reference else "red" if cell.throughput.loses else "green"
            shown = dict(zip(_COLUMNS, _row(cell), strict=True))
            table.add_row(*(Text(shown[c], style=colour if c == "output tok/s, ratio" else "") for c in _SHORT))
        console.print(table)
    console.print(_CAPTION, style="dim")
    _print_phases(cells, console)
    for verdict in judge(cells, results["arms"]):
        mark = "[green]holds[/]" if verdict.holds else "[red]fails[/]"
        console.print(f"{mark}  {verdict.expectation}: {verdict.detail}", highlight=False)
    for arm, reason in find_unmeasured(results).items():
        console.print(Text.assemble(("not measured", "yellow"), f"  {arm}: {reason}"))


def _print_phases(cells: Sequence[Cell], console: Console) -> None:
    timed = [c for c in cells if c.phase_ms]
    if not timed:
        return
    table = Table(
        title="milliseconds per step",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    for column in ("arm", timed[0].load.unit, *PHASES):
        table.add_column(column, justify="left" if column == "arm" else "right", no_wrap=True)
    for cell in timed:
        table.add_row(cell.arm, f"{cell.load.value:g}", *(f"{cell.phase_ms[p]:.3g}" for p in PHASES))
    console.print(table)
    console.print(PHASE_MEANING, style="dim")


def _phase_row(cell: Cell) -> list[str]:
    shares = cell.phase_shares
    return [cell.arm, str(cell.load), *(f"{cell.phase_ms[p]:.3g} ({shares[p]:.1%})" for p in PHASES)]


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
            f"{describe_machine(provenance)}; SGLang {provenance['sglang']}, torch "
            f"{provenance['torch']}, tetris-sglang {provenance['tetris_sglang']} at {provenance['commit']}; "
            f"{provenance['date']}; {describe_target(settings)}, {settings['dtype']}, "
            f"{describe_workload(settings)}, {describe_lengths(settings)}, "
            f"{describe_repeats(settings)}, seed {settings['seed']}."
        ),
        "",
        f"    {provenance['command']}",
        "",
        _CAPTION,
        "",
    ]
    for title, rows in _tables(cells, results["arms"]):
        lines += [f"## {title[0].upper()}{title[1:]}", ""]
        columns = list(zip(_COLUMNS, *map(_row, rows), strict=True))
        # What no arm has was not measured.
        header, *shown = zip(*(column for column in columns if any(column[1:])), strict=True)
        add_table(header, shown)
        lines += [_LATENCY_CAPTION + ":", ""]
        add_table(
            ("arm", *(name.upper().replace("_P", " p") for name in LATENCIES)),
            ([c.arm, *(str(c.latencies[name]) for name in LATENCIES)] for c in rows),
        )
    if timed := [c for c in cells if c.phase_ms]:
        lines += ["## Where a step's time goes", ""]
        lines += [f"Milliseconds per step and share of it; {PHASE_MEANING}.", ""]
        add_table(("arm", "load", *PHASES), map(_phase_row, timed))
    lines += ["## Expectations", ""]
    lines += [f"- {'holds' if v.holds else '**fails**'}: {v.expectation} ({v.detail})" for v in judge(cells, results["arms"])]
    lines += [f"- not measured: {arm} ({reason})" for arm, reason in find_unmeasured(results).items()]
    return "\n".join(lines) + "\n"


def find_unmeasured(results: dict[str, Any]) -> dict[str, str]:
    """Arms without a sample, and why: what they lack, or that the run has not come to them (`--resume` goes on)."""
    measured = {sample["arm"] for sample in results["samples"]}
    interrupted = {arm: "the run ended before it" for arm in results["arms"] if arm not in measured}
    return interrupted | results["unavailable"]


def describe_machine(provenance: dict[str, Any]) -> str:
    parts = provenance["gpu"], provenance["cpu"], f"{provenance['cores']} cores"
    return ", ".join(part for part in parts if part)


def describe_target(settings: dict[str, Any]) -> str:
    return f"target `{settings['model_path'] or 'SmolLM2-135M-Instruct'}`"


def describe_workload(settings: dict[str, Any]) -> str:
    prompts = settings["dataset_name"] or settings["workload"]
    return f"{prompts} prompts" + (", Poisson arrivals" if settings["request_rate"] else "")


def describe_lengths(settings: dict[str, Any]) -> str:
    length = settings["output_len"]
    if settings["lengths"] == EQUAL:
        return f"{length} output tokens"
    if settings["dataset_name"]:
        return f"at most {length} output tokens"
    low, high = find_length_range(length)
    return f"at most {low} to {high} output tokens, drawn per prompt"


def describe_repeats(settings: dict[str, Any]) -> str:
    repeats = f"{settings['repeats']} repeat" + ("s" if settings["repeats"] > 1 else "")
    if settings["live_servers"] == 1:
        return f"{repeats}, one arm after the other"
    if turn := settings["turn_seconds"]:
        return f"{repeats}, arms interleaved in turns of {turn:g} s"
    return f"{repeats}, arms interleaved"
