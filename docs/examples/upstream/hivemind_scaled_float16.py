"""hivemind's ScaledFloat16Compression is less accurate than Float16Compression next to a large element."""

import torch
from hivemind import compression

gradient = torch.zeros(1000)
gradient[0] = 1000.0
info = compression.CompressionInfo.from_tensor(gradient)
for compressor in (compression.Float16Compression(), compression.ScaledFloat16Compression()):
    extracted = compressor.extract(compressor.compress(gradient, info))
    print(f"{compressor!r}: expected 0 for 0, observed {extracted[1].item():.1e}")
