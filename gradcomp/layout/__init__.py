"""The positions of tensors in a bucket and of factors on the wire, computed from shapes."""

from .blocks import BlockLayout
from .flat import FlatLayout, Matrix, PowerSGDLayout, ShardLayout

__all__ = ["BlockLayout", "FlatLayout", "Matrix", "PowerSGDLayout", "ShardLayout"]
