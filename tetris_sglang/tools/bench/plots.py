"""Pictures of a comparison, from its JSON alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from tetris_sglang.tools.bench.arms import REFERENCE, Arm
from tetris_sglang.tools.bench.report import (
    PHASES,
    Cell,
    build_cells,
    describe_machine,
    describe_target,
    describe_workload,
)
from tetris_sglang.tools.bench.results import Results

_STYLES = {
    "control": ("tab:gray", ".", ":"),
    "sglang": ("tab:orange", "s", "--"),
    "adaptive": ("tab:brown", "P", "--"),
    "full": ("tab:gray", "v", "--"),
    "tetris": ("tab:blue", "o", "-"),
    "uniform": ("tab:green", "^", ":"),
    "random": ("tab:red", "x", ":"),
    "auto": ("tab:purple", "D", "-"),
}


def plot_comparison(results: Results, path: Path) -> None:
    """Throughput against load, success rate against capacity, phase times where measured; a row per temperature."""
    cells, arms = build_cells(results["samples"]), results["arms"]
    temperatures = sorted({c.temperature for c in cells})
    width = 3 if any(c.phase_ms for c in cells) else 2
    figure, axes = pyplot.subplots(
        *(len(temperatures), width),
        figsize=(5.7 * width, 5 * len(temperatures)),
        squeeze=False,
        layout="constrained",
    )
    for row, temperature in zip(axes, temperatures, strict=True):
        here = [c for c in cells if c.temperature == temperature]
        _plot_throughput(row[0], here, arms)
        _plot_success(row[1], here, arms)
        if width == 3:
            _plot_phases(row[2], [c for c in here if c.phase_ms])
        row[0].set_title(f"output throughput, temperature {temperature:g}")
    settings = results["settings"]
    described = (
        describe_machine(results["provenance"]),
        describe_target(settings),
        describe_workload(settings),
    )
    figure.suptitle(", ".join(described), fontsize=9)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _plot_throughput(axis, cells: Sequence[Cell], arms: dict[str, dict]) -> None:
    names = [arm for arm in dict.fromkeys(c.arm for c in cells) if arm != REFERENCE]
    for index, arm in enumerate(names):
        mine = [c for c in cells if c.arm == arm]
        colour, marker, line = _STYLES[arms[arm]["family"]]
        ratios = [c.throughput for c in mine]
        spread = [[r.median - r.low for r in ratios], [r.high - r.median for r in ratios]]
        # Side by side within 10%, so that error bars do not hide each other.
        shift = 1 + 0.1 * (index / max(1, len(names) - 1) - 0.5)
        axis.errorbar(
            [c.load.value * shift for c in mine],
            [r.median for r in ratios],
            yerr=spread,
            color=colour,
            alpha=0.35 + 0.65 * (index + 1) / len(names),
            marker=marker,
            linestyle=line,
            capsize=3,
            label=arm,
        )
    axis.axhline(1, color="black", linewidth=1, label="no speculation")
    axis.set_xscale("log", base=2)
    ticks = sorted({c.load.value for c in cells})
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.set(xlabel=cells[0].load.unit, ylabel="ratio to no speculation (median, smallest..largest)")
    # Many names would hide what they name.
    beside = {} if len(names) <= 6 else {"loc": "upper center", "bbox_to_anchor": (0.5, -0.12), "ncols": 3}
    axis.legend(fontsize=7, **beside)


def _plot_success(axis, cells: Sequence[Cell], arms: dict[str, dict]) -> None:
    """What was verified, not what was allowed: so the arms without a fixed k have a place, too."""
    load = max((c.load for c in cells), key=lambda load: load.value)
    series: dict[tuple, list[tuple[float, float]]] = {}
    for cell in cells:
        if cell.load == load and cell.success_rate is not None:
            arm = Arm(**arms[cell.arm])
            capacity = "C" if arm.capacity_tokens else ""
            key = arm.family, arm.extra, capacity, arm.draft, arm.topk
            series.setdefault(key, []).append((cell.verified_per_step - 1, cell.success_rate))
    for (family, extra, capacity, draft, topk), points in series.items():
        colour, marker, line = _STYLES[family]
        parts = ["SGLang's own" if family == "sglang" else family, draft]
        parts += [f"topk {topk}"] if topk > 1 else []
        parts += [f"{extra} extra drafts"] if extra else []
        parts += ["C over the batch"] if capacity else []
        axis.plot(
            *zip(*sorted(points), strict=True),
            color=colour,
            marker=marker,
            linestyle=line,
            alpha=1 / max(1, extra),
            label=", ".join(parts),
        )
    axis.set(
        xlabel="verified drafts per request and step",
        ylabel="accepted / verified drafts",
        title=f"verification success rate, {load}",
    )
    most = max((point[0] for points in series.values() for point in points), default=1)
    axis.set(xlim=(0, 1.15 * most), ylim=(0, 1))
    if series:
        axis.legend(fontsize=7)


def _plot_phases(axis, cells: Sequence[Cell]) -> None:
    axis.set(ylabel="milliseconds per step", title="where a step's time goes")
    if not cells:
        axis.text(0.5, 0.5, "not measured", ha="center", transform=axis.transAxes)
        return
    labels = [f"{c.arm}\n@{c.load.value:g}" for c in cells]
    bottoms = [0.0] * len(cells)
    for phase in PHASES:
        heights = [c.phase_ms[phase] for c in cells]
        axis.bar(labels, heights, bottom=bottoms, label=phase)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    axis.tick_params(axis="x", labelrotation=90, labelsize=7)
    axis.legend(fontsize=7, framealpha=0.9)
