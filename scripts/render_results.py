#!/usr/bin/env python
"""Render the tables of figures in README.md and docs/, and the pages of benchmarks/results, from the JSONs there.

    python scripts/render_results.py             # rewrites what differs
    python scripts/render_results.py --check     # exits with 1 and says what differs

Each folder of benchmarks/results answers one question: its JSONs, the Markdown and the pictures made from them, and a page
README.md that links all of them. In other pages a table stands between `<!-- results: NAME -->` and `<!-- end -->`;
`BLOCKS` has a function for every name.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Annotated, NamedTuple

import typer

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tetris_sglang.tools.bench.arms import CONTROL, Arm
from tetris_sglang.tools.bench.report import Cell, build_cells, judge
from tetris_sglang.tools.bench.workloads import Load
from tetris_sglang.tools.replay import GOAL, RULES

RESULTS = ROOT / "benchmarks" / "results"
PAGES = (
    "README.md",
    *(
        f"docs/{name}.md"
        for name in ("acceptance", "capacity", "compatibility", "distill", "lessons", "results", "paper", "replay")
    ),
)
QUESTIONS = {
    "real-text": "Is serving faster with TETRIS, on a real model and real prompts, with answers of unlike lengths?",
    "equal-lengths": "The same with all answers of one length, as a control: such requests flatter no speculation.",
    "ablations": "What is each feature worth on real text?",
    "drafts": "What does a draft gain by distillation, on another domain, and by being steered?",
    "paper": "The paper's tables: k verified, extra drafts, batch.",
    "replay": "How good is the choice of drafts on recorded steps, up to an oracle?",
    "acceptance": "How far is each rule of acceptance from what is possible?",
    "models": "Which families of models have been served, and which are refused?",
    "gpu": "On a GPU: is it faster on real text, at the cost of an 8B model?",
    "gpu-planned-on-host": "The same while attention was planned on the host, which waited for the lengths.",
    "kernels": "What do the small steps of TETRIS cost?",
}
"""Folder -> what it answers."""
NOT_MEASURED = "Not measured yet.\n"
COMPARES_RULES = "rules"
"""How files end that compare rules of acceptance."""
VARIANTS = {
    "": "as by default",
    "calibration=off": "without calibration and matches",
    "shared-texts=on": "with other requests' texts, too",
}
CHAINS = "without runners-up"
TRAINED = {
    "head-code": "the shipped head, on Python's functions",
    "pruned": "four of the target's layers",
    "pruned-longer": "the same, 80 steps more",
    "pruned-steered": "the same, 80 steps more, steered",
    "dflash": "a new DFlash draft",
}
"""What scripts/train_drafts.sh makes."""
LEAST = 0.98
SMALL_STEPS: Sequence[tuple[str, str, str, dict[str, int]]] = (
    ("planning", "step", "depth and capacity are chosen, and learnt from the last step", {}),
    ("matches", "step", "texts are written down and searched, matches scored", {}),
    ("calibration", "step", "probabilities are calibrated, and learnt from what was accepted", {}),
    ("selection", "step", "Algorithm 1 over six drafts of each", {"max_draft": 6}),
    ("noise", "step", "a row of each is drawn from 49,152 tokens, sampled requests alone", {"vocab": 49_152}),
    ("noise", "multinomial", "the same by `torch.multinomial`", {"vocab": 49_152}),
)
"""benchmarks/bench_NAME.py, its figure, what that is, and which of its results are meant."""
SMALL_STEP_SIZES = (1, 16, 64)
_BLOCK = re.compile(r"(<!-- results: (?P<name>[\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


class Comparison(NamedTuple):
    """One JSON of `tetris-sglang bench`."""

    path: Path
    results: dict
    cells: list[Cell]
    arms: dict[str, Arm]

    @property
    def workload(self) -> str:
        return self.results["settings"]["workload"]

    def find(self, temperature: float, load: Load, draft: str, *families: str) -> list[Cell]:
        return [
            cell
            for cell in self.cells
            if (cell.temperature, cell.load) == (temperature, load)
            and self.arms[cell.arm].draft == draft
            and self.arms[cell.arm].family in families
        ]


def read_comparisons(folder: str) -> list[Comparison]:
    """Those of a folder, in the order of their names."""
    found = []
    for path in sorted((RESULTS / folder).glob("*.json")):
        results = json.loads(path.read_text())
        if "samples" in results:
            arms = {name: Arm(**described) for name, described in results["arms"].items()}
            found.append(Comparison(path, results, build_cells(results["samples"]), arms))
    return found


def best(cells: Sequence[Cell]) -> Cell | None:
    return max(cells, key=lambda cell: cell.throughput.median, default=None)


class Row(NamedTuple):
    """The default beside the best of SGLang's own with the same draft."""

    draft: str
    workload: str
    temperature: float
    load: Load
    ours: Cell
    theirs: Cell | None
    control: Cell | None
    """A second server without speculation."""


