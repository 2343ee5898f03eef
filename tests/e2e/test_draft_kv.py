"""The draft's KV cache is right after prefix hits, chunked prefill, retraction and resumption.

In the first tests the draft is the target, and all it drafts is verified: every chain must be accepted to its end, and so
must the target's own chain within every tree. (Rarely a near-tie is decided differently by a pass of another shape.) Sampled
ones, too: draft and target draw with the same noise.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.e2e.client import texts
from tests.e2e.conftest import FEATURED, MIN_SUCCESS, NUM_STEPS, ROOMY, SWITCHING
from tetris_sglang.trace import Trace, read_trace

ALMOST_ALL = 0.98


@pytest.fixture
def success_rate(request, servers):
    """Share of the draft's tokens that could be accepted, between two readings."""

    def measure(before: dict, after: dict) -> float:
        if request.node.callspec.params["perfect"] == "perfect_switching":
            return accepted_of_model(read_trace(servers.trace_path("perfect_switching")), before, after)
        # Every step verifies whole chains.
        possible = NUM_STEPS * (after["num_requests"] - before["num_requests"])
        assert possible > 0
        return (after["accepted_tokens"] - before["accepted_tokens"]) / possible

    return measure


def accepted_of_model(trace: Trace, before: dict, after: dict) -> float:
    """Of what was verified."""
    steps = slice(*trace.steps.searchsorted([before["num_steps"], after["num_steps"]]))
    num_drafted = len(np.unique(trace.steps[steps]))
    assert num_drafted < 0.95 * (after["num_steps"] - before["num_steps"]), "no step did without the draft: nothing was tested"
    verified, accepted = trace.selected[steps].sum(), trace.accepted[steps].sum()
    assert verified > 40
    # These are few tokens: a near-tie among them is no sign.
    return 1 - max(verified - accepted - 1, 0) / verified


def test_every_draft_is_accepted_after_chunked_prefill(plain, perfect, success_rate, mixed_prompts):
    """Chunks of 64 tokens: long prompts are prefilled in several passes."""
    long_prompts = sorted(mixed_prompts, key=len)[-8:]
    params = {"concurrency": 2, "max_new_tokens": 32, "ignore_eos": True}
    perfect.flush_cache()
    outputs = perfect.generate_all(long_prompts, **params)
    assert max(o["meta_info"]["prompt_tokens"] for o in outputs) > 128
    assert texts(outputs) == texts(plain.generate_all(long_prompts, **params))
    perfect.flush_cache()
    before = perfect.tetris_state()
    perfect.generate_all(long_prompts, **params)
    assert success_rate(before, perfect.tetris_state()) > ALMOST_ALL


def test_every_draft_is_accepted_after_radix_hits(plain, perfect, success_rate, prompts):
    """Prompts that share prefixes, and conversations that go on from their own output."""
    perfect.flush_cache()
    base = max((p["text"] for p in prompts if p["kind"] == "prose"), key=len)
    family = [base + suffix for suffix in (" The", " In", "\n\n", " It", " (see")]
    perfect.generate(base, max_new_tokens=16, ignore_eos=True)
    outputs = perfect.generate_all(family, concurrency=2, max_new_tokens=24, ignore_eos=True)
    assert all(o["meta_info"]["cached_tokens"] > 20 for o in outputs)
    assert texts(outputs) == texts(plain.generate_all(family, max_new_tokens=24, ignore_eos=True))
    before = perfect.tetris_state()
    for turn in range(4):
        family = [prompt + output["text"] for prompt, output in zip(family, outputs, strict=True)]
        outputs = perfect.generate_all(family, concurrency=2, max_new_tokens=17 + turn, ignore_eos=True)
        assert all(o["meta_info"]["cached_tokens"] > 20 for o in outputs)
    assert success_rate(before, perfect.tetris_state()) > ALMOST_ALL
    outputs = perfect.generate_all(family, concurrency=2, max_new_tokens=12, ignore_eos=True)
    assert texts(outputs) == texts(plain.generate_all(family, max_new_tokens=12, ignore_eos=True))


def test_retraction_and_resumption_are_exact(plain, perfect, success_rate, mixed_prompts):
    """More tokens than the pool holds: requests are retracted and resumed, and nothing shows.

    Not ignore_eos: SGLang then reserves the whole output beforehand and never has to retract.
    """
    params = {"max_new_tokens": 220, "min_new_tokens": 220}
    perfect.flush_cache()
    before = perfect.tetris_state()
    retractions_before = _count_retractions(perfect)
    expected = plain.generate_all(mixed_prompts[:14], **params)
    actual = perfect.generate_together(mixed_prompts[:14], **params)
    assert _count_retractions(perfect) > retractions_before, "the pool was large enough: nothing was tested"
    assert texts(actual) == texts(expected)
    assert success_rate(before, perfect.tetris_state()) > 0.92


