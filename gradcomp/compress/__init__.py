"""The states and compressors of the hooks, and the interface for your own compressors.

docs/new_compressor.md describes the interface.
"""

from .checkpoint import consolidated_state_dict, load_from_dcp, per_rank_state_dict
from .compressor import BucketSpec, Compressor
from .recording import Recorder
from .state import CompressorState, compress_hook

__all__ = [
    "BucketSpec",
    "Compressor",
    "CompressorState",
    "Recorder",
    "compress_hook",
    "consolidated_state_dict",
    "load_from_dcp",
    "per_rank_state_dict",
]
