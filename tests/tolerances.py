"""Every tolerance of the tests, with its reason.

UNIT_ROUNDOFF[dtype] is the largest relative error of rounding once to nearest, 2^-p for p significant bits.
SMALLEST[dtype] is the spacing of subnormal numbers, the absolute error below the normal range.
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
    """Return the relative error of round(scale · x).

    The scale and the product round in the arithmetic's dtype: fp64 if either side is fp64, else fp32. The
    result rounds once more. From fp64 to 16 bits it also rounds to fp32 before: in torch always, in the
    kernels if the result is bf16.
    """
    arithmetic = torch.float64 if torch.float64 in (source, result) else torch.float32
    detour = UNIT_ROUNDOFF[torch.float32] if source == torch.float64 else 0.0
    return 1.01 * (UNIT_ROUNDOFF[result] + 2 * UNIT_ROUNDOFF[arithmetic] + detour)


def average(wire: torch.dtype, world_size: int, magnitude: torch.Tensor) -> torch.Tensor:
    """Return the error of a mean of world_size values up to this magnitude, summed in the dtype on the wire.

    Each addend and each partial sum is rounded once.
    """
    return 1.01 * 2 * world_size * (UNIT_ROUNDOFF[wire] * magnitude + SMALLEST[wire])


def backward_noise() -> float:
    """Return how much larger errors may be because two backwards of one graph round differently.

    A GPU's libraries may sum in another order each time: 16 times the rounding of a mean.
    """
    return 16.0 if torch.cuda.is_available() else 1.0


# PowerSGD. One step of float32 from an identical state: products of up to 300 terms and an
# orthonormalization. Measured 4e-7 against torch, 2e-7 against the oracle.
ONE_STEP = 1e-5
# The new Q's span. The spread of Q's singular values magnifies its error. Measured 4e-7.
ONE_STEP_SPAN = 1e-5
# One step in float64. Measured 7e-16. Tests allow Q's span 100 times as much, for its condition number.
ONE_STEP_FP64 = 1e-12
# The part of a gradient of rank ≤ r that one step in float32 leaves out: P's rounding error times P's
# condition number, a few hundred where random directions replace lost ones. Measured 2e-6 to 4e-5.
RECOVERY = 1e-4
# Two ways to orthonormalize with epsilon 1e-8 added to columns of length about 1. Measured 3e-7.
EPSILON_STEP = 1e-5
# One quantized step in float32 from an identical state, relative to a block's largest value: sums of a few
# products. Measured 2e-7.
QUANTIZED_STEP = 1e-5
# The fraction of elements where the hook may choose another code: its sums and quotients are rounded to fp32,
# so one within 2^-24 of halfway between two codes may get either. Measured 0.
UNLIKE_BLOCKS = 1e-3
# The norm of the hook's rounding error, relative to exact arithmetic's rounding error. Of two codes at equal
# distance, either loses as much. Measured 1.0000003.
QUANTIZED_LOSS = 1.001
# Five steps of docs/examples/simple.py in float64, compared with the hooks. The spans have other bases, and
# sums are in another order. Measured 4e-15 for PowerSGD, and 0 for 8 bits.
SIMPLE_STEPS = 1e-12
# One step with the gradient, P, Q and the result rounded to 16 bits: four roundings. Measured 1.2.
SIXTEEN_BIT_ROUNDINGS = 4
# A mean of errors, rounded to float32 once. Measured 3e-8; after one more step, ten times as much.
MEAN_ERROR = 1e-6

# Relative error (Frobenius) of one PowerSGD step from an identical state, times P's condition number. fp32:
# sums of up to a thousand products in fp32 and one rounding each of M, P, Q and the output, measured 1e-7 to
# 6e-7. 16 bits: M, P, Q and the output are rounded. P's rounding rotates P's span, in proportion to the
# condition number.
POWERSGD_STEP = {
    torch.float64: 1e-12,
    torch.float32: 3e-6,
    torch.float16: 4 * 2.0**-11,
    torch.bfloat16: 4 * 2.0**-8,
}
# Relative error of a single PowerSGD stage: one rounding of its result, and its sums.
POWERSGD_STAGE = {
    torch.float64: 1e-12,
    torch.float32: 1e-6,
    torch.float16: 2 * 2.0**-11,
    torch.bfloat16: 2 * 2.0**-8,
}
# Above rank 8 on a GPU, the stage's products are sums of three TF32 parts. Emulated: 2e-7 to 6e-7.
POWERSGD_STAGE_DOT = 3e-6
# ‖PᵀP−I‖_F. fp32: the project's requirement up to a condition number of 1e6. Measured 2e-8, and up to 3e-6 if
# the second pass is only just skipped. fp64: the Gram matrix squares the condition number, 1e-16 · 1e8 ·
# rank, once.
ORTHONORMAL = {torch.float32: 1e-5, torch.float64: 1e-6}
# ‖P − Q Qᵀ P‖ / ‖P‖. fp32: Q's rounding, 2^-24 · sqrt(rank), times 4. fp64: P Tᵀ's rounding for a condition
# number of 1e4.
SPAN = {torch.float32: 1e-6, torch.float64: 1e-11}

# The relative error of one step of PowerSGD with P and Q rounded on the wire. The unit is one rounding of an
# element. int8 has 127 steps up to the largest of a block's 128 elements. P's condition number magnifies the
# error.
FACTOR_UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.int8: 1 / 127}
FACTOR_ROUNDINGS = 4

# Σ outputs + mean error = Σ inputs, relative to the inputs' norm. Each of the three is rounded once per step.
QUANTIZED_IDENTITY = {torch.float64: 1e-14, torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
# A Recorder's norms: up to four million squares at a time are summed in float32. Measured 1.1e-5 for a
# million.
RECORDED_NORM = 1e-4
# A Recorder's relative errors and norms of means, from sketches in 251 places. The standard deviation is
# 4.5 %; this is six times as much.
SKETCHED_RATIO = 0.27
# The mean of at least 18 such ratios, each with other signs: six standard deviations of 6.3 % / √18.
SKETCHED_MEAN = 0.09
# A mean of gradients near the end of their dtype's range, in 4 bits or more, with an error that is clamped to
# the range. At 4 bits, the levels next to the largest value are a quarter of it apart. Measured 0.12.
LARGEST_LOSS = 0.2
