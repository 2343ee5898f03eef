"""Several ranks serve one model, and do the same whatever each of them thinks of a step."""

from __future__ import annotations

import pytest

from tests.e2e.client import texts
from tests.e2e.conftest import MIN_SUCCESS, PARALLEL


@pytest.fixture(scope="module", params=PARALLEL)
def parallel(servers, request):
    yield servers.get(request.param)[0]
    servers.stop_one(request.param)


def test_output_is_that_of_no_speculation(plain, parallel, mixed_prompts, request):
    """The second rank's own plans, drafts, selections and samples are wrong (plugins.UNLIKE_RANKS)."""
    each = [{"max_new_tokens": 24 + 12 * (i % 3)} for i in range(32)]
    expected = plain.generate_all(mixed_prompts[:32], each=each)
    actual = parallel.generate_all(mixed_prompts[:32], each=each)
    assert texts(actual) == texts(expected)
    correct, selected = (
        sum(output["meta_info"].get(f"spec_num_{name}_drafts", 0) for output in actual) for name in ("correct", "selected")
    )
    assert correct > MIN_SUCCESS[request.node.callspec.params["parallel"]] * selected > 0


def test_samples_and_grammars(plain, parallel, mixed_prompts):
    """What is drawn, and what may be drawn, is decided once. Of one token to choose from the draw is the greedy one."""
    params = {"max_new_tokens": 24, "ignore_eos": True}
    expected = texts(plain.generate_all(mixed_prompts[:8], **params))
    drawn = parallel.generate_all(mixed_prompts[:8], temperature=0.8, top_k=1, **params)
    assert texts(drawn) == expected
    params = {"max_new_tokens": 16, "regex": r"[0-9]{3}-[0-9]{4}"}
    expected = texts(plain.generate_all(mixed_prompts[:8], **params))
    assert texts(parallel.generate_all(mixed_prompts[:8], **params)) == expected
