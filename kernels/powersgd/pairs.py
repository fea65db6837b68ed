"""Arithmetic in pairs of fp32, for GPUs with slow fp64: twice fp32's precision from fp32 instructions.

A pair is the unevaluated sum hi + lo, with |lo| about 2^-24 |hi|. add, multiply and inverse_root also take
fp64: then hi is the number, and lo is returned unread. Sources: Dekker 1971; Ogita, Rump and Oishi,
*Accurate sum and dot product*, SIAM J. Sci. Comput. 2005.

Kernels that use pairs are compiled with enable_fp_fusion=False: a product fused into a sum is another number.
"""

import triton
import triton.language as tl

from ..tile import INTERPRETED


@triton.jit
def two_sum(a, b):
    """Return (s, e) with s = round(a + b) and s + e = a + b exactly (Knuth)."""
    s = a + b
    part = s - a
    return s, (a - (s - part)) + (b - part)


@triton.jit
def fast_two_sum(a, b):
    """Return (s, e) with s = round(a + b) and s + e = a + b exactly, if |a| >= |b| or a = 0 (Dekker)."""
    s = a + b
    return s, b - (s - a)


@triton.jit
def two_product(a, b):
    """Return (p, e) with p = round(a b) and p + e = a b exactly, for a and b in fp32."""
    p = a * b
    if INTERPRETED:
        # The interpreter's fma rounds the product. Use fp64: it holds a product of fp32 exactly.
        e = (a.to(tl.float64) * b.to(tl.float64) - p.to(tl.float64)).to(tl.float32)
    else:
        e = tl.fma(a, b, -p)
    return p, e


@triton.jit
def add(a, a_lo, b, b_lo):
    """Return the sum of two pairs. The error is at most about 2^-47 (|a| + |b|)."""
    if a.dtype == tl.float64:
        hi = a + b
        lo = a_lo
    else:
        s, e = two_sum(a, b)
        hi, lo = fast_two_sum(s, e + (a_lo + b_lo))
    return hi, lo


@triton.jit
def multiply(a, a_lo, b, b_lo):
    """Return the product of two pairs. The relative error is at most about 2^-45."""
    if a.dtype == tl.float64:
        hi = a * b
        lo = a_lo
    else:
        p, e = two_product(a, b)
        hi, lo = fast_two_sum(p, e + (a * b_lo + a_lo * b))
    return hi, lo


@triton.jit
def inverse_root(a, a_lo, added):
    """Return the pair 1 / (√a + added).

    a, a_lo: a pair > 0.
    added: a number >= 0, not a pair.
    """
    if a.dtype == tl.float64:
        hi = 1.0 / (tl.sqrt(a) + added)
        lo = a_lo
    else:
        one = tl.full((), 1.0, tl.float32)
        zero = tl.full((), 0.0, tl.float32)
        # One Newton step for 1 / √a and one for the result. Each starts from a number rounded to fp32.
        start = tl.div_rn(one, tl.sqrt_rn(a))
        square, square_lo = two_product(start, start)
        near, near_lo = multiply(square, square_lo, a, a_lo)
        inverse, inverse_lo = fast_two_sum(start, start * ((1.0 - near) - near_lo) * 0.5)
        length, length_lo = multiply(a, a_lo, inverse, inverse_lo)
        length, length_lo = add(length, length_lo, added, zero)
        start = tl.div_rn(one, length)
        near, near_lo = multiply(length, length_lo, start, zero)
        hi, lo = fast_two_sum(start, start * ((1.0 - near) - near_lo))
        hi = tl.where(added == 0.0, inverse, hi)
        lo = tl.where(added == 0.0, inverse_lo, lo)
    return hi, lo


@triton.jit
def add_halves(hi, lo, HALF: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Add the first half of [2 · HALF, ROWS, COLS] pairs to the second half."""
    first, second = tl.split(tl.permute(tl.reshape(hi, (2, HALF, ROWS, COLS)), (1, 2, 3, 0)))
    first_lo, second_lo = tl.split(tl.permute(tl.reshape(lo, (2, HALF, ROWS, COLS)), (1, 2, 3, 0)))
    return add(first, first_lo, second, second_lo)


@triton.jit
def sum_first_axis(hi, lo, SIZE: tl.constexpr, LOG2: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Return the sum of [SIZE, ROWS, COLS] pairs over the first axis, in a tree. SIZE = 2 ** LOG2."""
    for k in tl.static_range(LOG2):
        hi, lo = add_halves(hi, lo, SIZE >> (k + 1), ROWS, COLS)
    return tl.reshape(hi, (ROWS, COLS)), tl.reshape(lo, (ROWS, COLS))


@triton.jit
def power_of_two(largest):
    """Return the power of two s, from 2^-126 to 2^126, that brings s · largest into [1, 2) or closest."""
    exponent = (largest.to(tl.int32, bitcast=True) >> 23) & 255
    return (tl.minimum(tl.maximum(254 - exponent, 1), 253) << 23).to(tl.float32, bitcast=True)


@triton.jit
def inverse_power(s):
    """Return 1 / s, exactly, for a power of two s."""
    return (0x7F000000 - s.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
