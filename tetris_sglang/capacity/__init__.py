"""How deep a step drafts and how many draft tokens it may verify."""

from tetris_sglang.capacity.accept_curves import AcceptCurves, capacity_shares, measure_curves
from tetris_sglang.capacity.auto import AutoCapacity
from tetris_sglang.capacity.fixed import FixedCapacity
from tetris_sglang.capacity.policy import CapacityPolicy, DraftLimits, StepPlan
from tetris_sglang.capacity.step_time import PassTimes, StepShape, StepTimeModel

__all__ = [
    "AcceptCurves",
    "AutoCapacity",
    "CapacityPolicy",
    "DraftLimits",
    "FixedCapacity",
    "PassTimes",
    "StepPlan",
    "StepShape",
    "StepTimeModel",
    "capacity_shares",
    "measure_curves",
]
