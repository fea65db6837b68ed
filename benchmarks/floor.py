"""The least time that a GPU needs for a benchmark's case: bytes over bandwidth, plus launches.

    floor = bytes / memory bandwidth + launches × 2 µs

The bandwidth is the data sheet's, which no kernel reaches in full: `copy_gb_per_s` in a row is the measured
one. 2 µs, from the end of one launch on a stream to the work of the next, is an assumption. The floor leaves
out arithmetic, waiting, and small tensors (P, Q, tables), so most times are above one floor. A time is below
one floor if the L2 cache keeps a bucket between two kernels, or if launches take less than 2 µs.
"""

from __future__ import annotations

import torch

from benchmarks import environment
from gradcomp.plan import GPUS
from gradcomp.plan.hardware import LAUNCH_S

# By the driver's name of a GPU, the name in gradcomp.plan. Other variants, such as an H100 PCIe, have another
# bandwidth.
NAMES = {
    "NVIDIA H200": "H200",
    "NVIDIA H100 80GB HBM3": "H100",
    "NVIDIA A100-SXM4-80GB": "A100",
    "NVIDIA L40S": "L40S",
    "NVIDIA GeForce RTX 4090": "RTX4090",
}
BYTES_PER_S = {gpu.name: gpu.memory_bytes_per_s for gpu in GPUS}


def floor_us(device: torch.device, num_bytes: int, num_launches: int) -> float | None:
    """Return the least time of a call in µs; None on a CPU, and on a GPU that NAMES lacks.

    num_bytes: the fewest bytes that the call reads and writes in device memory.
    num_launches: the fewest kernels that the call launches.
    """
    name = NAMES.get(environment.device_name(device)) if device.type == "cuda" else None
    if name is None:
        return None
    return (num_bytes / BYTES_PER_S[name] + num_launches * LAUNCH_S) * 1e6
