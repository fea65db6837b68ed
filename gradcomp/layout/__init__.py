"""The positions of tensors in a bucket and of factors on the wire, computed from shapes."""

from .blocks import BlockLayout
from .flat import FlatLayout, ShardLayout
from .matrices import Matrix, PowerSGDLayout

__all__ = ["BlockLayout", "FlatLayout", "Matrix", "PowerSGDLayout", "ShardLayout"]
