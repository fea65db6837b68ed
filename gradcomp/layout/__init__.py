"""Where things lie in a bucket, on the wire and in private memory: arithmetic on shapes, no tensors' contents."""

from .flat import FlatLayout
from .matrices import LowRankLayout, Matrix

__all__ = ["FlatLayout", "LowRankLayout", "Matrix"]
