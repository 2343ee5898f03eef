#!/usr/bin/env python
"""Draw what drafts of the real model gained by training, from benchmarks/results/drafts/*-training.json.

.venv/bin/python scripts/draw_drafts.py
"""

from __future__ import annotations

import json

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from render_results import RESULTS, TRAINED

PICTURE = RESULTS / "drafts" / "accepted.png"
TEMPERATURES = ("0", "0.7", "1")


def main() -> None:
    files = {what: RESULTS / "drafts" / f"{name}-training.json" for name, what in TRAINED.items()}
    found = {what: json.loads(path.read_text()) for what, path in files.items() if path.exists()}
    figure, axes = pyplot.subplots(
        1, len(TEMPERATURES), sharex=True, sharey=True, figsize=(12, 1 + 0.7 * len(found)), layout="constrained"
    )
    for axis, temperature in zip(axes, TEMPERATURES, strict=True):
        for when, shift, colour in (("before", -0.2, "tab:gray"), ("after", 0.2, "tab:purple")):
            means = {
                row + shift: metrics[when][temperature]["overall"]["mean"]
                for row, metrics in enumerate(found.values())
                if metrics[when] is not None
            }
            bars = axis.barh(list(means), list(means.values()), height=0.36, color=colour, label=when)
            axis.bar_label(bars, fmt="%.2f", padding=3)
        axis.set_title(f"temperature {temperature}")
        axis.set_xlabel("accepted per pass, of 5 drafts")
        axis.margins(x=0.2)
    axes[0].set_yticks(range(len(found)), list(found))
    axes[0].invert_yaxis()
    axes[-1].legend()
    figure.savefig(PICTURE, dpi=110)


if __name__ == "__main__":
    main()
