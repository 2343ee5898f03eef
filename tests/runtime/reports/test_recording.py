"""What the recorder writes of a step, against plain Python."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.records import make_record
from tetris_sglang.config import TetrisConfig
from tetris_sglang.drafting import Proposal, TreeShape, make_chains, tree_survival
from tetris_sglang.runtime.reports import recording
from tetris_sglang.runtime.reports.recording import StepRecorder
from tetris_sglang.trace import read_trace

NUM_NODES = 4


class Request:
    """Stands for SGLang's Req: hashable by identity."""


@pytest.fixture
def make_recorder(tmp_path):
    def make() -> StepRecorder:
        config = TetrisConfig(4, 2.5, None, record=tmp_path / "run.trace")
        return StepRecorder(
            config,
            draft="eagle",
            num_nodes=NUM_NODES,
            num_slots=8,
            device="cpu",
        )

    return make


@pytest.fixture
def read(tmp_path):
    return lambda: read_trace(tmp_path / "run.trace")


def begin(recorder, requests: list[Request], slots: list[int]) -> None:
    recorder.begin(SimpleNamespace(reqs=requests, req_pool_indices=torch.tensor(slots)), None)


def add_chains(recorder, accept_probs, probs, selected: list[int], num_accepted: list[int], slots: list[int]) -> None:
    accept_probs, probs = torch.tensor(accept_probs), torch.tensor(probs)
    depth = accept_probs.shape[1]
    proposal = make_chains(torch.zeros_like(accept_probs, dtype=torch.int64), accept_probs, probs)
    recorder.observe(make_record(proposal, selected=selected, num_accepted=num_accepted, depth=depth, slots=slots))


def test_chains(make_recorder, read):
    recorder, requests = make_recorder(), [Request(), Request()]
    begin(recorder, requests, [5, 2])
    add_chains(
        recorder,
        [[0.5, 0.5, 1.0], [0.25, 1.0, 0.5]],
        [[0.75, 1.0, 0.5], [0.5, 0.5, 0.5]],
        [3, 1],
        [2, 0],
        [2, 5],
    )
    recorder.write()
    trace = read()
    assert trace.header.items() >= {
        "draft": "eagle", "num_nodes": NUM_NODES, "capacity_per_request": 2.5, "selection": "tetris",
        "calibration": True, "sglang": "0.5.23",
    }.items()  # fmt: skip
    assert "record" not in trace.header
    # The batch's order is not that of the requests' arrival.
    assert trace.requests.tolist() == [1, 0] and trace.selected.tolist() == [3, 1]
    assert trace.depths.tolist() == [3, 3] and trace.node_depths.tolist() == [[1, 2, 3, 0]] * 2
    assert trace.raw.tolist() == [[0.75, 0.75, 0.375, 0], [0.5, 0.25, 0.125, 0]]
    assert trace.survival.tolist() == [[0.5, 0.25, 0.25, 0], [0.25, 0.25, 0.125, 0]]
    assert trace.accepted.tolist() == [[True, True, False, False], [False] * 4]
    assert trace.is_complete.tolist() == [True, False]


