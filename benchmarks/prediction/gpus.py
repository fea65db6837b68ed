"""What a prediction knows of a GPU: rates from its makers' data sheets, at its boost clock."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """A GPU's rates.

    architecture: the compute capability that kernels are compiled for. clock_ghz: the boost clock.
    fp32_lanes, fp64_lanes: FMAs of a multiprocessor in a clock cycle. tf32_tflops, fp64_tflops: of its tensor
    cores, dense; where they have no fp64, that of its lanes.
    """

    name: str
    architecture: int
    num_multiprocessors: int
    clock_ghz: float
    bandwidth_gbs: float
    fp32_lanes: int
    fp64_lanes: int
    tf32_tflops: float
    fp64_tflops: float

    @property
    def clocks(self) -> float:
        """Clock cycles per second."""
        return self.clock_ghz * 1e9


GPUS = (
    Gpu("H200", 90, 132, 1.98, 4800, 128, 64, 494, 67),
    Gpu("H100", 90, 132, 1.98, 3350, 128, 64, 494, 67),
    Gpu("A100 80GB", 80, 108, 1.41, 2039, 64, 32, 156, 19.5),
    Gpu("L40S", 89, 142, 2.52, 864, 128, 2, 183, 1.43),
    Gpu("RTX 4090", 89, 128, 2.52, 1008, 128, 2, 82.6, 1.29),
)
# Of other architectures with fp64 at 1/64 of fp32, for --fp64.
SLOW_FP64 = (
    Gpu("RTX 3090", 86, 82, 1.695, 936, 128, 2, 35.6, 0.556),
    Gpu("RTX 5090", 120, 170, 2.407, 1792, 128, 2, 104.8, 1.64),
)
