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

    The scale and the product round in the arithmetic's dtype (fp64 if either side is fp64, else fp32), the
    result once more (from fp64 to 16 bits by way of fp32: in torch always, in the kernels to bf16).
    """
    arithmetic = torch.float64 if torch.float64 in (source, result) else torch.float32
    detour = UNIT_ROUNDOFF[torch.float32] if source == torch.float64 else 0.0
    return 1.01 * (UNIT_ROUNDOFF[result] + 2 * UNIT_ROUNDOFF[arithmetic] + detour)


def average(wire: torch.dtype, world_size: int, magnitude: torch.Tensor) -> torch.Tensor:
    """Return the error of a mean of world_size values up to this magnitude, summed in the dtype on the wire.

    Each addend and each partial sum is rounded once.
    """
    return 1.01 * 2 * world_size * (UNIT_ROUNDOFF[wire] * magnitude + SMALLEST[wire])


# PowerSGD. One step of float32 from an identical state: products of up to 300 terms and an
# orthonormalization. Measured 4e-7 against torch, 2e-7 against the oracle.
ONE_STEP = 1e-5
# The span of the new Q, which the spread of its singular values magnifies. Measured 4e-7.
ONE_STEP_SPAN = 1e-5
# The same in float64. Measured 7e-16, but the span keeps a condition number of up to 100.
ONE_STEP_FP64 = 1e-12
# The part of a gradient of rank ≤ r that one step in float32 leaves out: rounding P, times its condition
# number, which is a few hundred where random directions replace lost ones. Measured 2e-6 to 4e-5.
RECOVERY = 1e-4
# Two ways to orthonormalize with epsilon 1e-8 added to columns of length about 1. Measured 3e-7.
EPSILON_STEP = 1e-5
# One quantized step in float32 from an identical state, over a block's largest value: sums of a few products.
# Measured 2e-7.
QUANTIZED_STEP = 1e-5
# The fraction of elements in blocks in which the hook may choose another code: quotients are rounded to
# fp16, so one within 2^-11 of halfway between two levels gets either, and the block another scale. Measured
# 0.015.
UNLIKE_BLOCKS = 0.05
# The norm of the hook's rounding error over that of exact arithmetic: of two levels equally far neither loses
# more. Measured 1.008.
QUANTIZED_LOSS = 1.02
# Five steps of gradcomp.testing.simple in float64 beside the hooks: other bases of the same span, sums in
# another order. Measured 4e-15 for PowerSGD, and 0 for 8 bits.
SIMPLE_STEPS = 1e-12
# One step with the gradient, P, Q and the result rounded to 16 bits: four roundings. Measured 1.2.
SIXTEEN_BIT_ROUNDINGS = 4
# A mean of errors, rounded to float32 once. Measured 3e-8; ten times as much for a step behind it.
MEAN_ERROR = 1e-6
# The least distance that torch's errors of uncompressed tensors wander in 200 steps, in units of the
# gradients' rms; the noise of one rank against the mean of two has rms 0.7. Measured 9.6.
WANDERED = 5.0

# Relative error (Frobenius) of one PowerSGD step from an identical state, times P's condition number. fp32:
# sums of up to a thousand products in fp32 and one rounding each of M, P, Q and the output, measured 1e-7 to
# 6e-7. 16 bits: M, P, Q and the output are rounded; P's rounding rotates the space that it spans, hence the
# condition number.
POWERSGD_STEP = {
    torch.float64: 1e-12,
    torch.float32: 3e-6,
    torch.float16: 4 * 2.0**-11,
    torch.bfloat16: 4 * 2.0**-8,
}
# Relative error of one PowerSGD stage by itself: one rounding of its result, and its sums.
POWERSGD_STAGE = {
    torch.float64: 1e-12,
    torch.float32: 1e-6,
    torch.float16: 2 * 2.0**-11,
    torch.bfloat16: 2 * 2.0**-8,
}
# Above rank 8 on a GPU, sums in three parts of TF32: 2e-7 to 6e-7 emulated.
POWERSGD_STAGE_DOT = 3e-6
# ‖PᵀP−I‖_F: the project's requirement for fp32 up to a condition number of 1e6. Measured: 2e-8 to 3e-6 where
# the second pass is only just skipped. fp64: the Gram matrix squares the condition number, 1e-16 · 1e8 ·
# rank, once.
ORTHONORMAL = {torch.float32: 1e-5, torch.float64: 1e-6}
# ‖P − Q Qᵀ P‖ / ‖P‖: rounding Q to fp32, 2^-24 · sqrt(rank) times 4; in fp64 rounding P Tᵀ for a condition
# number of 1e4.
SPAN = {torch.float32: 1e-6, torch.float64: 1e-11}

# One step of PowerSGD with P and Q rounded on the wire, relative to the gradient, in these units: what one
# rounding of an element costs, where int8 has 127 steps up to the largest of 128. P's condition number
# magnifies it.
FACTOR_UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.int8: 1 / 127}
FACTOR_ROUNDINGS = 4

# The quantized all-reduce on the kernels, 4 bits. How much farther than the nearest level a chosen one may be
# in units of the root mean square: between two levels the quotient's rounding, 2e-6 of at most 2.5, decides.
QUANTIZED_THRESHOLD = 1e-5
# A scale of 4 bits: rounded to bf16 once, and sums of squares in fp32.
QUANTIZED_SCALE = 1.001 * 2.0**-8
# Outputs plus the mean error are the inputs: a rounding per step of each, in units of the inputs' norm.
QUANTIZED_IDENTITY = {torch.float64: 1e-14, torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
# A Recorder's norms: up to four million squares at a time are summed in float32. Measured 1.1e-5 for a
# million.
RECORDED_NORM = 1e-4
# A Recorder's relative errors and norms of means, from sketches in 251 places: six standard deviations of
# 4.5 %.
SKETCHED_RATIO = 0.27
# The mean of at least 18 of those ratios, each with other signs: six standard deviations of 6.3 % / √18.
SKETCHED_MEAN = 0.09
# A mean of gradients near the end of their dtype's range, in 4 bits at most, with an error that is cut there:
# the levels next to the largest value are a quarter of it apart. Measured 0.12.
LARGEST_LOSS = 0.2
