"""The operations in plain torch, for CPU tensors and for devices without Triton."""