def is_default(arm: Arm) -> bool:
    """Whether nothing is set that an ablation sets."""
    return arm.family == "auto" and not arm.variant and not arm.num_draft_tokens


def compare_default(folder: str) -> Iterator[Row]:
    for comparison in read_comparisons(folder):
        places = dict.fromkeys((cell.temperature, cell.load) for cell in comparison.cells)
        drafts = dict.fromkeys(arm.draft for arm in comparison.arms.values() if arm.family == "auto")
        for draft in drafts:
            for temperature, load in places:
                autos = comparison.find(temperature, load, draft, "auto")
                ours = best([cell for cell in autos if is_default(comparison.arms[cell.arm])])
                theirs = best(comparison.find(temperature, load, draft, "sglang", "adaptive"))
                control = best(comparison.find(temperature, load, Arm(CONTROL).draft, CONTROL))
                if ours is not None:
                    yield Row(draft, comparison.workload, temperature, load, ours, theirs, control)


def overview(folder: str) -> Callable[[], str]:
    """Output tokens per second over no speculation, by draft, prompts and temperature."""

    def render() -> str:
        rows = list(compare_default(folder))
        if not rows:
            return NOT_MEASURED
        loads = sorted({row.load for row in rows}, key=lambda load: load.value)
        cells: dict[tuple, dict[Load, str]] = {}
        for row in rows:
            theirs = f" ({row.theirs.throughput.median:.2f})" if row.theirs else ""
            ours = f"{row.ours.throughput.median:.2f}"
            text = f"{ours} loses{theirs}" if row.ours.throughput.loses else f"{ours}{theirs}"
            cells.setdefault((row.draft, row.workload, row.temperature), {})[row.load] = text
        return (
            table(
                ["draft", "prompts", "temperature", *name_loads(loads)],
                [
                    [draft, workload, f"{temperature:g}", *(found.get(load, "") for load in loads)]
                    for (draft, workload, temperature), found in sorted(cells.items())
                ],
            )
            + f"\n{name_origin(folder)}\n"
        )

    return render


def name_origin(folder: str) -> str:
    made = [comparison.results["provenance"] for comparison in read_comparisons(folder)]
    commits, machines = ({each[name] for each in made} for name in ("commit", "cpu"))
    return f"Measured at commit{'s' * (len(commits) > 1)} {', '.join(sorted(commits))}, on {' and '.join(sorted(machines))}."


def never_slower() -> str:
    """Where the default is below what it must never be below, and how far up it goes."""
    rows = list(compare_default("real-text"))
    if not rows:
        return NOT_MEASURED
    failing = [row for row in rows if round(row.ours.throughput.median, 2) < LEAST]
    lines = [
        f"- {row.draft}, {row.workload}, temperature {row.temperature:g}, {row.load}: {row.ours.throughput}"
        + (f"; a second server without speculation {row.control.throughput}\n" if row.control else "\n")
        for row in failing
    ]
    held = f"At least {LEAST} of no speculation in {len(rows) - len(failing)} of {len(rows)} cells.\n"
    controlled: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.control:
            controlled.setdefault((row.draft, row.workload), []).append(row)
    for (draft, workload), found in controlled.items():
        ours = fmean(row.ours.throughput.median for row in found)
        control = fmean(row.control.throughput.median for row in found)
        held += f"\nOn average over the loads, {draft} on {workload}: {ours:.3f}; "
        held += f"a second server without speculation {control:.3f}.\n"
    return held + ("\nBelow it:\n\n" + "".join(lines) if lines else "")


