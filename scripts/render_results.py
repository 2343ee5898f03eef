#!/usr/bin/env python
"""Render the tables of figures in README.md and docs/ from benchmarks/results/*.json.

    python scripts/render_results.py             # rewrites what is between the marks
    python scripts/render_results.py --check     # exits with 1 and says what differs

A table stands between `<!-- results: NAME -->` and `<!-- end -->`; `BLOCKS` has a function for every name.
"""

from __future__ import annotations

import copy
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tetris_sglang.bench.arms import REFERENCE
from tetris_sglang.bench.report import Cell, Check, build_cells, judge, read_arm
from tetris_sglang.bench.workloads import Load
from tetris_sglang.replay import GOAL, RULES

RESULTS = ROOT / "benchmarks" / "results"
PAGES = ("README.md", "docs/results.md", "docs/paper.md", "docs/replay.md")
_WITHIN = 0.1
"""Of what was measured: the simulator's goal."""
_BLOCK = re.compile(r"(<!-- results: (?P<name>[\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def draw_throughput(cell: Cell) -> str:
    return f"{cell.throughput}{', loses' if cell.throughput.loses else ''}"


class Comparison:
    """JSONs of `tetris-sglang bench`, each of other loads."""

    def __init__(self, *names: str) -> None:
        results = [json.loads((RESULTS / name).read_text()) for name in names]
        self.cells = build_cells([sample for result in results for sample in result["samples"]])
        self.described = {name: arm for result in results for name, arm in result["arms"].items()}
        self.arms = {name: read_arm(described) for name, described in self.described.items()}
        self.loads = list(dict.fromkeys(cell.load for cell in self.cells))

    def find(self, load, **wanted) -> list[Cell]:
        """Cells at a load whose arms have these attributes."""
        return [
            cell
            for cell in self.cells
            if cell.load == load
            and all(getattr(self.arms[cell.arm], name) == value for name, value in wanted.items())
        ]

    def best(self, load, **wanted) -> Cell | None:
        return max(self.find(load, **wanted), key=lambda cell: cell.throughput.median, default=None)

    def compare_at_every_k(self, load) -> Iterator[tuple[Cell, list[Cell]]]:
        """STANDALONE's cell and TETRIS's with 1, 2 and 3 extra drafts, as far as there are any."""
        for k in sorted({arm.k for arm in self.arms.values() if arm.family == "standalone"}):
            rivals = [self.best(load, family="tetris", k=k, extra=extra) for extra in (1, 2, 3)]
            yield self.best(load, family="standalone", k=k), rivals

    def setting(self, cell: Cell) -> str:
        arm = self.arms[cell.arm]
        if arm.capacity_tokens:
            return f"C = {arm.capacity_tokens} of {arm.num_steps} per request"
        return f"k = {arm.k}" + (f" of {arm.k + arm.extra}" if arm.extra else "")

    def while_all_in_flight(self) -> Comparison | None:
        """The same by that measure; None where it was not taken."""
        steady = copy.copy(self)
        steady.cells = [cell._replace(throughput=cell.steady) for cell in self.cells if cell.steady]
        return steady if steady.cells else None

    def summary(self, heading: str = "Output tokens/s") -> str:
        """Of the best of each kind, by load."""
        automatic = {(arm.draft, arm.continued) for arm in self.arms.values() if arm.family == "auto"}
        several = len({draft for draft, _ in automatic}) > 1
        kinds = {
            f"TETRIS, automatic{', chains go on (the default)' if continued else ''}"
            f"{f', {draft} draft' if several else ''}": {
                "family": "auto",
                "draft": draft,
                "continued": continued,
            }
            for draft, continued in sorted(automatic, reverse=True)
        } | {
            f"{title}{f', {draft} draft' if several else ''}": {"family": family, "draft": draft}
            for title, family in (
                ("SGLang's own, best k", "standalone"),
                ("TETRIS, best fixed capacity", "tetris"),
            )
            for draft in sorted({draft for draft, _ in automatic}, reverse=True)
        }
        rows = [["no speculation", *("1" for _ in self.loads)]]
        for title, wanted in kinds.items():
            found = [self.best(load, **wanted) for load in self.loads]
            if any(found):
                rows.append([title, *(self._describe(cell) for cell in found)])
        return table([heading, *map(str, self.loads)], rows)

    def _describe(self, cell: Cell | None) -> str:
        if cell is None:
            return ""
        text = draw_throughput(cell)
        if self.arms[cell.arm].family == "auto":
            return (
                f"{text}; {cell.verified_per_step - 1:.1f} verified, {cell.success_rate:.2f} accepted"
                if cell.success_rate
                else text
            )
        return f"{text}; {self.setting(cell)}"

    def verdicts(self) -> str:
        """What is expected, and where it fails."""
        lines = [
            f"- {'holds' if v.holds else '**fails**'}: {v.expectation} ({v.detail})\n"
            for v in judge(self.cells, self.described)
        ]
        return "".join(lines)


class Setting(NamedTuple):
    """A row of the overview."""

    title: str
    results: tuple[str, ...]
    """Of loads that several have, the last one's cells count."""
    draft: str = "standalone"

    def read(self) -> dict[Load, Comparison]:
        return {load: comparison for comparison in map(Comparison, self.results) for load in comparison.loads}


OVERVIEW = (
    Setting("greedy, 128 tokens", ("capacity_loads.json", "capacity_paired.json")),
    Setting("greedy, 256 tokens", ("capacity_long.json",)),
    Setting("temperature 1, 96 tokens", ("capacity_sampled.json",)),
    Setting("every other request at temperature 1, 96 tokens", ("capacity_unlike.json",)),
    Setting("EAGLE head, greedy, 96 tokens", ("heads_auto.json",), "eagle"),
    Setting("EAGLE3 head, greedy, 96 tokens", ("heads_auto.json",), "eagle3"),
    Setting("n-grams, greedy, 96 tokens", ("heads_auto.json", "ngrams_auto.json"), "ngram"),
    Setting("useless draft, greedy, 64 tokens", ("capacity_drafts.json",), "useless"),
    Setting("perfect draft, greedy, 64 tokens", ("capacity_drafts.json",), "perfect"),
)


def overview() -> str:
    """The default beside the best of SGLang's own speculation, by setting and load."""
    settings = {setting: setting.read() for setting in OVERVIEW}
    loads = sorted({load for found in settings.values() for load in found}, key=lambda load: load.concurrency)

    def draw(setting: Setting, load: Load) -> str:
        if (comparison := settings[setting].get(load)) is None:
            return ""
        ours = comparison.best(load, family="auto", draft=setting.draft)
        theirs = max(
            comparison.best(load, family=family, draft=setting.draft).throughput.median
            for family in ("standalone", "adaptive")
            if comparison.find(load, family=family, draft=setting.draft)
        )
        return f"{ours.throughput.median:.2f} ({theirs:.2f})"

    header = ["TETRIS (SGLang's best)", *(f"{load.concurrency} in flight" for load in loads)]
    return table(header, [[setting.title, *(draw(setting, load) for load in loads)] for setting in OVERVIEW])


def check_goals() -> dict[str, list[tuple[str, Check]]]:
    """What is expected of the automatic capacity, and the named cells of the overview that it is expected of."""
    checks: dict[str, list[tuple[str, Check]]] = {}
    for setting in OVERVIEW:
        for load, comparison in setting.read().items():
            for verdict in judge(comparison.find(load), comparison.described):
                for check in verdict.checks:
                    arm = comparison.arms[check.cell.arm]
                    if (arm.family, arm.draft) == ("auto", setting.draft):
                        named = f"{setting.title}, {load.concurrency} in flight: {check.detail}"
                        checks.setdefault(verdict.expectation, []).append((named, check))
    return checks


def goals() -> str:
    """How often the automatic capacity does what is expected of it."""
    rows = [
        [expectation, f"{sum(check.holds for _, check in found)} of {len(found)} cells"]
        for expectation, found in check_goals().items()
    ]
    return table(["Goal", "reached in"], rows)


def missed_goals() -> str:
    """The cells in which it does not."""
    return "\n".join(
        f"{expectation[0].upper()}{expectation[1:]}, missed in:\n\n"
        + "".join(f"- {named}\n" for named in missed)
        for expectation, found in check_goals().items()
        if (missed := [named for named, check in found if not check.holds])
    )


def capacity(*names: str) -> Callable[[], str]:
    """The automatic capacity beside the best of the others, and whether it reaches its goals."""

    def render() -> str:
        comparison = Comparison(*names)
        blocks = [comparison.summary()]
        if steady := comparison.while_all_in_flight():
            blocks.append(steady.summary("While all are in flight"))
        return "\n".join([*blocks, comparison.verdicts()])

    return render


def fixed() -> str:
    """TETRIS with one extra draft beside STANDALONE, both verifying k drafts per request, over the load."""
    comparison = Comparison("capacity_loads.json")
    pairs = {
        (base.load, comparison.arms[base.arm].k): (rivals[0], base)
        for load in comparison.loads
        for base, rivals in comparison.compare_at_every_k(load)
        # A comparison may go on another day.
        if base is not None and rivals[0] is not None
    }
    figures: dict[str, Callable[[Cell], str]] = {
        "Output tokens/s, TETRIS (STANDALONE)": lambda cell: f"{cell.throughput.median:.2f}",
        "Accepted / verified drafts": lambda cell: f"{cell.success_rate:.3f}",
    }
    blocks = []
    for title, draw in figures.items():
        rows = [
            [
                f"k = {k}",
                *(
                    f"{draw(pairs[load, k][0])} ({draw(pairs[load, k][1])})" if (load, k) in pairs else ""
                    for load in comparison.loads
                ),
            ]
            for k in sorted({k for _, k in pairs})
        ]
        blocks.append(table([title, *map(str, comparison.loads)], rows))
    return "\n".join(blocks)


def fairness() -> str:
    """What more fairness does to throughput and to the slowest requests, by load."""
    comparison = Comparison("fairness.json")
    arms = sorted((a for a in comparison.arms.values() if a.family == "auto"), key=lambda arm: arm.fairness)
    figures: dict[str, Callable[[Cell], str]] = {
        "output tokens/s": draw_throughput,
        "while all are in flight": lambda cell: str(cell.steady),
        "E2E p50": lambda cell: f"{cell.latencies['e2e_p50'].ratio:.2f}",
        "E2E p99": lambda cell: f"{cell.latencies['e2e_p99'].ratio:.2f}",
    }
    rows = [
        [f"{load.concurrency}", f"{arm.fairness:g}", *(draw(cell) for draw in figures.values())]
        for load in comparison.loads
        for arm in arms
        for cell in comparison.find(load, family="auto", fairness=arm.fairness)
    ]
    return table(["In flight", "fairness", *figures], rows)


def drafts(name: str) -> Callable[[], str]:
    """SGLang's own speculation and TETRIS with the same draft, per load."""

    def render() -> str:
        comparison = Comparison(name)
        blocks = []
        for load in comparison.loads:
            rows = [
                [
                    cell.arm,
                    draw_throughput(cell),
                    f"{cell.success_rate:.3f}",
                    f"{cell.accept_length:.2f}",
                    f"{cell.identical[0]}/{cell.identical[1]}",
                ]
                for cell in comparison.find(load)
                if cell.arm != REFERENCE
            ]
            header = [f"At {load}", "output tokens/s", "accepted / verified", "accept length", "same text"]
            blocks.append(table(header, rows))
        return "\n".join(blocks)

    return render


def paper_gain() -> str:
    """Throughput against STANDALONE at equal k, by k and extra drafts."""
    comparison = Comparison("serving.json")
    blocks = []
    for load in comparison.loads:
        rows = [
            [
                str(comparison.arms[base.arm].k),
                *(f"{c.throughput.median / base.throughput.median - 1:+.1%}" if c else "" for c in rivals),
            ]
            for base, rivals in comparison.compare_at_every_k(load)
        ]
        blocks.append(table([f"k, at {load}", "1 extra draft", "2", "3"], rows))
    return "\n".join(blocks)


def paper_success() -> str:
    """Success rates by k and extra drafts, at the largest load."""
    comparison = Comparison("serving.json")
    load = comparison.loads[-1]
    rows = [
        [
            str(comparison.arms[base.arm].k),
            f"{base.success_rate:.3f}",
            *(
                f"{c.success_rate:.3f} ({100 * (c.success_rate - base.success_rate):+.1f} points)"
                if c
                else ""
                for c in rivals
            ),
        ]
        for base, rivals in comparison.compare_at_every_k(load)
    ]
    return table([f"k, at {load}", "STANDALONE", "1 extra draft", "2", "3"], rows)


def paper_batch() -> str:
    """The best TETRIS setting against the best baseline, by load."""
    comparison = Comparison("serving.json")
    rows = []
    for load in comparison.loads:
        ours, theirs = (comparison.best(load, family=family) for family in ("tetris", "standalone"))
        gain = ours.throughput.median / max(theirs.throughput.median, 1.0) - 1
        rows.append(
            [
                str(load),
                f"{theirs.throughput.median:.2f} ({comparison.setting(theirs)})",
                f"{ours.throughput.median:.2f} ({comparison.setting(ours)})",
                f"{gain:+.1%}",
            ]
        )
    return table(["", "best STANDALONE", "best TETRIS", "TETRIS over the best other"], rows)


TETRIS = "tetris calibrated"


def read_replay() -> dict:
    return json.loads((RESULTS / "replay.json").read_text())


def replay_shares(batch_size: int | None) -> Callable[[], str]:
    """TETRIS's share of the oracle's success rate, by trace and capacity."""

    def render() -> str:
        rows, capacities = [], []
        for result in read_replay()["results"]:
            if result["batch_size"] != batch_size:
                continue
            found = [f for f in result["figures"] if f["rule"] == TETRIS]
            capacities = [f"k = {f['capacity_per_request']:g}" for f in found]
            shares = [f["oracle_share"] for f in found]
            rows.append(
                [
                    result["name"],
                    *(f"**{share:.1%}**" if share >= GOAL else f"{share:.1%}" for share in shares),
                ]
            )
        return table(["Share of the oracle's success rate", *capacities], rows)

    return render


def replay_rules(capacity: float) -> Callable[[], str]:
    """Success rate of every rule at one capacity, by trace, with what TETRIS's survivals promise."""

    def render() -> str:
        report, rows = read_replay(), []
        hindsight = {
            f["name"]: f["success_rate"] for f in report["hindsight"] if f["capacity_per_request"] == capacity
        }
        for result in report["results"]:
            if result["batch_size"] is not None:
                continue
            found = {f["rule"]: f for f in result["figures"] if f["capacity_per_request"] == capacity}
            name = result["name"]
            rates = [f"{found[rule]['success_rate']:.3f}" for rule in RULES]
            in_hindsight = f"{hindsight[name]:.3f}" if name in hindsight else ""
            rows.append([name, *rates, f"{found[TETRIS]['promised']:.3f}", in_hindsight])
        return table([f"k = {capacity:g}", *RULES, "promised", "scores alone, in hindsight"], rows)

    return render


def simulation() -> str:
    """Speeds that the simulator predicts, beside those of servers."""
    results = json.loads((RESULTS / "simulate_validation.json").read_text())
    predicted = [setting for setting in results["settings"] if setting["arm"] not in results["fitted"]]
    loads = sorted({setting["concurrency"] for setting in predicted})
    cells = {(setting["arm"], setting["concurrency"]): setting for setting in predicted}

    def draw(setting: dict) -> str:
        text = f"{setting['predicted_tokens_per_s']:.1f} ({setting['measured_tokens_per_s']:.1f})"
        return text if abs(setting["error"]) <= _WITHIN else f"**{text}**"

    rows = [
        [arm, *(draw(cells[arm, load]) for load in loads)]
        for arm in dict.fromkeys(setting["arm"] for setting in predicted)
    ]
    speeds, ratios = (
        sum(abs(setting[error]) <= _WITHIN for setting in predicted) for error in ("error", "ratio_error")
    )
    return (
        table(["Output tokens/s, predicted (measured)", *(f"{load} in flight" for load in loads)], rows)
        + f"\n{speeds} of {len(predicted)} speeds within {_WITHIN:.0%}; {ratios} of the gains over no speculation.\n"
    )


BLOCKS: dict[str, Callable[[], str]] = {
    "overview": overview,
    "goals": goals,
    "missed-goals": missed_goals,
    "capacity-long": capacity("capacity_long.json"),
    "capacity-drafts": capacity("capacity_drafts.json"),
    "capacity-sampled": capacity("capacity_sampled.json"),
    "capacity-unlike": capacity("capacity_unlike.json"),
    "capacity-loads": capacity("capacity_loads.json"),
    "capacity-paired": capacity("capacity_paired.json"),
    "fixed": fixed,
    "fairness": fairness,
    "heads": drafts("heads_auto.json"),
    "paper-gain": paper_gain,
    "paper-success": paper_success,
    "paper-batch": paper_batch,
    "simulation": simulation,
    "replay": replay_shares(None),
    "replay-64": replay_shares(64),
    "replay-rules": replay_rules(2.0),
}


def render(text: str) -> str:
    """The page with every block as the JSONs have it.

    Raises:
        KeyError: a block that nothing renders.
    """
    return _BLOCK.sub(lambda found: f"{found[1]}{BLOCKS[found['name']]()}{found[3]}", text)


def main(
    check: Annotated[
        bool, typer.Option("--check", help="Change nothing; exit with 1 where a page differs.")
    ] = False,
) -> None:
    """Rewrite the tables of figures from the JSONs."""
    stale = []
    for name in PAGES:
        path = ROOT / name
        text = path.read_text()
        rendered = render(text)
        if rendered != text:
            stale.append(name)
            if not check:
                path.write_text(rendered)
    print(
        "\n".join(f"{name}: {'differs from the JSONs' if check else 'rewritten'}" for name in stale)
        or "up to date"
    )
    raise typer.Exit(int(check and bool(stale)))


if __name__ == "__main__":
    typer.run(main)