def test_every_sampled_draft_is_accepted(perfect, success_rate, mixed_prompts, request):
    """At the target's own probabilities, after prefill in chunks and after prefix hits, in batches with greedy requests."""
    params = {"temperature": 1, "max_new_tokens": 64, "ignore_eos": True}
    long_prompts = sorted(mixed_prompts, key=len)[-8:]
    perfect.flush_cache()
    written = []
    for _ in range(2):
        before = perfect.tetris_state()
        outputs = perfect.generate_all(long_prompts, concurrency=3, **params, each=[{}, {}, {"temperature": 0}, {}] * 2)
        # One near-tie can cost a step's whole chain, and these are few steps.
        assert success_rate(before, perfect.tetris_state()) > 0.95
        written.append(texts(outputs))
    greedy = [first == second for first, second in zip(*written, strict=True)]
    assert greedy == [False, False, True, False] * 2, "the same text twice was not drawn"


# -- every kind of draft -------------------------------------------------------------------------------------------


@pytest.fixture
def cramped(tetris, request):
    """The servers with tiny pools and short chunks."""
    if request.node.callspec.params["tetris"] in ROOMY:
        pytest.skip("its pool is large; the same draft runs in a tiny one above")
    return tetris


def test_chunks_and_prefix_hits_keep_output_and_acceptance(plain, cramped, mixed_prompts, request):
    """The same long prompts prefilled in chunks, and again with all but their last tokens from the cache.

    One request at a time, and fixed plans: then what is accepted depends on its own draft KV, and must not become less.
    """
    is_switching = request.node.callspec.params["tetris"] in SWITCHING
    long_prompts = sorted(mixed_prompts, key=len)[-6:]
    params = {"concurrency": 1, "max_new_tokens": 32, "ignore_eos": True}
    expected = texts(plain.generate_all(long_prompts, **params))
    accepted = []
    cramped.flush_cache()
    for is_cached in (False, True):
        outputs = cramped.generate_all(long_prompts, **params)
        assert texts(outputs) == expected
        for output in outputs:
            meta = output["meta_info"]
            assert meta["prompt_tokens"] > 64
            # Heads key the cache by pairs of tokens, and the last one is always computed.
            assert (meta["cached_tokens"] >= meta["prompt_tokens"] - 2) == is_cached
        accepted.append([output["meta_info"]["spec_num_correct_drafts"] for output in outputs])
    first, again = (sum(numbers) for numbers in accepted)
    assert first > 0
    # Calibration has learnt a little in between, and may choose a token more or less.
    assert is_switching or again >= 0.9 * first - 2


def test_conversations_go_on_from_cached_outputs(plain, cramped, prompts):
    """Each turn's prompt is the turn before with its output, which the cache holds with the draft's KV."""
    base = max((p["text"] for p in prompts if p["kind"] == "prose"), key=len)
    conversations = [base + suffix for suffix in (" The", " In", "\n\n", " It")]
    for turn in range(4):
        params = {"concurrency": 2, "max_new_tokens": 9 + turn, "ignore_eos": True}
        outputs = cramped.generate_all(conversations, **params)
        assert texts(outputs) == texts(plain.generate_all(conversations, **params))
        if turn:
            assert all(o["meta_info"]["cached_tokens"] > 20 for o in outputs)
        conversations = [c + o["text"] for c, o in zip(conversations, outputs, strict=True)]


def test_retraction_shows_nowhere(plain, cramped, mixed_prompts, request):
    params = {"max_new_tokens": 180, "min_new_tokens": 180}
    cramped.flush_cache()
    before, retractions_before = cramped.tetris_state(), _count_retractions(cramped)
    expected = plain.generate_all(mixed_prompts[:14], **params)
    assert texts(cramped.generate_together(mixed_prompts[:14], **params)) == texts(expected)
    after = cramped.tetris_state()
    assert _count_retractions(cramped) > retractions_before, "the pool was large enough: nothing was tested"
    accepted, selected = (after[f"{n}_tokens"] - before[f"{n}_tokens"] for n in ("accepted", "selected"))
    assert accepted > MIN_SUCCESS[request.node.callspec.params["tetris"]] * selected


def test_penalties_go_on_counting_after_a_retraction(plain, cramped, mixed_prompts, request):
    if request.node.callspec.params["tetris"] not in FEATURED:
        pytest.skip("rows are counted in one place, whatever drafts")
    # Not with repetition_penalty: which of the two SGLang applies first without overlap scheduling changes from start to start.
    params = {"max_new_tokens": 120, "min_new_tokens": 120, "frequency_penalty": 1.5}
    cramped.flush_cache()
    retractions_before = _count_retractions(cramped)
    expected = plain.generate_all(mixed_prompts[:18], **params)
    assert texts(cramped.generate_together(mixed_prompts[:18], **params)) == texts(expected)
    assert _count_retractions(cramped) > retractions_before, "the pool was large enough: nothing was tested"


def _count_retractions(client) -> int:
    return client.log_path.read_text(errors="replace").count("Retract requests")
