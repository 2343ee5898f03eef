"""Selection rules on recorded steps, at equal capacity: `tetris-sglang replay`.

In every step each rule verifies the same number of drafts: C = capacity per request * batch, or all there are where fewer
were drafted. What it gets accepted is known, since everything was verified when the trace was recorded.

| Rule | Verifies |
|---|---|
| uniform | the first C / batch of every request's nodes |
| random | a random prefix of each request's nodes |
| tetris raw | the C nodes of the largest survival by the draft's own probabilities |
| tetris calibrated | the C nodes of the largest calibrated survival: what is served |
| oracle | accepted nodes first, as if it knew the future; then rejected ones, so that it verifies as many as the others |

In a tree the first two take nodes in the order in which the server lists them, the calibrated survivals'.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from tetris_sglang.capacity import FixedCapacity
from tetris_sglang.selection import SMALLEST_SURVIVAL, get_selector
from tetris_sglang.trace import Trace, read_trace

CAPACITIES = (0.5, 1.0, 2.0, 3.0, 4.0)
GOAL = 0.9
"""Of the oracle's success rate."""


class Batch(NamedTuple):
    """The drafts of one step's requests, in the order of `Proposal`; each [batch, n] but for num_nodes."""

    raw: Tensor
    """float32."""
    survival: Tensor
    """float32, non-increasing along dim 1."""
    accepted: Tensor
    """bool."""
    num_nodes: Tensor
    """[batch] int64, those that are nodes: the first so many."""


class Rule(NamedTuple):
    """Sort each request's nodes by a score, then select prefixes batch-wide."""

    score: Callable[[Batch], Tensor]
    """[batch, n] float32. A child's score is at most its parent's."""
    selection: str
    """As --speculative-tetris-selection."""
    promises: bool = False
    """Whether the score is an estimate of survival."""


RULES = {
    "uniform": Rule(lambda batch: batch.survival, "uniform"),
    "random": Rule(lambda batch: batch.survival, "random"),
    "tetris raw": Rule(lambda batch: batch.raw, "tetris", promises=True),
    "tetris calibrated": Rule(lambda batch: batch.survival, "tetris", promises=True),
    "oracle": Rule(lambda batch: batch.accepted.float(), "tetris"),
}


class Ranked(NamedTuple):
    """Each request's nodes in the order in which a rule takes them."""

    selection: str
    score: Tensor
    """[batch, n] float32, non-increasing along dim 1."""
    accepted: Tensor
    """[batch, n] bool."""
    num_nodes: Tensor
    """[batch] int64."""


class Selected(NamedTuple):
    """What a rule chose, summed over a batch."""

    verified: int
    accepted: int
    score: float
    """How many the rule expects to be accepted, if its scores are survivals."""


def rank(rule: Rule, batch: Batch) -> Ranked:
    """Order nodes by a rule's score. It is the same at every capacity."""
    # Stable: among equals the listed order stays, in which a parent stands before its children.
    score, order = rule.score(batch).sort(dim=1, descending=True, stable=True)
    return Ranked(rule.selection, score, batch.accepted.gather(1, order), batch.num_nodes)


def select(ranked: Ranked, capacity_tokens: int) -> Selected:
    """Choose as many nodes as the capacity allows, as the server's own selection does."""
    choose = get_selector(ranked.selection)
    draft_lens = choose(ranked.score.clamp(min=SMALLEST_SURVIVAL), capacity_tokens, ranked.num_nodes)
    verified = torch.arange(ranked.score.shape[1]) < draft_lens[:, None]
    accepted, score = (ranked.accepted & verified).sum(), ranked.score[verified].sum()
    return Selected(int(draft_lens.sum()), int(accepted), float(score))


