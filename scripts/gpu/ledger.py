"""What a decode step asks of the host and the device, from what the plugin of the computing CUDA wrote down."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import NamedTuple

DECODE = "decode"
GRAPH = "graph launch"
IN_GRAPH = "in a graph: "
STEPS = "steps"
FRESH = "fresh memory"
FILE = "ledger.json"
ASKING_FOR_LENGTHS = "runtime.host_copy"
"""What runs without a graph is planned on the host, as what a draft has missed is."""
RARE = 0.2
"""Of a step: no wait of every step is forgiven."""


class Ledger(NamedTuple):
    """Per decode step."""

    steps: int
    launches: float
    """Operators, Triton's kernels and others', outside of graphs."""
    graph_launches: float
    in_graphs: float
    host_plans: float
    pinned_copies: float
    pageable_copies: float
    syncs: float
    """The host waits: for a stream, the device, an event, a result or a blocking copy."""
    callers: dict[str, float]
    """Launches by who asked for them."""
    waits: dict[str, float]
    """What the syncs and the pageable copies are, and whose."""


def read(folder: Path) -> Ledger | None:
    """None where no step has decoded."""
    path = folder / FILE
    if not path.exists():
        return None
    rows = [row for row in json.loads(path.read_text()) if row["phase"] == DECODE]
    steps = sum(row["count"] for row in rows if row["what"] == STEPS)
    return summarise(rows, steps) if steps else None


def summarise(rows: list[dict], steps: int) -> Ledger:
    totals: Counter[str] = Counter()
    callers: Counter[str] = Counter()
    waits: Counter[str] = Counter()
    for row in rows:
        kind = classify(row["what"])
        totals[kind] += row["count"]
        if kind == "launches":
            callers[row["caller"]] += row["count"]
        is_rare = row["caller"] == ASKING_FOR_LENGTHS and row["count"] < RARE * steps
        if kind in ("syncs", "pageable_copies") and not is_rare:
            waits[f"{row['what']} by {row['caller'] or 'the runtime'}"] += row["count"]
    each = {name: totals[name] / steps for name in Ledger._fields if name in totals}
    nothing = dict.fromkeys(Ledger._fields, 0.0)
    shares = {
        "callers": {name: count / steps for name, count in callers.most_common()},
        "waits": {name: count / steps for name, count in waits.most_common()},
    }
    return Ledger(**(nothing | each | shares | {"steps": steps}))


def classify(what: str) -> str:
    if what == IN_GRAPH + "event":
        return "uncounted"
    if what.startswith(IN_GRAPH):
        return "in_graphs"
    if what == GRAPH:
        return "graph_launches"
    if what in (STEPS, FRESH):
        return "uncounted"
    if what.startswith("host plan"):
        return "host_plans"
    if what.startswith("wait: ") or "Synchronize" in what or what.endswith("blocking"):
        return "syncs"
    if what.startswith(("copy c", "cudaMemcpy")):
        return "pageable_copies" if "pageable" in what else "pinned_copies"
    return "uncounted" if what.startswith("cuda") else "launches"