def paper(draw: Callable[[Cell, Cell], str], title: str) -> Callable[[], str]:
    """Cells of TETRIS with 1, 2 and 3 extra drafts against SGLang's own at equal k, by load."""

    def render() -> str:
        blocks = []
        for comparison in read_comparisons("paper"):
            for load in find_loads(comparison):
                rows = []
                for k in sorted({arm.k for arm in comparison.arms.values() if arm.family == "sglang"}):
                    own = comparison.find(0.0, load, "eagle3", "sglang", "tetris")
                    base = next(c for c in own if comparison.arms[c.arm] == _plain_arm(comparison, k))
                    rivals = {comparison.arms[c.arm].extra: c for c in own if comparison.arms[c.arm].k == k}
                    texts = [draw(rivals[e], base) if e in rivals else "" for e in (1, 2, 3)]
                    rows.append([str(k), *texts])
                blocks.append(table([f"{title}, {load}: k", "1 extra draft", "2", "3"], rows))
        return "\n".join(blocks) or NOT_MEASURED

    return render


def paper_best() -> str:
    """The best of TETRIS's arms against the best of SGLang's own, by load."""
    rows = []
    for comparison in read_comparisons("paper"):
        for load in find_loads(comparison):
            theirs, ours = (best(comparison.find(0.0, load, "eagle3", family)) for family in ("sglang", "tetris"))
            described = (f"{cell.arm}: {cell.throughput}" for cell in (theirs, ours))
            rows.append([str(load), *described, _gain(ours, theirs)])
    header = ["throughput over no speculation", "best of SGLang's own", "best of TETRIS", "gain"]
    return table(header, rows) if rows else NOT_MEASURED


def _plain_arm(comparison: Comparison, k: int) -> Arm:
    return next(arm for arm in comparison.arms.values() if (arm.family, arm.k) == ("sglang", k))


def _gain(ours: Cell, theirs: Cell) -> str:
    return f"{ours.throughput.median / theirs.throughput.median - 1:+.1%}"


def _points(ours: Cell, theirs: Cell) -> str:
    return f"{ours.success_rate:.3f} ({100 * (ours.success_rate - theirs.success_rate):+.1f} points)"


TETRIS = "tetris calibrated"


def read_data(name: str) -> dict | None:
    """A JSON of RESULTS; None: not measured yet."""
    path = RESULTS / name
    return json.loads(path.read_text()) if path.exists() else None


def replay_shares(batch_size: int | None) -> Callable[[], str]:
    """TETRIS's share of the oracle's success rate, by trace and capacity."""

    def render() -> str:
        if (report := read_data("replay/replay.json")) is None:
            return NOT_MEASURED
        rows, capacities = [], []
        for result in report["results"]:
            if result["batch_size"] != batch_size:
                continue
            found = [f for f in result["figures"] if f["rule"] == TETRIS]
            capacities = [f"k = {f['capacity_per_request']:g}" for f in found]
            shares = [f["oracle_share"] for f in found]
            texts = (f"**{share:.1%}**" if share >= GOAL else f"{share:.1%}" for share in shares)
            rows.append([result["name"], *texts])
        return table(["Share of the oracle's success rate", *capacities], rows)

    return render


def replay_rules(capacity: float) -> Callable[[], str]:
    """Success rate of every rule at one capacity, by trace, with what TETRIS's survivals promise."""

    def render() -> str:
        if (report := read_data("replay/replay.json")) is None:
            return NOT_MEASURED
        rows = []
        for result in report["results"]:
            if result["batch_size"] is not None:
                continue
            found = {f["rule"]: f for f in result["figures"] if f["capacity_per_request"] == capacity}
            rates = [f"{found[rule]['success_rate']:.3f}" for rule in RULES]
            rows.append([result["name"], *rates, f"{found[TETRIS]['promised']:.3f}"])
        return table([f"k = {capacity:g}", *RULES, "promised"], rows)

    return render


def automatic() -> str:
    """What benchmarks/bench_auto.py found: gains over plain decoding."""
    if (found := read_data("replay/auto.json")) is None:
        return NOT_MEASURED
    rows = [
        [
            row["draft"],
            str(row["batch_size"]),
            f"{row['gain']:.2f}",
            f"{row['gain_least']:.2f}",
            f"{max(1.0, row['best_fixed_gain']):.2f}",
        ]
        for row in found["rows"]
    ]
    return table(["draft", "requests", "automatic, mean", "worst server", "best fixed plan"], rows)


