"""The kernels of the quantized all-reduce, and their plan for a bucket."""
