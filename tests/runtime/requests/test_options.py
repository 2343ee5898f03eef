"""What requests may ask of speculation: how it is read, and which steps it changes."""

from __future__ import annotations

import gc
import math
from types import SimpleNamespace

import msgspec
import pytest
import torch

from tetris_sglang.portable_cpu.activate import activate

activate()  # as SGLang does, before its modules are imported

from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams

from tetris_sglang.runtime.operations import get_operations
from tetris_sglang.runtime.requests.options import DEFAULT, RequestOptions, parse
from tetris_sglang.runtime.requests.weights import RequestWeights
from tetris_sglang.selection import survival_from_probs

# -- reading ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("custom_params", "options"),
    [
        (None, DEFAULT),
        ({}, DEFAULT),
        ({"thinking_budget": 3, "__req__": object()}, DEFAULT),
        ({"tetris": None}, DEFAULT),
        ({"tetris": {}}, DEFAULT),
        ({"tetris": {"speculate": None, "weight": None}}, DEFAULT),
        ({"tetris": {"speculate": True, "weight": 1}}, DEFAULT),
        ({"tetris": {"speculate": False}}, RequestOptions(speculate=False)),
        ({"tetris": {"weight": 4}, "other": "x"}, RequestOptions(weight=4.0)),
        ({"tetris": {"weight": 64}}, RequestOptions(weight=64.0)),
        ({"tetris": {"weight": 1 / 64}}, RequestOptions(weight=1 / 64)),
        ({"tetris": {"speculate": False, "weight": 2.5}}, RequestOptions(False, 2.5)),
    ],
)
def test_what_is_read(custom_params, options):
    assert parse(custom_params) == options
    assert isinstance(parse(custom_params).weight, float)


@pytest.mark.parametrize("value", [0, 0.0156, -1, 64.01, 10**400, math.nan, math.inf, "4", True, [1], {}])
def test_weights_that_are_refused(value):
    with pytest.raises(ValueError, match="give a number from 1/64 to 64, or leave it out") as error:
        parse({"tetris": {"weight": value}})
    assert f"custom_params.tetris.weight={value!r}: " in str(error.value)


@pytest.mark.parametrize("value", [0, 1, "false", "no", [], 0.0])
def test_speculate_that_is_refused(value):
    with pytest.raises(ValueError, match="give true or false, or leave it out") as error:
        parse({"tetris": {"speculate": value}})
    assert f"custom_params.tetris.speculate={value!r}: " in str(error.value)


@pytest.mark.parametrize(
    ("custom_params", "message"),
    [
        ({"tetris": {"wieght": 2}}, "custom_params.tetris.wieght=2: no such field. Did you mean weight?"),
        ({"tetris": {"Speculate": False}}, "Did you mean speculate? Known: speculate, weight."),
        ({"tetris": {"zzz": 1}}, "custom_params.tetris.zzz=1: no such field. Known: speculate, weight."),
        ({"tetris_weight": 2}, "custom_params.tetris_weight=2: no such field. TETRIS's are given as"),
        ({"Tetris": {"weight": 2}}, "custom_params.Tetris="),
        ({"tetris": False}, "custom_params.tetris=False: give an object"),
        ({"tetris": [{"weight": 2}]}, "give an object"),
        ([1], "custom_params=[1]: give an object"),
        ("tetris", "custom_params='tetris': give an object"),
    ],
)
def test_what_nobody_can_mean_is_named(custom_params, message):
    with pytest.raises(ValueError, match="custom_params") as error:
        parse(custom_params)
    assert message in str(error.value)


def test_sglang_carries_the_fields_to_the_scheduler():
    """Under SGLANG_USE_PICKLE_IPC=0, the stricter of its two ways: unpacked against the declared types."""
    custom_params = {"tetris": {"speculate": False, "weight": 0.5}}
    packed = msgspec.msgpack.encode(SamplingParams(custom_params=custom_params))
    assert msgspec.msgpack.decode(packed, type=SamplingParams).custom_params == custom_params


# -- running requests ---------------------------------------------------------------------------------------------


