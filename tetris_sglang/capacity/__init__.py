"""How many draft tokens a step may verify."""

from tetris_sglang.capacity.fixed import FixedCapacity
from tetris_sglang.capacity.policy import CapacityPolicy

__all__ = ["CapacityPolicy", "FixedCapacity"]
