"""The positions of tensors in a bucket and of factors on the wire: arithmetic on shapes."""

from .blocks import BlockLayout
from .flat import FlatLayout
from .matrices import LowRankLayout, Matrix

__all__ = ["BlockLayout", "FlatLayout", "LowRankLayout", "Matrix"]
