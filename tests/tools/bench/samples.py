"""Settings, prompts and samples of a comparison that no server made."""

import inspect

from tetris_sglang.tools.bench import workloads
from tetris_sglang.tools.bench.command import _NO_SETTINGS, bench
from tetris_sglang.tools.bench.settings import QUICK, build_settings
from tetris_sglang.tools.prompts import Prompt

OPTIONS = {
    name: parameter.default for name, parameter in inspect.signature(bench).parameters.items() if name not in _NO_SETTINGS
} | {"draft_paths": (), "concurrency": "1,16", "live_servers": 3, "phase_times": True}


def make_settings(**options):
    preset = QUICK | {"arms": "none,sglang,tetris", "k": "1,3"}
    return build_settings(preset=preset, options=OPTIONS | options)


def make_prompts(kind, count=100):
    return [Prompt(f"{kind}/{i}", kind, f"{kind} {i}: why is it so, and since when?") for i in range(count)]


def fake_prompts(monkeypatch, too_long=()):
    """Some in place of ShareGPT's and HumanEval's, which tests do not fetch; the project's own questions stay."""
    monkeypatch.setattr(workloads, "read_sharegpt", lambda split: [*make_prompts("sharegpt"), *too_long])
    monkeypatch.setattr(workloads, "read_human_eval", lambda: make_prompts("humaneval"))


def make_sample(arm, *, tokens_per_s, repeat=0, group=0, concurrency=1, temperature=0.0, **changes):
    sample = {
        "group": group, "repeat": repeat, "arm": arm, "concurrency": concurrency, "temperature": temperature,
        "request_rate": None, "output_tokens_per_s": tokens_per_s, "steady_tokens_per_s": None,
        "per_user_tokens_per_s": tokens_per_s, "prompt_tokens": 200, "cached_tokens": 50, "verify_steps": 0,
        "selected": 0, "accepted": 0, "num_steps": 0, "verified_rows": 0, "phase_ms": {}, "output_hashes": ["a", "b"],
        "ttft_p50_ms": 10.0, "ttft_p99_ms": 20.0, "tpot_p50_ms": 1e2 / tokens_per_s,
        "tpot_p99_ms": 2e2 / tokens_per_s, "e2e_p50_ms": 1e3 / tokens_per_s, "e2e_p99_ms": 2e3 / tokens_per_s,
    }  # fmt: skip
    return sample | changes
