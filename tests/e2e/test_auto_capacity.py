"""The default: a capacity that sets itself, on a real server under a load that rises and falls."""

from __future__ import annotations

import math
import random

from tests.e2e.client import texts
from tests.e2e.conftest import NUM_STEPS

LOADS = (1, 4, 16, 4, 1)
NOT_SPECULATING = {"custom_params": {"tetris": {"speculate": False}}}


def test_output_stays_that_of_no_speculation_while_the_load_rises_and_falls(plain, auto, mixed_prompts):
    """And every step's plan adds up: what is counted per process, per request and exported is one story."""
    before = auto.tetris_state()
    for load in LOADS:
        prompts = mixed_prompts[: 2 * load + 4]
        params = {"max_new_tokens": 48, "ignore_eos": True}
        # The last one does not speculate. Alone it has plain steps, whatever pays on this machine.
        each = [{}] * (len(prompts) - 1) + [NOT_SPECULATING]
        outputs = auto.generate_all(prompts, concurrency=load, each=each, **params)
        assert texts(outputs) == texts(plain.generate_all(prompts, **params))
        for output in outputs:
            meta = output["meta_info"]
            emitted = 1 + meta["spec_verify_ct"] + meta["spec_num_correct_drafts"]
            assert 48 <= emitted <= 48 + NUM_STEPS
            assert meta["spec_num_correct_drafts"] <= meta["spec_num_selected_drafts"] <= meta["spec_num_proposed_drafts"]
    after = auto.tetris_state()
    step = {key: after[key] - before[key] for key in before if key != "accepted_at_position"}
    assert step["verified_rows"] == step["num_requests"] + step["selected_tokens"]
    assert 0 <= step["plain_steps"] <= step["num_steps"]
    assert step["plain_steps"] < step["num_steps"], "the first steps look at the draft"
    assert 0 < step["num_drafting_requests"] < step["num_requests"]
    assert step["plain_steps"] <= step["num_requests"] - step["num_drafting_requests"] <= max(LOADS) * step["plain_steps"]
    at_position = [now - then for now, then in zip(after["accepted_at_position"], before["accepted_at_position"], strict=True)]
    assert sum(at_position) == step["accepted_tokens"]
    assert step["num_drafting_requests"] >= at_position[0] and at_position == sorted(at_position, reverse=True)
    # A step may still be running.
    plain_steps = auto.metric("sglang:tetris_plain_steps_total")
    assert after["plain_steps"] <= plain_steps <= auto.tetris_state()["plain_steps"]


def test_it_says_what_it_believes(auto, mixed_prompts):
    auto.generate_all(mixed_prompts[:8], concurrency=4, max_new_tokens=48, ignore_eos=True)
    state = auto.tetris_state()
    assert 0.1 < state["expected_gain"] < 10
    assert 0 <= state["expected_accepted_per_request"] <= NUM_STEPS
    for name in (
        "expected_plain_step_seconds",
        "expected_speculative_step_seconds",
        "step_time_relative_error",
    ):
        assert math.isfinite(state[name]) and state[name] > 0
    # Greedy acceptance of this draft is higher than its own probabilities; calibration has noticed.
    assert state["calibration_error"] < state["calibration_error_raw"]
    # So has what is learnt of the texts: agreement speaks for a draft, and more than contradiction does. That may have been
    # seen a few times only: where the text's own token takes the draft's place, nobody contradicts.
    assert state["agreement_offset"] > max(0, state["contradiction_offset"])
    for name in ("predicted", "measured"):
        assert 0 < auto.metric(f"sglang:tetris_step_time_{name}_seconds") < 60


def test_passes_are_timed_and_cached(auto):
    """What was timed lies in the cache, for the next server with these models."""
    log = auto.log_path.read_text(errors="replace")
    cached = list(auto.log_path.parent.glob("pass_times/*.json"))
    assert "TETRIS: timed passes in" in log
    assert cached


def test_a_crowd_in_which_nobody_speculates_decodes_plainly(plain, auto, mixed_prompts):
    before = auto.tetris_state()
    outputs = auto.generate_all(
        mixed_prompts[:6],
        max_new_tokens=24,
        ignore_eos=True,
        **NOT_SPECULATING,
    )
    assert texts(outputs) == texts(plain.generate_all(mixed_prompts[:6], max_new_tokens=24, ignore_eos=True))
    after = auto.tetris_state()
    assert after["selected_tokens"] == before["selected_tokens"]
    assert after["num_drafting_requests"] == before["num_drafting_requests"]
    assert after["plain_steps"] - before["plain_steps"] == after["num_steps"] - before["num_steps"] > 0


def test_requests_that_fill_the_context_leave_their_neighbours_alone(plain, auto, mixed_prompts):
    """The last steps reserve more slots than the context has left; a request's row holds them. Comes last: such texts are no
    lesson for what the other tests look at."""
    context_len, rng = 2048, random.Random(0)
    full = [[rng.randrange(300, 2000) for _ in range(context_len - 2 - 40)] for _ in range(3)]
    prompts = [full[0], *mixed_prompts[:2], full[1], *mixed_prompts[2:4], full[2], *mixed_prompts[4:6]]
    params = {"max_new_tokens": 40, "ignore_eos": True}
    outputs = auto.generate_all(prompts, concurrency=len(prompts), **params)
    assert texts(outputs) == texts(plain.generate_all(prompts, **params))
    assert [o["meta_info"]["completion_tokens"] for o in outputs] == [40] * len(prompts)
    auto.flush_cache()
    assert auto.is_alive()
