"""What ranks decide together: the first one's word counts, whatever the others have."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from tetris_sglang.capacity import (
    AcceptCurves,
    AutoCapacity,
    DraftLimits,
    PassTimes,
    StepPlan,
    StepTimeModel,
    capacity_shares,
)
from tetris_sglang.runtime.planning import pass_timing
from tetris_sglang.runtime.planning.planner import StepPlanner
from tetris_sglang.runtime.ranks import Ranks


class Group:
    """A rank's side of a group: the first one's messages reach the second in order."""

    def __init__(self, rank: int, messages: list) -> None:
        self.rank_in_group, self.world_size, self._messages = rank, 2, messages

    first_rank = 4

    @property
    def cpu_group(self):
        return self

    def pass_on(self, value):
        if self.rank_in_group:
            return self._messages.pop(0)
        self._messages.append(value)
        return value

    def broadcast(self, tensor: Tensor, src: int) -> None:
        assert src == 0, "within the group"
        tensor.copy_(self.pass_on(tensor.clone()))


def broadcast_object_list(values: list, src: int, group: Group) -> None:
    assert src == group.first_rank, "of all ranks"
    values[:] = [group.pass_on(value) for value in values]


@pytest.fixture
def pair(monkeypatch) -> tuple[Ranks, Ranks]:
    monkeypatch.setattr(torch.distributed, "broadcast_object_list", broadcast_object_list)
    messages = []
    return Ranks(Group(0, messages)), Ranks(Group(1, messages))


def test_a_rank_alone_asks_nobody():
    alone = Ranks(SimpleNamespace(world_size=1, rank_in_group=0))
    tensors = [torch.arange(3)]
    assert alone.count == Ranks().count == 1 and alone.is_first
    assert alone.agree("mine") == "mine" and alone.share(tensors)[0] is tensors[0]


def test_the_first_ones_word_counts(pair):
    first, second = pair
    assert (first.count, first.is_first, second.is_first) == (2, True, False)
    assert [first.agree((3, 4)), second.agree((5, 6))] == [(3, 4), (3, 4)]


def test_settings_that_differ_are_refused():
    settings = ["k = 2", "k = 2"]
    group = SimpleNamespace(world_size=2, all_gather_object=lambda mine: settings)
    Ranks(group).require_alike("k = 2", "TETRIS's settings")
    settings[1] = "k = 3"
    with pytest.raises(ValueError, match=r"TETRIS's settings differ between the ranks of --tp-size 2: .*k = 3"):
        Ranks(group).require_alike("k = 2", "TETRIS's settings")
    Ranks().require_alike("k = 2", "TETRIS's settings")


def test_tensors_are_shared_in_one_message_and_keep_shapes_and_types(pair):
    first, second = pair
    ours = [torch.tensor([2, 0], dtype=torch.int32), torch.tensor([[1 << 40, 5], [7, 9]])]
    theirs = [torch.tensor([1, 1], dtype=torch.int32), torch.zeros((2, 2), dtype=torch.int64)]
    first.share(ours)
    got = second.share(theirs)
    for mine, other in zip(got, ours, strict=True):
        assert mine.dtype == other.dtype and torch.equal(mine, other)
    assert theirs[1].sum() == 0, "what was given stays"


def test_plans_are_the_first_ones(pair):
    """The second rank's clock says something else."""
    plans = []
    for ranks, depth in zip(pair, (4, 2), strict=True):
        policy = AutoCapacity(
            StepTimeModel(PassTimes({1: 1e-2}, {1: 1e-3}, {1: 1e-3}), max_rows=256, max_batch_size=32),
            AcceptCurves(4, capacity_shares(4)),
        )
        policy.choose = lambda *_, depth=depth: StepPlan(depth, 3)
        limits = DraftLimits(depths=range(1, 5), count_nodes=lambda depth: depth)
        metrics = SimpleNamespace(set=lambda *_: None)
        planner = StepPlanner(policy, limits, metrics, "cpu", ranks)
        plans.append(planner.plan(SimpleNamespace(reqs=[None] * 2, seq_lens_sum=0)))
    assert plans == [StepPlan(4, 3)] * 2


def test_times_are_the_first_ones_and_only_it_writes(pair, monkeypatch, tmp_path):
    """A second machine's cache may hold what the first one's does not."""
    path, ours, theirs = tmp_path / "times.json", PassTimes({1: 1e-2}), PassTimes({1: 5e-2})
    monkeypatch.setattr(pass_timing, "_cache_path", lambda *_: path)
    arguments = {"num_draft_tokens": 3, "max_rows": 8}
    first, second = pair
    monkeypatch.setattr(pass_timing, "time_passes", lambda *_, **__: ours)
    assert pass_timing.load_or_time_passes(None, None, ranks=first, **arguments) == ours
    path.unlink()
    monkeypatch.setattr(pass_timing, "time_passes", lambda *_, **__: theirs)
    assert pass_timing.load_or_time_passes(None, None, ranks=second, **arguments) == ours
    assert not path.exists()
