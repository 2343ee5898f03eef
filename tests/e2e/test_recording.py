"""What a server records is what it does."""

from __future__ import annotations

import json
from pathlib import Path

from tests.e2e.conftest import ARGUMENTS
from tetris_sglang.trace import read_trace


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_recorded_steps_are_those_that_were_served(servers, tetris, mixed_prompts, request):
    """Against /server_info's counters, and against what each request says of itself."""
    name = request.node.callspec.params["tetris"]
    # Idle, so that every step's result is in.
    tetris.flush_cache()
    begun, num_texts = len(read_trace(servers.trace_path(name)).steps), len(read_lines(servers.text_path(name)))
    # Longer than any run of plain steps.
    outputs = tetris.generate_all(mixed_prompts[:12], max_new_tokens=64, ignore_eos=True)
    tetris.flush_cache()
    texts = read_lines(servers.text_path(name))[num_texts:]
    assert sorted(text["output"] for text in texts) == sorted(output["output_ids"] for output in outputs)
    assert all(len(text["prompt"]) > 1 and text["temperature"] == 0 for text in texts)
    trace, state = read_trace(servers.trace_path(name)), tetris.tetris_state()
    assert trace.selected.sum() == state["selected_tokens"]
    assert trace.accepted.sum() == state["accepted_tokens"]
    assert (trace.node_depths > 0).sum() == state["drafted_tokens"]
    assert len(set(trace.steps.tolist())) == state["num_steps"] - state["plain_steps"]

    seen: dict[int, list[int]] = {}
    rows = zip(trace.requests[begun:], trace.selected[begun:], trace.accepted[begun:].sum(axis=1), strict=True)
    for number, selected, accepted in rows:
        sums = seen.setdefault(int(number), [0, 0])
        sums[0] += int(selected)
        sums[1] += int(accepted)
    assert min(seen) > trace.requests[:begun].max(initial=-1)
    said = [[o["meta_info"][f"spec_num_{kind}_drafts"] for kind in ("selected", "correct")] for o in outputs]
    # A request that was never given a draft may have no row.
    of_the_file, of_the_requests = (sorted(pair for pair in pairs if pair[0]) for pairs in (seen.values(), said))
    if "--disable-overlap-schedule" in ARGUMENTS[name]:
        assert of_the_file == of_the_requests
    else:  # a request that has ended may ride in one more step
        assert len(of_the_file) >= len(of_the_requests) > 0
        assert sum(map(sum, of_the_file)) >= sum(map(sum, of_the_requests))
    # Survivals are what selection needs them to be, and accepted nodes hang together.
    assert (trace.survival[:, 1:] <= trace.survival[:, :-1]).all() and (trace.raw <= 1).all()
    depths = (trace.accepted * trace.node_depths).max(axis=1)
    assert (trace.accepted.sum(axis=1) == depths).all()