def make_tree(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """probs [2, n], parents and depths [2, n + 1] of random trees."""
    draw = np.random.default_rng(seed)
    parents, depths = np.zeros((2, 2, NUM_NODES + 1), dtype=np.int64)
    for tree in range(2):
        for column in range(1, NUM_NODES + 1):
            parents[tree, column] = draw.integers(0, column)
            depths[tree, column] = depths[tree, parents[tree, column]] + 1
    probs = draw.random((2, NUM_NODES)).astype(np.float32)
    return tuple(map(torch.from_numpy, (probs, parents, depths)))


@pytest.mark.parametrize("seed", range(10))
def test_the_raw_survival_of_a_tree_is_the_product_along_the_path(seed):
    probs, parents, depths = make_tree(seed)
    found = tree_survival(probs, parents, int(depths.max()))
    for tree in range(2):
        for node in range(NUM_NODES):
            product, column = 1.0, node + 1
            while column:
                product *= float(probs[tree, column - 1])
                column = int(parents[tree, column])
            assert float(found[tree, node]) == pytest.approx(product, rel=1e-6)


def test_trees(make_recorder, read):
    recorder = make_recorder()
    begin(recorder, [Request()], [3])
    # Node 3 hangs below node 1, node 4 below node 3.
    shape = TreeShape(torch.tensor([[0, 0, 0, 1, 3]]), torch.tensor([[0, 1, 1, 2, 3]]))
    probs, scores = torch.tensor([[0.5, 0.25, 0.5, 0.5]]), torch.tensor([[0.5, 0.375, 0.25, 0.125]])
    proposal = Proposal(torch.tensor([[7, 8, 9, 9]]), scores, probs, shape)
    recorder.observe(
        make_record(
            proposal,
            selected=[3],
            num_accepted=[2],
            depth=3,
            max_depth=3,
            path=[[0, 1, 3, 6]],
            slots=[3],
            width=NUM_NODES + 3,
        )
    )
    recorder.write()
    trace = read()
    assert trace.raw.tolist() == [[0.5, 0.25, 0.25, 0.125]]
    assert trace.survival.tolist() == scores.tolist()
    assert trace.node_depths.tolist() == [[1, 1, 2, 3]] and trace.depths.tolist() == [3]
    assert trace.accepted.tolist() == [[True, False, True, False]] and trace.selected.tolist() == [3]


def test_plain_steps_are_counted_and_nothing_else(make_recorder, read):
    recorder = make_recorder()
    begin(recorder, [Request()], [0])
    for _ in range(2):
        add_chains(recorder, [[0.5]], [[0.5]], [1], [1], [0])
        recorder.observe(make_record(None, selected=[0], num_accepted=[0]))
    recorder.write()
    assert read().steps.tolist() == [0, 2]


def test_a_request_keeps_its_number_when_it_comes_back_in_another_slot(make_recorder, read):
    recorder, first, second = make_recorder(), Request(), Request()
    begin(recorder, [first], [0])
    begin(recorder, [second], [1])
    add_chains(recorder, [[0.5]] * 2, [[0.5]] * 2, [1, 1], [1, 1], [0, 1])
    # The first is retracted; a third takes its slot.
    third = Request()
    begin(recorder, [third, first], [0, 4])
    add_chains(recorder, [[0.5]] * 3, [[0.5]] * 3, [1, 1, 1], [1, 1, 1], [0, 1, 4])
    recorder.write()
    assert read().requests.tolist() == [0, 1, 2, 1, 0]


def test_steps_are_written_in_order_once_they_have_come_in(make_recorder, read, monkeypatch):
    """On CUDA nothing waits for the device."""
    recorder = make_recorder()
    begin(recorder, [Request()], [0])
    copies = []

    def copy_late(*tensors):
        copies.append(SimpleNamespace(tensors=tensors, is_ready=False))
        return copies[-1]

    monkeypatch.setattr(recording, "HostCopy", copy_late)
    for _ in range(3):
        add_chains(recorder, [[0.5]], [[0.5]], [1], [1], [0])
    written = []
    for come_in in (None, 1, 0, 2):
        if come_in is not None:
            copies[come_in].is_ready = True
        recorder.write()
        written.append(read().steps.tolist())
    assert written == [[], [], [0, 1], [0, 1, 2]]


def test_a_full_disk_ends_the_recording_and_nothing_else(make_recorder, read, caplog):
    recorder = make_recorder()
    begin(recorder, [Request()], [0])
    add_chains(recorder, [[0.5]], [[0.5]], [1], [1], [0])
    recorder.write()

    def fail(data: bytes) -> None:
        raise OSError("No space left on device")

    recorder._file = SimpleNamespace(write=fail)
    for _ in range(2):
        add_chains(recorder, [[0.5]], [[0.5]], [1], [1], [0])
        recorder.write()
    assert caplog.text.count("recording ends here") == 1
    assert read().steps.tolist() == [0]