def acceptance_rates() -> str:
    """What benchmarks/bench_acceptance_rules.py found, one position at a time."""
    if (found := read_data("acceptance/rates.json")) is None:
        return NOT_MEASURED
    rates = found["rates"]
    temperatures = next(iter(rates.values()))
    rows = [[rule, *(f"{rate[temperature]:.3f}" for temperature in temperatures)] for rule, rate in rates.items()]
    return table(["next token is a draft's", *(f"temperature {temperature}" for temperature in temperatures)], rows)


def acceptance_served() -> str:
    """What scripts/measure_rules.py counted."""
    if (found := read_data("acceptance/served.json")) is None:
        return NOT_MEASURED
    rows = [
        [
            f"{row['temperature']:g}",
            f"{row['capacity']:g}",
            "any" if row["temperature"] == 0 else row["rule"],
            row["shape"],
            f"{row['success_rate']:.3f} \u00b1 {row['standard_error']:.3f}",
            f"{row['emitted_per_request']:.2f}",
        ]
        for row in found["rows"]
    ]
    header = ["temperature", "verified per request", "rule", "shape", "accepted of verified", "emitted per request and step"]
    return table(header, rows)


def acceptance_speed() -> str:
    """Throughput and acceptance of every rule and shape by load, from `ablations/*rules.json`."""
    rows = []
    for comparison in read_comparisons("ablations"):
        if not comparison.path.stem.endswith(COMPARES_RULES):
            continue
        names = list(comparison.arms)
        for cell in sorted(comparison.cells, key=lambda cell: (cell.temperature, cell.load.value, names.index(cell.arm))):
            arm = comparison.arms[cell.arm]
            if arm.family != "auto":
                continue
            rule = arm.variant.removeprefix("acceptance=") or "coupled"
            shape = "chains" if arm.num_draft_tokens or rule == "block" else "chains with runners-up"
            texts = ["" if figure is None else f"{figure:.2f}" for figure in (cell.success_rate, cell.accept_length)]
            rows.append([f"{cell.temperature:g}", f"{cell.load.value:g}", rule, shape, str(cell.throughput), *texts])
    header = ["temperature", "in flight", "rule", "shape", "throughput", "accepted of verified", "emitted per request and step"]
    return table(header, rows) if rows else NOT_MEASURED


def ablations() -> str:
    """Throughput of the default with one feature switched, by load, from the other files of `ablations`."""
    rows, loads = [], []
    for comparison in read_comparisons("ablations"):
        if comparison.path.stem.endswith(COMPARES_RULES):
            continue
        loads = find_loads(comparison)
        for name, arm in comparison.arms.items():
            if arm.family == "auto":
                what = CHAINS if arm.num_draft_tokens else VARIANTS[arm.variant]
                rows.append([arm.draft, what, *find_throughputs(comparison, name, 0.0, loads)])
    return table(["draft", "", *name_loads(loads)], rows) if rows else NOT_MEASURED


def trainings() -> str:
    """What `distill` found on texts that were kept back, before and after."""
    rows = []
    for name, what in TRAINED.items():
        if (found := read_data(f"drafts/{name}-training.json")) is None:
            continue
        before, after = found["before"], found["after"]
        accepted = [
            (f"{before[temperature]['overall']['mean']:.2f} " if before else "")
            + f"\u2192 {after[temperature]['overall']['mean']:.2f}"
            for temperature in sorted(after)
        ]
        costs = [f"{found['steps']}", f"{found['seconds'] / 60:.0f}", f"{found['peak_memory_gb']:.1f}"]
        rows.append([what, f"{found['parameters'] / 1e6:.1f}", *costs, *accepted])
    header = ["draft", "M parameters", "steps", "minutes", "GB", "temperature 0", "0.7", "1"]
    return table(header, rows) if rows else NOT_MEASURED


def trained_speed() -> str:
    """Throughput with these drafts over no speculation, automatic capacity and others, by load."""
    rows, loads = [], []
    names = list(TRAINED)
    for comparison in sorted(read_comparisons("drafts"), key=lambda found: names.index(found.path.stem)):
        loads = find_loads(comparison)
        temperatures = dict.fromkeys(cell.temperature for cell in comparison.cells)
        for temperature, (name, arm) in product(temperatures, comparison.arms.items()):
            if arm.family != "none":
                served = "TETRIS" if arm.family == "auto" else name
                throughputs = find_throughputs(comparison, name, temperature, loads)
                rows.append([TRAINED[comparison.path.stem], comparison.workload, f"{temperature:g}", served, *throughputs])
    return table(["draft", "prompts", "temperature", "served by", *name_loads(loads)], rows) if rows else NOT_MEASURED


