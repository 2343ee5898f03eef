"""Greedy output is that of the same server without speculation."""

from __future__ import annotations

import itertools
import json

import pytest
import requests

from tests.e2e.client import make_request, texts
from tests.e2e.conftest import MIN_SUCCESS, NUM_STEPS


def test_greedy_output_equals_no_speculation(plain, tetris, mixed_prompts):
    """48 held-out prompts, 16 in flight, lengths mixed in and out, so prefills and decodes overlap."""
    prompts = mixed_prompts[:48]
    each = [{"max_new_tokens": 24 + 12 * (i % 4)} for i in range(len(prompts))]
    expected = plain.generate_all(prompts, each=each)
    actual = tetris.generate_all(prompts, each=each)
    assert texts(actual) == texts(expected)
    assert [o["meta_info"]["finish_reason"] for o in actual] == [o["meta_info"]["finish_reason"] for o in expected]
    # Speculation really happened.
    assert sum(o["meta_info"].get("spec_num_correct_drafts", 0) for o in actual) > len(prompts)


def test_drafts_are_accepted(tetris, mixed_prompts, request):
    """Greedy, on held-out prompts."""
    kind = request.node.callspec.params["tetris"]
    outputs = tetris.generate_all(mixed_prompts[:24], max_new_tokens=32, ignore_eos=True)
    accepted, selected = (
        sum(output["meta_info"][f"spec_num_{name}_drafts"] for output in outputs) for name in ("correct", "selected")
    )
    assert accepted > MIN_SUCCESS[kind] * selected


def test_short_outputs(plain, featured, mixed_prompts):
    """max_new_tokens 1, 2 and 3 end inside a draft window."""
    each = [{"max_new_tokens": 1 + i % 3} for i in range(24)]
    expected = plain.generate_all(mixed_prompts[:24], each=each, ignore_eos=True)
    actual = featured.generate_all(mixed_prompts[:24], each=each, ignore_eos=True)
    assert texts(actual) == texts(expected)
    assert [o["meta_info"]["completion_tokens"] for o in actual] == [p["max_new_tokens"] for p in each]


