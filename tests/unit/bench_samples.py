"""Settings and samples of a comparison that no server made."""

from tetris_sglang.bench.settings import QUICK, build_settings

OPTIONS = {
    "topk": "1",
    "concurrency": "1,16",
    "output_len": 64,
    "repeats": 3,
    "shape": "s",
    "live_servers": 3,
    "phase_times": True,
    "seed": 0,
    "num_steps": 6,
}


def make_settings(**options):
    return build_settings(preset=QUICK, options={"arms": "none,standalone,tetris"} | OPTIONS | options)


def make_sample(arm, *, tokens_per_s, repeat=0, group=0, concurrency=1, temperature=0.0, **changes):
    sample = {
        "group": group, "repeat": repeat, "arm": arm, "concurrency": concurrency, "temperature": temperature,
        "output_tokens_per_s": tokens_per_s, "verify_steps": 0, "selected": 0, "accepted": 0, "num_steps": 0,
        "verified_rows": 0, "phase_ms": {}, "output_hashes": ["a", "b"],
        "ttft_p50_ms": 10.0, "ttft_p99_ms": 20.0, "tpot_p50_ms": 1e2 / tokens_per_s,
        "tpot_p99_ms": 2e2 / tokens_per_s, "e2e_p50_ms": 1e3 / tokens_per_s, "e2e_p99_ms": 2e3 / tokens_per_s,
    }  # fmt: skip
    return sample | changes
