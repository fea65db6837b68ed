"""hivemind's Float16Compression turns inf into 65504, so that nobody notices that a gradient overflowed."""

import torch
from hivemind.compression import CompressionInfo, Float16Compression

compressor = Float16Compression()
gradient = torch.tensor([1.0, float("inf")])
message = compressor.compress(gradient, CompressionInfo.from_tensor(gradient))
print(f"expected [1.0, inf], observed {compressor.extract(message).tolist()}")