class Figures(NamedTuple):
    """One rule at one capacity, over all steps and repeats."""

    rule: str
    capacity_per_request: float
    requests: int
    """Rows: requests summed over steps."""
    verified: int
    accepted: int
    promised: float | None
    """The mean of the chosen survivals: the success rate if they are right. No rule that sees no more than right survivals
    can expect more."""
    oracle_share: float
    """Success rate over the oracle's."""

    @property
    def success_rate(self) -> float:
        """Accepted over verified drafts."""
        return self.accepted / self.verified

    @property
    def emitted_per_row(self) -> float:
        """Tokens emitted per row of the target's pass: (requests + accepted) / (requests + verified)."""
        return (self.requests + self.accepted) / (self.requests + self.verified)

    def as_json(self) -> dict[str, Any]:
        return self._asdict() | {"success_rate": self.success_rate, "emitted_per_row": self.emitted_per_row}


class Study(NamedTuple):
    """All rules on one trace."""

    name: str
    header: dict[str, Any]
    num_steps: int
    """Recorded ones that were replayed."""
    num_rows: int
    left_out: int
    """Steps with drafts that were not verified."""
    figures: list[Figures]

    def find(self, rule: str, capacity_per_request: float) -> Figures:
        return next(f for f in self.figures if f[:2] == (rule, capacity_per_request))

    @property
    def capacities(self) -> list[float]:
        return list(dict.fromkeys(f.capacity_per_request for f in self.figures))

    def as_json(self) -> dict[str, Any]:
        return self._asdict() | {"figures": [figures.as_json() for figures in self.figures]}