def find_loads(comparison: Comparison) -> list[Load]:
    return list(dict.fromkeys(cell.load for cell in comparison.cells))


def name_loads(loads: Sequence[Load]) -> list[str]:
    return [f"{load.value:g} in flight" for load in loads]


def find_throughputs(comparison: Comparison, arm: str, temperature: float, loads: Sequence[Load]) -> list[str]:
    """Of an arm by load; empty where it was not measured."""
    found = {cell.load: cell for cell in comparison.cells if (cell.arm, cell.temperature) == (arm, temperature)}
    return [f"{found[load].throughput.median:.2f}" if load in found else "" for load in loads]


def small_steps() -> str:
    """What a step takes of each part that benchmarks/bench_PART.py timed."""
    rows = []
    for name, figure, what, of_real_model in SMALL_STEPS:
        if (found := read_data(f"kernels/{name}.json")) is None:
            continue
        costs = {
            result.get("batch", result.get("rows")): result[f"{figure}_us"]["median"]
            for result in found["results"]
            if of_real_model.items() <= result.items()
        }
        rows.append([what, *(f"{costs[size]:.0f}" for size in SMALL_STEP_SIZES)])
    header = ["what", *(f"{size} request{'s' * (size > 1)}" for size in SMALL_STEP_SIZES)]
    return table(header, rows) if rows else NOT_MEASURED


def families() -> str:
    """What scripts/verify_models.py found."""
    if (report := read_data("models/families.json")) is None:
        return NOT_MEASURED
    found = report["families"]
    held = [f"`{entry['architecture']}`" for entry in found.values() if "success_rate" in entry and "failed" not in entry]
    refused: dict[str, list[str]] = {}
    for entry in found.values():
        if "refused" in entry:
            reason = entry["refused"].partition(" (")[0]
            reason = "recurrent layers" if reason.startswith("layers of type") else reason
            refused.setdefault(reason, []).append(f"`{entry['architecture']}`")
    failed = [f"`{entry.get('architecture', name)}`: {entry['failed']}" for name, entry in found.items() if "failed" in entry]
    rows = [["served", ", ".join(held)], *([f"refused: {why}", ", ".join(names)] for why, names in refused.items())]
    return table(["", "architectures"], rows + [["not served by SGLang on a CPU", "; ".join(failed)]] * bool(failed))


def servers() -> str:
    """Those that the test suite starts, from the flags that it starts them with."""
    from tests.e2e.conftest import ARGUMENTS, COMMON, DRAFT, PAIR, TARGET, TETRIS

    drafts = {str(DRAFT): "a smaller model", str(TARGET): "the target itself", str(PAIR / "eagle"): "an EAGLE head"}
    drafts |= {str(PAIR / "eagle3"): "an EAGLE-3 head", "OTHER_VOCABULARY": "a model with a vocabulary of its own"}
    drafts |= {str(PAIR / "dflash"): "a DFlash draft", "ngram": "n-grams", "mtp": "prediction layers"}
    everywhere = {*_pair_flags(COMMON), *_pair_flags(TETRIS)} - {("--model-path", str(TARGET))}
    rows = []
    for name, arguments in ARGUMENTS.items():
        flags = {flag: value for flag, value in _pair_flags(arguments) if (flag, value) not in everywhere}
        if name != "plain":
            draft = drafts.get(flags.pop("--speculative-draft-model-path", name), name)
            flags.pop("--model-path", None)
            shown = [f"{flag} {value}".strip().removeprefix("--").removeprefix("speculative-") for flag, value in flags.items()]
            rows.append([f"`{name}`", draft, ", ".join(f"`{text}`" for text in shown)])
    return table(["server", "draft", "flags, `speculative-` left out"], rows)


def _pair_flags(arguments: Sequence[str]) -> list[tuple[str, str]]:
    """Each flag with its value, "" where it has none."""
    following = [*arguments[1:], "--"]
    return [
        (flag, "" if value.startswith("--") else value)
        for flag, value in zip(arguments, following, strict=True)
        if flag.startswith("--")
    ]


