"""Compression of the gradients of a model that is sharded with torch's FSDP2: see docs/fsdp.md."""

from .reduce_scatter import compress_reduce_scatter
from .replicas import compress_replicas

__all__ = ["compress_reduce_scatter", "compress_replicas"]