def test_eos_inside_an_accepted_block(plain, tetris, mixed_prompts):
    """Outputs long enough to end by themselves, and stop ids taken from the middle of the known output."""
    expected = plain.generate_all(mixed_prompts[:16], max_new_tokens=160)
    actual = tetris.generate_all(mixed_prompts[:16], max_new_tokens=160)
    assert texts(actual) == texts(expected)
    stop_ids = [{"stop_token_ids": [o["output_ids"][len(o["output_ids"]) // 2]]} for o in expected]
    expected = plain.generate_all(mixed_prompts[:16], each=stop_ids, max_new_tokens=160)
    actual = tetris.generate_all(mixed_prompts[:16], each=stop_ids, max_new_tokens=160)
    assert texts(actual) == texts(expected)
    assert all(o["meta_info"]["finish_reason"]["type"] == "stop" for o in actual)


def test_stop_strings(plain, featured, mixed_prompts):
    each = [{"stop": stop} for stop in ("\n", " the", "):", "self", ".", ["e ", "a "], "\n\n", ",")]
    expected = plain.generate_all(mixed_prompts[:8], each=each, max_new_tokens=64)
    actual = featured.generate_all(mixed_prompts[:8], each=each, max_new_tokens=64)
    assert texts(actual) == texts(expected)
    assert [o["meta_info"]["finish_reason"] for o in actual] == [o["meta_info"]["finish_reason"] for o in expected]


def test_parallel_samples(plain, featured, mixed_prompts):
    """n > 1: greedy samples are all the greedy text."""
    expected = plain.generate(mixed_prompts[3], max_new_tokens=32)["text"]
    outputs = featured.generate(mixed_prompts[3], max_new_tokens=32, n=4)
    assert texts(outputs) == [expected] * 4
    sampled = featured.generate(mixed_prompts[3], max_new_tokens=32, n=4, temperature=1.5)
    assert len(set(texts(sampled))) > 1


def test_penalties(plain, featured, mixed_prompts):
    """Drafts before a row in the same step count, and so does every token of the step before. (Upstream's speculation counts
    one token per step.)"""
    wishes = [
        {"frequency_penalty": 0.8},
        {"presence_penalty": 1.5},
        {"repetition_penalty": 1.4},
        {"frequency_penalty": -0.1, "presence_penalty": 0.3},
        {},
    ]
    each = [wishes[i % len(wishes)] for i in range(10)]
    params = {"max_new_tokens": 48, "ignore_eos": True}
    expected = plain.generate_all(mixed_prompts[:10], each=each, **params)
    actual = featured.generate_all(mixed_prompts[:10], each=each, **params)
    assert texts(actual) == texts(expected)
    # They mattered, and only where they were asked for.
    free = texts(plain.generate_all(mixed_prompts[:10], **params))
    same = [a == b for a, b in zip(texts(expected), free, strict=True)]
    assert same[4] and same[9] and sum(same) <= 4


def test_min_new_tokens(plain, featured, mixed_prompts):
    """Stop tokens are masked by tokens generated, not by steps (upstream's speculation counts steps)."""
    outputs = plain.generate_all(mixed_prompts[:12], max_new_tokens=48)
    each = []
    for i, output in enumerate(outputs):
        ids = output["output_ids"]
        each.append({"stop_token_ids": [ids[min(2 + i % 3, len(ids) - 1)]], "min_new_tokens": 4 + 3 * (i % 5)})
    expected = plain.generate_all(mixed_prompts[:12], each=each, max_new_tokens=48)
    actual = featured.generate_all(mixed_prompts[:12], each=each, max_new_tokens=48)
    assert texts(actual) == texts(expected)
    assert all(o["meta_info"]["completion_tokens"] >= p["min_new_tokens"] for o, p in zip(actual, each, strict=True))
    # The mask mattered: without it some outputs are shorter.
    unmasked = [{"stop_token_ids": p["stop_token_ids"]} for p in each]
    free = plain.generate_all(mixed_prompts[:12], each=unmasked, max_new_tokens=48)
    assert texts(free) != texts(expected)


def test_logit_bias(plain, featured, mixed_prompts):
    outputs = plain.generate_all(mixed_prompts[:8], max_new_tokens=24)
    each = [{"logit_bias": {str(o["output_ids"][5]): -100.0, "300": 3.0}} for o in outputs]
    expected = plain.generate_all(mixed_prompts[:8], each=each, max_new_tokens=24)
    assert texts(featured.generate_all(mixed_prompts[:8], each=each, max_new_tokens=24)) == texts(expected)
    assert texts(expected) != texts(outputs)


def test_regular_expressions(plain, featured, mixed_prompts):
    """Grammar masks follow the drafted tokens; greedy and constrained is still greedy and constrained."""
    each = [{"regex": regex} for regex in (r"[0-9]{3}-[0-9]{4}", r"(yes|no|maybe)", r"[a-z ]{20}", r"(ab)+c")] * 2
    expected = plain.generate_all(mixed_prompts[:8], each=each, max_new_tokens=40)
    assert texts(featured.generate_all(mixed_prompts[:8], each=each, max_new_tokens=40)) == texts(expected)


def test_logprobs(plain, featured, mixed_prompts):
    params = {
        "return_logprob": True,
        "top_logprobs_num": 2,
        "token_ids_logprob": [5, 9],
        "max_new_tokens": 24,
    }
    expected = plain.generate_all(mixed_prompts[:8], **params)
    actual = featured.generate_all(mixed_prompts[:8], **params)
    for want, got in zip(expected, actual, strict=True):
        assert got["output_ids"] == want["output_ids"]
        for field in ("output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs"):
            got_rows, want_rows = got["meta_info"][field], want["meta_info"][field]
            assert len(got_rows) == len(want_rows) == len(want["output_ids"])
            for got_row, want_row in zip(got_rows, want_rows, strict=True):
                assert _values(got_row) == _approximately(_values(want_row))


def _values(row) -> list[float]:
    return [item[0] for item in row] if isinstance(row[0], list) else [row[0]]


def _approximately(values: list[float]):
    return pytest.approx(values, abs=2e-4)


def test_streaming_equals_not_streaming(plain, featured, mixed_prompts):
    expected = plain.generate(mixed_prompts[7], max_new_tokens=48)["text"]
    body = make_request(mixed_prompts[7], max_new_tokens=48, stream=True)
    chunks = []
    with requests.post(featured.url + "/generate", json=body, stream=True, timeout=300) as response:
        for line in response.iter_lines():
            if line.startswith(b"data: {"):
                chunks.append(json.loads(line[6:])["text"])
    assert len(chunks) > 2
    assert chunks[-1] == expected
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(chunks))


def test_counters_agree(overlap, mixed_prompts):
    """Requests' meta_info, Prometheus and /server_info tell one story, and the target's pass really is ragged."""
    names = (
        "sglang:tetris_drafted_tokens_total",
        "sglang:tetris_selected_tokens_total",
        "sglang:tetris_accepted_tokens_total",
    )
    before, metrics_before = overlap.tetris_state(), [overlap.metric(name) for name in names]
    outputs = overlap.generate_all(mixed_prompts[:20], max_new_tokens=32, ignore_eos=True)
    after, metrics_after = overlap.tetris_state(), [overlap.metric(name) for name in names]
    step = {key: after[key] - before[key] for key in after if not key.endswith(("_ms", "at_position"))}

    # One row per verified token: the roots and the selected drafts, no padding.
    assert step["verified_rows"] == step["num_requests"] + step["selected_tokens"]
    assert step["verified_rows"] < step["num_requests"] * (NUM_STEPS + 1)
    assert 2 * step["num_requests"] <= step["drafted_tokens"] <= NUM_STEPS * step["num_requests"]
    # floor(2.5 * batch) in every step
    assert 2.0 * step["num_requests"] <= step["selected_tokens"] <= 2.5 * step["num_requests"]
    increase = [round(b - a) for a, b in zip(metrics_before, metrics_after, strict=True)]
    assert increase == [step["drafted_tokens"], step["selected_tokens"], step["accepted_tokens"]]

    for output in outputs:
        meta = output["meta_info"]
        assert meta["spec_num_proposed_drafts"] <= NUM_STEPS * meta["spec_verify_ct"]
        assert 0 <= meta["spec_num_correct_drafts"] <= meta["spec_num_selected_drafts"] <= meta["spec_num_proposed_drafts"]
        # The prefill's token, then per step the accepted drafts and a bonus; the last step may overshoot.
        emitted = 1 + meta["spec_verify_ct"] + meta["spec_num_correct_drafts"]
        assert 32 <= emitted <= 32 + NUM_STEPS
    # Under overlap a request that ends may ride in one more step, so the process counts at least what requests report.
    assert sum(o["meta_info"]["spec_num_selected_drafts"] for o in outputs) <= step["selected_tokens"]
    assert sum(o["meta_info"]["spec_verify_ct"] for o in outputs) <= step["num_requests"]


def test_a_lone_request_drafts_no_deeper_than_the_capacity(overlap, plain, mixed_prompts):
    """Capacity floor(2.5 * 1) = 2: drafting five tokens would be lost work."""
    output = overlap.generate(mixed_prompts[5], max_new_tokens=40, ignore_eos=True)
    meta = output["meta_info"]
    assert meta["spec_num_proposed_drafts"] == meta["spec_num_selected_drafts"] == 2 * meta["spec_verify_ct"]
    assert output["text"] == plain.generate(mixed_prompts[5], max_new_tokens=40, ignore_eos=True)["text"]


def test_selection_differs_between_requests(overlap, mixed_prompts):
    """Selection lives from requests that differ: some are given far more than others."""
    outputs = overlap.generate_all(mixed_prompts[:32], max_new_tokens=48, ignore_eos=True)
    per_step = [o["meta_info"]["spec_num_selected_drafts"] / o["meta_info"]["spec_verify_ct"] for o in outputs]
    assert max(per_step) > 1.5 * min(per_step)
