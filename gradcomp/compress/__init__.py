"""What hooks, the Reducer and the wrapper share; and the interface for compressors of your own (docs/new_compressor.md)."""

from .compressor import BucketSpec, Compressor
from .compressor_state import CompressorState, compress_hook

__all__ = ["BucketSpec", "Compressor", "CompressorState", "compress_hook"]
