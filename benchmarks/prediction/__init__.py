"""Predict PowerSGD's time on GPUs from the compiled kernels: `python -m benchmarks.prediction`."""
