"""What a prediction knows of devices: GPUs from their makers' data sheets, one CPU from measurements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .candidates import Candidate, Payload

# The parts of a data sheet's numbers that kernels reach: assumptions, not measurements.
BANDWIDTH_UTILISATION = 0.8
LAUNCH_S = 2e-6  # from the end of one launch on a stream to the work of the next
ADAM_BYTES = 28  # per parameter: weight, gradient and two moments are read, all but the gradient written


@dataclass(frozen=True)
class Gpu:
    """A GPU: its memory's bandwidth, and the dense bf16 rate of its tensor cores."""

    name: str
    memory_bytes_per_s: float
    peak_flops: float
    is_inline: bool = False

    def local_s(self, hook: Candidate, payload: Payload, numel: int) -> float:
        """Return the time of the hook's own kernels for one bucket, from the bytes that they move."""
        moved_s = payload.moved_bytes / (BANDWIDTH_UTILISATION * self.memory_bytes_per_s)
        return moved_s + payload.num_launches * LAUNCH_S

    def compute_s(self, flops: float, utilisation: float) -> float:
        """Return the time of a forward pass, say, of so many operations."""
        return flops / (utilisation * self.peak_flops)

    def optimizer_s(self, numel: int) -> float:
        return ADAM_BYTES * numel / (BANDWIDTH_UTILISATION * self.memory_bytes_per_s)


@dataclass(frozen=True)
class MeasuredDevice:
    """A device whose hooks have been timed.

    local_ns: the hook's own work, in nanoseconds per element of the gradients, by its name.
    is_inline: whether hooks compress on backward's thread, as on a CPU, with only collectives beside it.
    flops: operations per second in training. optimizer_ns: per parameter.
    """

    name: str
    local_ns: Mapping[str, float]
    is_inline: bool = True
    flops: float = 0.0
    optimizer_ns: float = 0.0

    def local_s(self, hook: Candidate, payload: Payload, numel: int) -> float:
        """Return the time of the hook's own work on one bucket.

        Raises ValueError for a hook that hasn't been timed.
        """
        if hook.name not in self.local_ns:
            raise ValueError(
                f"hook {hook.name} has not been timed on {self.name}; there are {', '.join(self.local_ns)}"
            )
        return self.local_ns[hook.name] * numel / 1e9

    def compute_s(self, flops: float, utilisation: float) -> float:
        """Return the time of so many operations at the measured rate, which includes the utilisation."""
        return flops / self.flops

    def optimizer_s(self, numel: int) -> float:
        return self.optimizer_ns * numel / 1e9


Device = Gpu | MeasuredDevice

GPUS = (
    Gpu("H200", 4.8e12, 989e12),
    Gpu("H100", 3.35e12, 989e12),
    Gpu("A100", 2.039e12, 312e12),
    Gpu("L40S", 0.864e12, 362e12),
    Gpu("RTX4090", 1.008e12, 165e12),
)

# Measured with `python -m gradcomp.bench.local_work` on an x86-64 core with AVX-512, one thread, torch 2.13,
# in ns per element of two transformer blocks of width 512, as on 4 ranks, on a quiet machine. The optimizer's
# is an assumption.
CPU = MeasuredDevice(
    "cpu",
    {
        "none": 0.0,
        "bf16": 0.7,
        "fp16": 0.7,
        "int8": 2.4,
        "int4": 5.5,
        "powersgd:16": 3.1,
        "powersgd:16:bf16": 3.2,
        "powersgd:16:int8": 3.6,
        "powersgd:8": 2.6,
        "powersgd:8:bf16": 2.7,
        "powersgd:8:int8": 2.9,
        "powersgd:4": 2.1,
        "powersgd:4:bf16": 2.2,
        "powersgd:4:int8": 2.5,
        "powersgd:1": 1.4,
        "powersgd:1:bf16": 1.4,
        "powersgd:1:int8": 1.6,
    },
    flops=95e9,
    optimizer_ns=2.0,
)
