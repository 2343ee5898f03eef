"""What a simulation shows: tables for the terminal, and a plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

MODELLED = "roofline of one {device}: modelled, not measured"
PAYS = 1.01
"""A gain below this is none."""

Setting = dict[str, Any]


def print_settings(settings: Sequence[Setting], is_closed: bool, console: Console) -> None:
    load = "users" if is_closed else "requests/s"
    gain = "gain" if is_closed else "E2E gain"
    milliseconds = ("TTFT p50/p99, ms", "TPOT p50/p99", "E2E p50/p99")
    table = Table(
        load,
        "policy",
        "tok/s",
        gain,
        *milliseconds,
        "accept length",
        "rows/step",
        "busy",
        box=box.SIMPLE_HEAD,
    )
    previous = None
    for setting in sorted(settings, key=lambda one: one["load"]):
        if previous not in (None, setting["load"]):
            table.add_section()
        previous = setting["load"]
        table.add_row(
            f"{setting['load']:g}",
            setting["policy"],
            f"{setting['output_tokens_per_s']:.0f}",
            _mark(setting["gain"]),
            *(
                f"{_format(setting[f'{name}_p50_ms'])} / {_format(setting[f'{name}_p99_ms'])}"
                for name in ("ttft", "tpot", "e2e")
            ),
            f"{setting['accept_length']:.2f}" if setting["accept_length"] else "",
            f"{setting['rows_per_step']:.0f}",
            f"{setting['utilisation']:.0%}",
        )
    console.print(table)


def _format(milliseconds: float) -> str:
    return f"{milliseconds:.0f}" if milliseconds >= 100 else f"{milliseconds:.3g}"


def _mark(gain: float) -> str:
    return f"[red]{gain:.2f}[/]" if gain < 2 - PAYS else f"{gain:.2f}"


def print_where_it_pays(settings: Sequence[Setting], is_closed: bool, console: Console) -> None:
    """The largest load at which each policy still wins, and what it costs beyond."""
    unit = "users" if is_closed else "requests/s"
    console.print("[bold]Where speculation pays[/]")
    for policy in dict.fromkeys(setting["policy"] for setting in settings if setting["policy"] != "none"):
        mine = sorted((one["load"], one["gain"]) for one in settings if one["policy"] == policy)
        winning = [load for load, gain in mine if gain >= PAYS]
        worst_load, worst = min(mine, key=lambda one: one[1])
        best_load, best = max(mine, key=lambda one: one[1])
        if not winning:
            text = "at none of these loads"
        elif winning[-1] == mine[-1][0]:
            text = f"up to {winning[-1]:g} {unit}, the largest simulated"
        else:
            text = f"up to {winning[-1]:g} {unit}"
        console.print(
            f"  {policy}: {text}; best {best:.2f} at {best_load:g}, worst {worst:.2f} at {worst_load:g}",
            highlight=False,
        )


def print_capacities(swept: Sequence[Setting], settings: Sequence[Setting], console: Console) -> None:
    """Throughput by capacity per request and load, the best of each load marked."""
    loads = list(dict.fromkeys(one["load"] for one in swept))
    console.print("\n[bold]What capacity is worth[/]: tok/s by load")
    table = Table("C / batch", *(f"{load:g}" for load in loads), box=box.SIMPLE_HEAD)
    speeds = {(f"{one['capacity_per_request']:g}", one["load"]): one["output_tokens_per_s"] for one in swept}
    speeds |= {
        (one["policy"], one["load"]): one["output_tokens_per_s"] for one in settings if one["policy"] in ("none", "auto")
    }
    best = {load: max(speed for (_, at), speed in speeds.items() if at == load) for load in loads}
    for name in dict.fromkeys(name for name, _ in speeds):
        cells = (speeds[name, load] for load in loads)
        table.add_row(
            name,
            *(
                f"[bold]{speed:.0f}[/]" if speed == best[load] else f"{speed:.0f}"
                for speed, load in zip(cells, loads, strict=True)
            ),
        )
    console.print(table)


def print_replicas(
    found: Sequence[Setting], slo_e2e_ms: float | None, slo_tpot_ms: float | None, most: int, console: Console
) -> None:
    targets = " and ".join(
        f"p99 {name} <= {target:g} ms" for name, target in (("E2E", slo_e2e_ms), ("TPOT", slo_tpot_ms)) if target
    )
    loads = list(dict.fromkeys(one["load"] for one in found))
    console.print(f"\n[bold]What a fleet saves[/]: replicas for {targets}, by load", highlight=False)
    table = Table("policy", *(f"{load:g}" for load in loads), box=box.SIMPLE_HEAD)
    replicas = {(one["policy"], one["load"]): one["replicas"] for one in found}
    for policy in dict.fromkeys(one["policy"] for one in found):
        table.add_row(policy, *(str(replicas[policy, load] or f"> {most}") for load in loads))
    console.print(table)


def plot(results: dict[str, Any], is_closed: bool, out: Path) -> None:
    """Gain and tail latency by load."""
    try:
        import matplotlib
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4))
    for policy in dict.fromkeys(one["policy"] for one in results["settings"]):
        mine = sorted((one for one in results["settings"] if one["policy"] == policy), key=lambda one: one["load"])
        loads = [one["load"] for one in mine]
        left.plot(loads, [one["gain"] for one in mine], "o-", ms=4, label=policy)
        right.plot(loads, [one["e2e_p99_ms"] / 1e3 for one in mine], "o-", ms=4, label=policy)
    load = "users" if is_closed else "requests/s"
    left.axhline(1, color="grey", lw=0.8)
    left.set(
        xscale="log",
        xlabel=load,
        ylabel=f"{'throughput' if is_closed else 'median latency'}, gain against none",
    )
    right.set(xscale="log", yscale="log", xlabel=load, ylabel="p99 end-to-end latency, s")
    left.legend()
    figure.suptitle(results["step_times"], fontsize=9)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=120, bbox_inches="tight")
    plt.close(figure)