class FakeReq:
    """Compared by identity and weakly referable, as SGLang's."""

    def __init__(self, **options) -> None:
        self.sampling_params = SimpleNamespace(custom_params={"tetris": options} if options else None)


def begin(weights: RequestWeights, reqs: list[FakeReq]) -> None:
    weights.begin(SimpleNamespace(reqs=reqs, req_pool_indices=torch.arange(len(reqs))), None)


def test_requests_are_told_apart_as_ours_here():
    assert Req.__eq__ is object.__eq__ and Req.__hash__ is object.__hash__
    assert hasattr(Req, "__weakref__")


def test_weights_stand_in_the_order_of_the_step():
    plain, silent, heavy = FakeReq(), FakeReq(speculate=False, weight=8), FakeReq(weight=4)
    weights = RequestWeights("cpu")
    begin(weights, [plain, silent])
    begin(weights, [heavy, heavy])  # chunks, or a retracted request that comes back
    wishes = weights.get_wishes([heavy, plain, silent, plain])
    assert wishes.weights.tolist() == [4, 1, 0, 1]
    assert wishes.weights.dtype == torch.float32
    assert (wishes.num_speculating, wishes.mean_weight) == (3, 2.0)
    assert weights.get_wishes([silent, silent]).num_speculating == 0


def test_a_step_without_wishes_is_not_adjusted():
    plain, heavy = FakeReq(), FakeReq(weight=4)
    weights = RequestWeights("cpu")
    begin(weights, [plain, FakeReq(weight=1.0, speculate=True)])
    assert weights.get_wishes([plain]) is None
    begin(weights, [heavy])
    assert weights.get_wishes([plain, plain]) is None
    assert weights.get_wishes([plain, heavy]) is not None


def test_steps_look_at_no_request_unless_one_with_a_wish_is_alive():
    class Untouchable(list):
        def __iter__(self):
            raise AssertionError("looked at")

    weights = RequestWeights("cpu")
    heavy = FakeReq(weight=4)
    begin(weights, [FakeReq(), heavy])
    with pytest.raises(AssertionError, match="looked at"):
        weights.get_wishes(Untouchable())
    del heavy  # SGLang keeps no finished request
    gc.collect()
    assert weights.get_wishes(Untouchable()) is None


# -- selection ----------------------------------------------------------------------------------------------------

SURVIVAL = survival_from_probs(torch.tensor([[0.9, 0.9, 0.9], [0.5, 0.5, 0.5], [0.8, 0.2, 0.0]]))


def select(weights: list[float], capacity: int, selection: str = "tetris") -> list[int]:
    operations = get_operations("cpu", selection)
    return operations.select_drafts(SURVIVAL, capacity, torch.tensor(weights)).tolist()


@pytest.mark.parametrize(
    ("weights", "capacity", "draft_lens"),
    [
        ([1, 1, 1], 4, [3, 0, 1]),
        ([1, 64, 1], 4, [1, 3, 0]),
        ([1, 4, 1], 4, [2, 2, 0]),
        ([1 / 64, 1, 1], 5, [0, 3, 2]),
        ([0, 1, 1], 4, [0, 2, 2]),
        ([0, 1, 1], 6, [0, 3, 3]),
        ([0, 0, 1 / 64], 3, [0, 0, 3]),
        ([0, 0, 0], 0, [0, 0, 0]),
    ],
)
def test_weighted_selection(weights, capacity, draft_lens):
    assert select(weights, capacity) == draft_lens


@pytest.mark.parametrize("selection", ["uniform", "random"])
def test_baselines_give_nothing_to_requests_that_opted_out(selection):
    draft_lens = select([1, 0, 64], 5, selection)
    assert draft_lens[1] == 0 and sum(draft_lens) == 5


def test_a_batch_without_wishes_goes_the_ordinary_way():
    operations = get_operations("cpu", "tetris")._replace(select=lambda *arguments: arguments)
    survival, capacity, weights = operations.select_drafts(SURVIVAL, 4)
    assert torch.equal(survival, SURVIVAL) and capacity == 4 and weights is None
