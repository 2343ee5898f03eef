"""Writes monitoring/grafana/tetris.json, the Grafana dashboard: every panel is a line or two here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PATH = Path(__file__).parents[1] / "monitoring" / "grafana" / "tetris.json"
_WIDTH, _HEIGHT, _COLUMNS = 8, 8, 3


def _series(name: str) -> str:
    """SGLang's colon reaches Prometheus 3 as it is; one of version 2 is sent an underscore."""
    return f'{{__name__=~"sglang[:_]{name}", instance=~"$instance"}}'


def _rate(name: str, by: str = "") -> str:
    return f"sum{by}(rate({_series(f'tetris_{name}_total')}[$__rate_interval]))"


def _last(name: str, aggregate: str = "avg") -> str:
    return f"{aggregate}({_series(f'tetris_{name}')})"


PANELS: list[tuple[str, str, str, dict[str, str]]] = [
    # Title, Grafana's unit, what it says, and the queries by legend.
    (
        "Output",
        "none",
        "Tokens per second: one per request and step, and the accepted drafts.",
        {"tokens/s": f"{_rate('request_steps')} + {_rate('accepted_tokens')}"},
    ),
    (
        "Draft tokens",
        "none",
        "Tokens per second. Verifying what is not accepted costs rows of the target; drafting what is not verified, little.",
        {name: _rate(f"{name}_tokens") for name in ("drafted", "selected", "accepted")},
    ),
    (
        "Accept length",
        "none",
        "Tokens that a request's step emits, the target's own included.",
        {
            "all steps": f"1 + {_rate('accepted_tokens')} / {_rate('request_steps')}",
            "steps that drafted": f"1 + {_rate('accepted_tokens')} / {_rate('drafting_request_steps')}",
        },
    ),
    (
        "Success rate",
        "percentunit",
        "Accepted drafts over those verified, and over all that were drafted.",
        {f"of {name}": f"{_rate('accepted_tokens')} / {_rate(f'{name}_tokens')}" for name in ("selected", "drafted")},
    ),
    (
        "Acceptance by position",
        "percentunit",
        "Of the requests in steps that drafted, those that had a draft of this position accepted.",
        {
            "draft {{position}}": f"{_rate('accepted_at_position', ' by (position) ')} "
            f"/ on() group_left() {_rate('drafting_request_steps')}"
        },
    ),
    (
        "Gain over plain decoding",
        "none",
        "As the server estimates it for the best speculative plan. Below 1 it decodes plainly. Automatic capacity alone.",
        {"gain": _last("expected_gain")},
    ),
    (
        "Depth and capacity",
        "none",
        "Of the last step: passes of the draft, and draft tokens verified per request.",
        {
            "depth": _last("draft_depth"),
            "capacity per request": f"{_last('capacity_tokens', 'sum')} / {_last('batch_size', 'sum')}",
        },
    ),
    (
        "Plain steps",
        "percentunit",
        "Steps that verify no draft.",
        {"plain": f"{_rate('plain_steps')} / {_rate('steps')}"},
    ),
    (
        "Step time",
        "s",
        "Of the last step that was timed, as predicted and as measured. Automatic capacity alone.",
        {name: _last(f"step_time_{name}_seconds") for name in ("predicted", "measured")},
    ),
    (
        "Phases",
        "ms",
        "Milliseconds per step, with --speculative-tetris-phase-times.",
        {"{{phase}}": f"1000 * {_rate('phase_seconds', ' by (phase) ')} / on() group_left() {_rate('steps')}"},
    ),
    (
        "Rows of the target's passes",
        "none",
        "Per step: roots and drafts that were wanted, and what graphs round up to.",
        {
            "wanted": f"({_rate('request_steps')} + {_rate('selected_tokens')}) / {_rate('steps')}",
            "computed": f"{_rate('verified_rows')} / {_rate('steps')}",
        },
    ),
    (
        "Requests",
        "none",
        "Running and waiting, as SGLang counts them.",
        {name: f"sum({_series(f'num_{name}_reqs')})" for name in ("running", "queue")},
    ),
]


def make_dashboard() -> dict[str, Any]:
    datasource = {"type": "prometheus", "uid": "${datasource}"}
    panels = [
        {
            "id": number + 1,
            "type": "timeseries",
            "title": title,
            "description": text,
            "datasource": datasource,
            "gridPos": {
                "x": number % _COLUMNS * _WIDTH,
                "y": number // _COLUMNS * _HEIGHT,
                "w": _WIDTH,
                "h": _HEIGHT,
            },
            "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
            "targets": [
                {"refId": chr(ord("A") + i), "datasource": datasource, "expr": query, "legendFormat": legend}
                for i, (legend, query) in enumerate(queries.items())
            ],
        }
        for number, (title, unit, text, queries) in enumerate(PANELS)
    ]
    variables = [
        {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"},
        {
            "name": "instance",
            "type": "query",
            "label": "Server",
            "datasource": datasource,
            "query": 'label_values({__name__=~"sglang[:_]tetris_steps_total"}, instance)',
            "refresh": 2,
            "includeAll": True,
            "allValue": ".*",
            "multi": True,
            "current": {"text": "All", "value": "$__all"},
        },
    ]
    return {
        "title": "TETRIS speculative decoding",
        "uid": "tetris-sglang",
        "tags": ["sglang", "tetris"],
        "schemaVersion": 39,
        "refresh": "5s",
        "time": {"from": "now-15m", "to": "now"},
        "templating": {"list": variables},
        "panels": panels,
    }


if __name__ == "__main__":
    PATH.write_text(json.dumps(make_dashboard(), indent=1) + "\n")
