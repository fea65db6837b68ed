"""The kernels of PowerSGD, and their plan for a bucket."""
