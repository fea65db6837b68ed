"""Arithmetic about bytes and wires: what each hook sends in a step, and how long a network takes for it."""

from gradcomp.compress.compressor import Collective

from .collectives import Network, Traffic, buckets_of, collectives_of, traffic
from .command import load_shapes

__all__ = ["Collective", "Network", "Traffic", "buckets_of", "collectives_of", "load_shapes", "traffic"]
