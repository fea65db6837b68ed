"""Every tolerance of the tests, with its reason.

UNIT_ROUNDOFF[dtype]: the largest relative error of rounding once to nearest, 2^-p for p significant bits.
SMALLEST[dtype]: the spacing of subnormal numbers, the absolute error below the normal range.
"""

import torch

UNIT_ROUNDOFF = {
    torch.float64: 2.0**-53,
    torch.float32: 2.0**-24,
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-8,
}
SMALLEST = {dtype: torch.finfo(dtype).smallest_normal * 2 * UNIT_ROUNDOFF[dtype] for dtype in UNIT_ROUNDOFF}


def scaled_copy(source: torch.dtype, result: torch.dtype) -> float:
    """Relative error of round(scale · x): the scale and the product round in the arithmetic's dtype (fp64
    if either side is fp64, else fp32), the result once more (from fp64
    to 16 bits by way of fp32: in torch always, in the kernels to bf16).
    """
    arithmetic = torch.float64 if torch.float64 in (source, result) else torch.float32
    detour = UNIT_ROUNDOFF[torch.float32] if source == torch.float64 else 0.0
    return 1.01 * (UNIT_ROUNDOFF[result] + 2 * UNIT_ROUNDOFF[arithmetic] + detour)


def average(wire: torch.dtype, world_size: int, magnitude: torch.Tensor) -> torch.Tensor:
    """Error of a mean of world_size values up to this magnitude, summed in the dtype on the wire: each
    addend and each partial sum is rounded once.
    """
    return 1.01 * 2 * world_size * (UNIT_ROUNDOFF[wire] * magnitude + SMALLEST[wire])