BLOCKS: dict[str, Callable[[], str]] = {
    "real-text": overview("real-text"),
    "never-slower": never_slower,
    "equal-lengths": overview("equal-lengths"),
    "paper-best": paper_best,
    "paper-gain": paper(_gain, "throughput"),
    "paper-success": paper(_points, "success rate"),
    "replay": replay_shares(None),
    "replay-64": replay_shares(64),
    "replay-rules": replay_rules(2.0),
    "automatic": automatic,
    "acceptance-rates": acceptance_rates,
    "acceptance-served": acceptance_served,
    "acceptance-speed": acceptance_speed,
    "ablations": ablations,
    "trainings": trainings,
    "trained-speed": trained_speed,
    "families": families,
    "servers": servers,
}


def render(text: str) -> str:
    """A page with every block as the JSONs have it.

    Raises:
        KeyError: a block that nothing renders.
    """
    return _BLOCK.sub(lambda found: f"{found[1]}{BLOCKS[found['name']]()}{found[3]}", text)


# -- the pages of benchmarks/results ------------------------------------------------------------------------------------


def render_folder(folder: str) -> str:
    """The page of one question: what was measured, with which command, and what it says."""
    parts = [
        f"# {QUESTIONS[folder]}\n",
        "Made by `scripts/render_results.py`. [All questions](../README.md).\n",
    ]
    gain = "Output tokens per second over no speculation"
    tables = {
        # Of trained drafts several have one kind.
        "drafts": (gain, trained_speed),
        "kernels": ("Microseconds of one thread in a step", small_steps),
        "replay": ("Automatic capacity on new servers: tokens per second over plain decoding", automatic),
    }
    what, draw = tables.get(folder, (f"{gain} (in brackets SGLang's own)", overview(folder)))
    if (text := draw()) != NOT_MEASURED:
        parts += [f"{what}:\n", text]
    for picture in sorted((RESULTS / folder).glob("*.png")):
        if not picture.with_suffix(".json").exists():  # it is of several
            parts.append(f"![{picture.stem}]({picture.name})\n")
    comparisons = {comparison.path: comparison for comparison in read_comparisons(folder)}
    for path in sorted((RESULTS / folder).glob("*.json")):
        parts.append(f"## {path.stem}\n")
        results = json.loads(path.read_text())
        where = results["provenance"]
        machine = where.get("gpu") or where.get("cpu")
        lines = [
            f"- command: `{where['command']}`",
            f"- commit {where['commit']}, {where['date']}, {machine}, {where['cores']} cores",
            f"- data: [{path.name}]({path.name})",
        ]
        if path.with_suffix(".md").exists():
            lines.append(f"- every column: [{path.stem}.md]({path.stem}.md)")
        parts.append("\n".join(lines) + "\n")
        if path in comparisons:
            verdicts = judge(comparisons[path].cells, results["arms"])
            parts.append("".join(f"- {'holds' if v.holds else '**fails**'}: {v.expectation} ({v.detail})\n" for v in verdicts))
        if path.with_suffix(".png").exists():
            parts.append(f"![{path.stem}]({path.stem}.png)\n")
    return "\n".join(parts)


def render_index() -> str:
    folders = [folder for folder in QUESTIONS if list((RESULTS / folder).glob("*.json"))]
    rows = [[f"[{folder}]({folder}/README.md)", QUESTIONS[folder]] for folder in folders]
    return "# Results\n\nOne folder per question. Made by `scripts/render_results.py`.\n\n" + table(
        ["folder", "question"], rows
    )


def render_all() -> dict[Path, str]:
    """Every page as it should be."""
    pages = {ROOT / name: render((ROOT / name).read_text()) for name in PAGES}
    pages[RESULTS / "README.md"] = render_index()
    for folder in QUESTIONS:
        if list((RESULTS / folder).glob("*.json")):
            pages[RESULTS / folder / "README.md"] = render_folder(folder)
    return pages


def main(
    check: Annotated[bool, typer.Option("--check", help="Change nothing; exit with 1 where a page differs.")] = False,
) -> None:
    """Rewrite the tables and pages of figures from the JSONs."""
    stale = []
    for path, text in render_all().items():
        if not path.exists() or path.read_text() != text:
            stale.append(str(path.relative_to(ROOT)))
            if not check:
                path.write_text(text)
    print("\n".join(f"{name}: {'differs from the JSONs' if check else 'rewritten'}" for name in stale) or "up to date")
    raise typer.Exit(int(check and bool(stale)))


if __name__ == "__main__":
    typer.run(main)
