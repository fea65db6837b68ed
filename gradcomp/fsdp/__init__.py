"""Compression between the replicas of a model that is sharded with torch's FSDP2: see docs/fsdp.md."""

from .replicas import compress_replicas

__all__ = ["compress_replicas"]
