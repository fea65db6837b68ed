"""The property of a hook's outputs in expectation, over many steps."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import NormalDist

import torch

from gradcomp.testing.properties.accuracy import joined
from gradcomp.testing.properties.failure import PropertyFailure, require_finite
from gradcomp.testing.properties.subject import Subject, property_of
from gradcomp.testing.workload import Workload

# The number of compressed steps that `unbiased` runs.
NUM_STEPS = 512
# The probability that `unbiased` fails a hook that is unbiased.
FALSE_ALARM = 1e-6


@property_of
def unbiased(subject: Subject, workload: Workload) -> float | None:
    """The expectation of the output is the mean.

    Two gradients take turns in 512 steps, so that an output of the step before is a deviation, too. Each pair
    of steps is an independent draw of a hook that draws anew in every step. One half of the draws, chosen at
    random, yields the direction d of the outputs' deviation. For the other half, t = mean(⟨output − mean, d⟩)
    / (their standard deviation / √n) is compared with Student's distribution of n − 1 degrees of freedom,
    one-sided: an unbiased hook fails with a probability of about 1e-6, as the mean of n such sums is almost
    normal (the quantile is approximated by Abramowitz and Stegun 26.7.5). A bias within rounding is allowed.
    The property doesn't apply to hooks with error feedback, whose steps depend on each other.

    Returns t; None unless claims.unbiased.
    """
    claims = subject.claims
    if not claims.unbiased:
        return None
    workload = replace(workload, drift=1.0, period=2, steps=claims.start + NUM_STEPS, zero_steps=0)
    run = subject.run(workload)
    require_finite("unbiased", workload, run)
    indices = tuple(range(len(workload.shapes)))
    steps = range(claims.start, workload.steps)
    means = [tensor for step in steps[:2] for tensor in workload.mean(step)]
    mean = joined(means, range(len(means)))
    # Tensors may differ by orders of magnitude: each is divided by its own rms.
    unit = torch.cat([t.square().mean().sqrt().clamp(min=1e-300).expand(t.numel()) for t in means])
    outputs = torch.stack([joined(run.outputs[step][0], indices) for step in steps])
    draws = (outputs.view(NUM_STEPS // 2, -1) - mean) / unit
    shuffled = torch.randperm(len(draws), generator=torch.Generator().manual_seed(0))
    first, second = draws[shuffled].chunk(2)
    direction = first.mean(0)
    sums = second @ (direction / direction.norm().clamp(min=1e-300))
    bias, n = float(sums.mean()), len(sums)
    rounding = 2 * workload.world_size * claims.unit_roundoff(workload.dtype)
    allowed = rounding * float((mean / unit).norm()) + rounding * float(draws.abs().max())
    if abs(bias) <= allowed:
        return 0.0
    t = bias / max(float(sums.std()) / math.sqrt(n), 1e-300)
    z = NormalDist().inv_cdf(1 - FALSE_ALARM)
    limit = z + (z**3 + z) / (4 * (n - 1))
    if t > limit:
        average = mean + draws.mean(0) * unit
        worst = int(draws.mean(0).abs().argmax())
        step, index, element = _located(workload, worst)
        where = f"the {('first', 'second')[step]} one, {workload.where(index)}, element {element}"
        raise PropertyFailure(
            f"unbiased: over {NUM_STEPS} steps with two gradients in turn, {where}: expected "
            f"{mean[worst]:.6g} (the float64 mean) on average, got {average[worst]:.6g}; all elements: t = "
            f"{t:.3g}, allowed {limit:.3g}{subject.multiple(workload, mean, average)}"
        )
    return t


def _located(workload: Workload, position: int) -> tuple[int, int, int]:
    """Return (step, tensor index, element) of a position in all tensors of two steps, one after another."""
    step, left = divmod(position, sum(map(math.prod, workload.shapes)))
    for index, shape in enumerate(workload.shapes):
        if left < math.prod(shape):
            return step, index, left
        left -= math.prod(shape)
    raise IndexError(position)
