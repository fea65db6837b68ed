"""Compression of a model that is sharded with torch's FSDP2: see docs/fsdp.md."""

from .all_gather import compress_all_gather
from .reduce_scatter import compress_reduce_scatter
from .replicas import compress_replicas
from .whole import compress_fsdp

__all__ = ["compress_all_gather", "compress_fsdp", "compress_reduce_scatter", "compress_replicas"]
