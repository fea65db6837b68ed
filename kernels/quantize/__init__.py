"""The kernels of the quantized all-reduce, and the tables of their programs."""
