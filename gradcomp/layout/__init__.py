"""The positions of tensors in a bucket and of factors on the wire: arithmetic on shapes."""

from .flat import FlatLayout
from .matrices import LowRankLayout, Matrix

__all__ = ["FlatLayout", "LowRankLayout", "Matrix"]
