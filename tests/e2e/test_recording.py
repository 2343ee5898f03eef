"""What a server records is what it does."""

from __future__ import annotations

from collections import Counter

from tests.e2e.conftest import ARGUMENTS
from tetris_sglang.trace import read_trace


def test_the_recorded_steps_are_those_that_were_served(servers, tetris, mixed_prompts, request):
    """Against /server_info's counters, and against what each request says of itself."""
    name = request.node.callspec.params["tetris"]
    # Idle, so that every step's result is in.
    tetris.flush_cache()
    begun = len(read_trace(servers.trace_path(name)).steps)
    outputs = tetris.generate_all(mixed_prompts[:12], max_new_tokens=24, ignore_eos=True)
    tetris.flush_cache()
    trace, state = read_trace(servers.trace_path(name)), tetris.tetris_state()
    assert trace.selected.sum() == state["selected_tokens"]
    assert trace.accepted.sum() == state["accepted_tokens"]
    assert (trace.node_depths > 0).sum() == state["drafted_tokens"]
    assert len(set(trace.steps.tolist())) == state["num_steps"] - state["plain_steps"]

    counted: dict[int, list[int]] = {}
    rows = zip(
        trace.requests[begun:], trace.selected[begun:], trace.accepted[begun:].sum(axis=1), strict=True
    )
    for number, selected, accepted in rows:
        sums = counted.setdefault(int(number), [0, 0])
        sums[0] += int(selected)
        sums[1] += int(accepted)
    assert len(counted) == len(outputs) and min(counted) > trace.requests[:begun].max(initial=-1)
    if (
        "--disable-overlap-schedule" in ARGUMENTS[name]
    ):  # else a request that has ended may ride in one more step
        said = [
            tuple(o["meta_info"][f"spec_num_{kind}_drafts"] for kind in ("selected", "correct"))
            for o in outputs
        ]
        assert Counter(map(tuple, counted.values())) == Counter(said)
    # Survivals are what selection needs them to be, and accepted nodes hang together.
    assert (trace.survival[:, 1:] <= trace.survival[:, :-1]).all() and (trace.raw <= 1).all()
    depths = (trace.accepted * trace.node_depths).max(axis=1)
    assert (trace.accepted.sum(axis=1) == depths).all()
