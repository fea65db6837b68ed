"""The least time that a GPU needs for a benchmark's case: bytes over bandwidth, plus launches.

    floor = bytes / memory bandwidth + launches × 2 µs

The bandwidth is the data sheet's, which no kernel reaches in full: `copy_gb_per_s` in a row is the measured
one. 2 µs, from the end of one launch on a stream to the work of the next, is an assumption. The floor leaves
out arithmetic, waiting, and small tensors (P, Q, tables), so most times are above one floor. A time is below
one floor if the L2 cache keeps a bucket between two kernels, or if launches take less than 2 µs.
"""

import torch

from benchmarks import environment

LAUNCH_S = 2e-6
# A GPU's memory bandwidth by the driver's name. Other variants, such as an H100 PCIe, have another one.
BYTES_PER_S = {
    "NVIDIA H200": 4.8e12,
    "NVIDIA H100 80GB HBM3": 3.35e12,
    "NVIDIA A100-SXM4-80GB": 2.039e12,
    "NVIDIA L40S": 0.864e12,
    "NVIDIA GeForce RTX 4090": 1.008e12,
}


def floor_us(device: torch.device, num_bytes: int, num_launches: int) -> float | None:
    """Return the least time of a call in µs; None on a CPU, and on a GPU that BYTES_PER_S lacks.

    num_bytes: the fewest bytes that the call reads and writes in device memory.
    num_launches: the fewest kernels that the call launches.
    """
    bytes_per_s = BYTES_PER_S.get(environment.device_name(device)) if device.type == "cuda" else None
    if bytes_per_s is None:
        return None
    return (num_bytes / bytes_per_s + num_launches * LAUNCH_S) * 1e6
