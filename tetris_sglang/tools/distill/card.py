"""What is written beside a draft that was distilled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def render_card(metrics: Mapping[str, Any]) -> str:
    """The card of `metrics.json`, from its figures alone."""
    made, texts = metrics["made_with"], metrics["texts"]
    data = "\n".join(
        f"| {kind} | {n['texts']} | {n['prompt_tokens'] / 1e3:.0f} k | {n['output_tokens'] / 1e3:.0f} k |"
        for kind, n in texts["learnt"].items()
    )
    return f"""# A draft for {made["target"]}

Made by `tetris-sglang distill`; this card is rendered from `metrics.json`. No text is in this folder.

| | |
|---|---|
| begun from | {made["draft"]} |
| parameters | {metrics["parameters"] / 1e6:.2f} M |
| divergence | {made["divergence"]}, and {made["greedy_share"]:g} of the loss to the likeliest token |
| steps | {metrics["steps"]}, of {made["batch_tokens"]} tokens in each of {metrics["processes"]} processes |
| time | {metrics["seconds"] / 60:.0f} minutes |
| memory | {metrics["peak_memory_gb"]:.1f} GB at most |
| loss | {metrics["first_loss"]:.3f} at first, {metrics["last_loss"]:.3f} at last |

## Data

{texts["held_out"]} texts were kept back, and judge what follows.

| of | texts | prompt tokens | output tokens |
|---|---|---|---|
{data}

## Accepted

Of {made["chain"]} drafts in a chain, all verified, per pass of the target, on the texts that were kept back:

{_table(metrics)}

Share accepted of the drafts at each place that were reached:

| temperature | |{" |".join(f" {i + 1}" for i in range(made["chain"]))} |
|---|---|{"---|" * made["chain"]}
{_places(metrics)}
"""


def _table(metrics: Mapping[str, Any]) -> str:
    before, after = metrics["before"], metrics["after"]
    kinds = sorted({kind for found in after.values() for kind in found} - {"overall"}) + ["overall"]
    lines = [f"| temperature | | {' | '.join(kinds)} |", f"|---|---|{'---|' * len(kinds)}"]
    for temperature in sorted(after):
        for name, found in (("before", before), ("after", after)):
            if found is not None and temperature in found:
                cells = [f"{found[temperature][kind]['mean']:.2f}" if kind in found[temperature] else "" for kind in kinds]
                lines.append(f"| {temperature} | {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _places(metrics: Mapping[str, Any]) -> str:
    lines = []
    for temperature in sorted(metrics["after"]):
        for name in ("before", "after"):
            found = metrics[name]
            if found is not None and temperature in found:
                rates = " | ".join(f"{rate:.2f}" for rate in found[temperature]["overall"]["rates"])
                lines.append(f"| {temperature} | {name} | {rates} |")
    return "\n".join(lines)
