"""Gradients near the largest number of their dtype, and too large for a wire."""

import math
from functools import partial

import pytest
import torch

from gradcomp.hooks import default_hooks
from gradcomp.hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from gradcomp.hooks.quantization_hooks import (
    QuantizationState,
    quantization_hook,
    quantization_perchannel_hook,
    quantization_pertensor_hook,
)
from gradcomp.testing import run_ranks
from tests.depth import everyday, mixed
from tests.hooks.powersgd_oracle import Bucket, relative
from tests.tolerances import LARGEST_LOSS

SHAPES = ((24, 40), (9,), (32, 30))
NUMEL = sum(math.prod(shape) for shape in SHAPES)


def powersgd(**options):
    return partial(
        PowerSGDState, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=1, **options
    )


def quantizing(bits, **options):
    return partial(QuantizationState, bits=bits, block_size=32, **options)


# The interpreter computes in numpy, and numpy warns.
INTERPRETED = pytest.mark.filterwarnings("ignore:(invalid value|overflow|divide by zero):RuntimeWarning")

HOOKS = {
    "none": (lambda group: group, default_hooks.allreduce_hook),
    "4 bits": (quantizing(4), quantization_hook),
    "8 bits": (quantizing(8), quantization_hook),
    "per tensor": (lambda group: group, quantization_pertensor_hook),
    "per channel": (lambda group: group, quantization_perchannel_hook),
    "PowerSGD": (powersgd(), powerSGD_hook),
    "PowerSGD with epsilon": (powersgd(orthogonalization_epsilon=1e-8), powerSGD_hook),
    "PowerSGD bf16": (powersgd(factor_dtype=torch.bfloat16), powerSGD_hook),
    "PowerSGD int8": (powersgd(factor_dtype=torch.int8), powerSGD_hook),
    "PowerSGD fp16": (powersgd(factor_dtype=torch.float16), powerSGD_hook),
    "PowerSGD after 4 bits": (powersgd(start_bits=4), powerSGD_hook),
    "4 bits and fp16": (quantizing(4, uncompressed_dtype=torch.float16), quantization_hook),
}


def steps_of(rank, group, name, gradients):
    """Return (output, whether the state's tensors are all finite) of every step."""
    make_state, hook = HOOKS[name]
    state, results = make_state(group), []
    bucket = Bucket(gradients[rank][0].clone(), SHAPES)
    for gradient in gradients[rank]:
        bucket.set_buffer(gradient.clone())
        output = hook(state, bucket).wait().clone()
        kept = state.state.values() if hasattr(state, "state_dict") else []
        results.append((output, all(each.isfinite().all() for entry in kept for each in entry.values())))
    return results


def gradients_of(dtype, world_size, kind, num_steps):
    """Return gradients [rank][step]. PowerSGD loses nothing of them, unless kind is "uniform"."""
    generator, largest = torch.Generator().manual_seed(3), torch.finfo(dtype).max
    signs = [torch.randn(shape[0], 1, generator=generator).sign() for shape in SHAPES[::2]]

    def flat():
        first, vector, second = (torch.ones(shape, dtype=torch.float64) for shape in SHAPES)
        if kind == "signs":
            first, second = first * signs[0], second * signs[1]
        if kind == "uniform":
            first, second = (torch.rand(each.shape, generator=generator).double() for each in (first, second))
        return torch.cat([each.flatten() for each in (first, vector, second)])

    return [[(0.9 * largest * flat()).to(dtype) for _ in range(num_steps)] for _ in range(world_size)]


def check_mean(name, dtype, world_size, kind, num_steps=5):
    gradients = gradients_of(dtype, world_size, kind, num_steps)
    for step, of_ranks in enumerate(zip(*run_ranks(steps_of, world_size, name, gradients), strict=True)):
        mean = torch.stack([of_rank[step].double() for of_rank in gradients]).mean(0)
        for output, is_finite in of_ranks:
            assert torch.equal(output, of_ranks[0][0])
            assert output.isfinite().all()
            assert is_finite
            assert relative(output.double(), mean) < LARGEST_LOSS


@pytest.mark.usefixtures("plain_torch")
@pytest.mark.parametrize(
    ("name", "world_size"), mixed([name for name in HOOKS if "fp16" not in name], [1, 2, 3, 4])
)
def test_the_mean_of_the_largest_numbers_of_fp32(name, world_size):
    for kind in (
        "equal",
        "signs",
        *["uniform"] * ("PowerSGD" not in name),
    ):  # uniform matrices have full rank
        check_mean(name, torch.float32, world_size, kind)


@pytest.mark.usefixtures("plain_torch")
@pytest.mark.parametrize(
    ("name", "dtype"),
    mixed(["none", "4 bits", "8 bits", "per tensor", "per channel"], [torch.float16, torch.bfloat16]),
    ids=str,
)
def test_the_mean_of_the_largest_numbers_of_16_bits(name, dtype):
    for kind in ("equal", "signs", "uniform"):
        check_mean(name, dtype, 2, kind)


@INTERPRETED
@pytest.mark.parametrize("name", everyday(["8 bits", "PowerSGD"], ["4 bits", "8 bits", "PowerSGD"]))
def test_the_mean_of_the_largest_numbers_on_the_kernels(name):
    check_mean(name, torch.float32, 2, "signs", num_steps=3)


def with_one_beyond(dtype, value):
    """Return two ranks' normal gradients [rank][step]. Step 3 is multiplied by value."""
    normal = torch.randn(2, 5, NUMEL, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    normal[:, 3] *= value
    return [[step.to(dtype) for step in of_rank] for of_rank in normal]


BEYOND = [
    *((name, torch.float64, 1e42) for name in HOOKS),
    *((name, torch.float64, 1e200) for name in HOOKS),
    *((name, torch.float64, 1e39) for name in ("4 bits", "8 bits")),
    ("PowerSGD fp16", torch.float32, 1e6),
    ("4 bits and fp16", torch.float32, 1e6),
    ("PowerSGD", torch.float16, 1e5),
    *((name, torch.float32, 1e38) for name in HOOKS),
]


def check_recovery(name, dtype, value):
    """Check that ranks agree, that all state is finite, and that every output except step 3's is finite."""
    runs = run_ranks(steps_of, 2, name, with_one_beyond(dtype, value))
    for step, of_ranks in enumerate(zip(*runs, strict=True)):
        (one, *are_finite), (other, *theirs) = of_ranks
        assert torch.equal(one.nan_to_num(7), other.nan_to_num(7))
        assert are_finite == theirs == [True]
        assert step == 3 or (one.isfinite().all() and one.any())


@pytest.mark.usefixtures("plain_torch")
@pytest.mark.parametrize(("name", "dtype", "value"), BEYOND, ids=str)
def test_what_a_wire_cannot_hold_is_forgotten(name, dtype, value):
    check_recovery(name, dtype, value)


BEYOND_ON_KERNELS = [
    ("4 bits", torch.float64, 1e42),
    ("PowerSGD fp16", torch.float32, 1e6),
    ("8 bits", torch.float64, 1e42),
    ("PowerSGD", torch.float32, 1e38),
]


@INTERPRETED
@pytest.mark.parametrize(
    ("name", "dtype", "value"), everyday(BEYOND_ON_KERNELS[:2], BEYOND_ON_KERNELS), ids=str
)
def test_what_a_wire_cannot_hold_is_forgotten_on_the_kernels(name, dtype, value):
    check_recovery(name, dtype, value)
