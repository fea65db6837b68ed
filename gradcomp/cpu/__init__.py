"""The operations in plain torch: what runs on CPU tensors, and on devices that Triton doesn't serve."""
