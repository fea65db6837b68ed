"""hivemind's 8-bit quantizers give all elements of the outermost code one value: their mean."""

import torch
from hivemind import compression

gradient = torch.zeros(1000)
gradient[:2] = torch.tensor([100.0, 1000.0])
info = compression.CompressionInfo.from_tensor(gradient)
for compressor in (compression.Uniform8BitQuantization(), compression.Quantile8BitQuantization()):
    extracted = compressor.extract(compressor.compress(gradient, info))
    print(f"{compressor!r}: expected about [100.0, 1000.0], observed {extracted[:2].tolist()}")