def study(
    trace: Trace,
    trace_name: str,
    capacities: Sequence[float] = CAPACITIES,
    *,
    batch_size: int | None = None,
    repeats: int = 1,
    seed: int = 0,
) -> Study:
    """Replay a trace with every rule at every capacity.

    Args:
        capacities: drafts verified per step, averaged over the requests.
        batch_size: rows are shuffled into batches of so many; default: the recorded steps.
        repeats: draws of the random rule, and shuffles. seed: of those.
    Raises:
        ValueError: an argument out of range, or no step to replay.
    """
    if repeats < 1 or (batch_size is not None and batch_size < 1):
        raise ValueError(f"repeats and batch_size must be at least 1, got {repeats} and {batch_size}")
    policies = {capacity: FixedCapacity(per_request=capacity) for capacity in capacities}
    recorded, left_out = complete_steps(trace)
    rows = torch.cat(recorded) if recorded else torch.empty(0, dtype=torch.int64)
    if len(rows) < (batch_size or 1):
        raise ValueError(
            f"{trace_name}: {len(rows)} rows of {left_out + len(recorded)} steps can be replayed. Record with everything "
            f"verified, --speculative-tetris-capacity-per-request as large as what a request drafts."
        )
    sums = {(rule, capacity): Selected(0, 0, 0.0) for rule in RULES for capacity in policies}
    num_requests = 0
    # The random rule draws from torch's global generator, as a server does.
    with torch.inference_mode(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for _ in range(repeats):
            batches = recorded
            if batch_size is not None:
                # What is left over is no whole batch.
                batches = rows[torch.randperm(len(rows))].split(batch_size)[: len(rows) // batch_size]
            for batch in make_batches(trace, batches):
                num_requests += len(batch.raw)
                for name, rule in RULES.items():
                    ranked = rank(rule, batch)
                    for capacity, policy in policies.items():
                        selected = select(ranked, policy.count_tokens(len(batch.raw)))
                        total = sums[name, capacity]
                        sums[name, capacity] = Selected(*map(sum, zip(total, selected, strict=True)))
    figures = []
    for (rule, capacity), (verified, accepted, score) in sums.items():
        best = sums["oracle", capacity][1]
        promised = score / verified if RULES[rule].promises else None
        share = accepted / best if best else 1.0
        figures.append(Figures(rule, capacity, num_requests, verified, accepted, promised, share))
    return Study(trace_name, trace.header, len(recorded), len(rows), left_out, figures)


def complete_steps(trace: Trace) -> tuple[list[Tensor], int]:
    """The rows of each step of which all is known, and how many other steps there are."""
    if len(trace.steps) == 0:
        return [], 0
    complete = torch.from_numpy(trace.is_complete)
    _, sizes = torch.unique_consecutive(torch.from_numpy(trace.steps), return_counts=True)
    steps = torch.arange(len(complete)).split(sizes.tolist())
    known = [rows for rows in steps if complete[rows].all()]
    return known, len(steps) - len(known)


def make_batches(trace: Trace, rows: Iterable[Tensor]) -> Iterator[Batch]:
    """A batch for each group of rows."""
    num_nodes = (trace.node_depths > 0).sum(axis=1)
    arrays = (torch.from_numpy(array) for array in (trace.raw, trace.survival, trace.accepted, num_nodes))
    tensors = tuple(arrays)
    return (Batch(*(tensor[group] for tensor in tensors)) for group in rows)


# -- what the command shows ---------------------------------------------------------------------------------------


def replay(
    files: Sequence[Path],
    capacities: str = ",".join(f"{capacity:g}" for capacity in CAPACITIES),
    batch_size: int | None = None,
    repeats: int = 1,
    seed: int = 0,
    as_json: bool = False,
    plot: Path | None = None,
    console: Console | None = None,
) -> None:
    """Compare the rules on every file and print tables, or JSON.

    Args:
        capacities: numbers with commas between them.
        plot: where to draw a figure.
    Raises:
        ValueError: a file is no trace, or an argument out of range.
    """
    try:
        numbers = [float(text) for text in capacities.split(",")]
    except ValueError:
        raise ValueError(f"--capacity-per-request {capacities}: give numbers with commas between them") from None
    studies = [
        study(read_trace(path), name_trace(path), numbers, batch_size=batch_size, repeats=repeats, seed=seed) for path in files
    ]
    if as_json:
        print(json.dumps([result.as_json() for result in studies], indent=1))
    else:
        console = console or Console()
        for result in studies:
            print_study(result, console)
    if plot is not None:
        draw_figure(studies, plot)


def name_trace(path: Path) -> str:
    return path.name.removesuffix(".gz").removesuffix(".trace")


def print_study(result: Study, console: Console) -> None:
    left_out = f"; {result.left_out} steps left out, not all verified" if result.left_out else ""
    console.print(
        f"{result.name}: {result.num_steps} steps, {result.num_rows / result.num_steps:.1f} requests each{left_out}",
        highlight=False,
    )
    for title, draw in (
        ("k verified per request: accepted / verified (share of the oracle's)", draw_success),
        (
            "emitted per row of the target's pass",
            lambda figures: f"{figures.emitted_per_row:.3f}",
        ),
    ):
        table = Table("k", *RULES, title=title, title_justify="left", box=box.SIMPLE_HEAD)
        table.padding = (0, 1, 0, 0)
        for column in table.columns:
            column.justify, column.no_wrap = "right", True
        for capacity in result.capacities:
            table.add_row(f"{capacity:g}", *(draw(result.find(rule, capacity)) for rule in RULES))
        console.print(table)


def draw_success(figures: Figures) -> str:
    return f"{figures.success_rate:.3f} ({figures.oracle_share:.0%})"


def draw_figure(studies: Sequence[Study], path: Path) -> None:
    """Success rate against capacity, a panel per trace and a line per rule.

    Raises:
        ValueError: matplotlib is missing.
    """
    try:
        import matplotlib
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = min(3, len(studies))
    rows = -(-len(studies) // columns)
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(4 * columns, 3 * rows), sharey=True, squeeze=False, layout="constrained"
    )
    for axis in axes.flat[len(studies) :]:
        axis.remove()
    styles = dict(zip(RULES, ("C7--", "C7:", "C1-", "C0-", "k-"), strict=True))
    for axis, result in zip(axes.flat, studies, strict=False):
        for rule, style in styles.items():
            rates = [result.find(rule, capacity).success_rate for capacity in result.capacities]
            axis.plot(result.capacities, rates, style, marker=".", label=rule)
        axis.set(title=result.name, xlabel="verified per request (k)", ylim=(0, 1.02))
        axis.grid(alpha=0.3)
    axes[0, 0].set_ylabel("accepted / verified")
    axes[0, 0].legend(fontsize=8)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
