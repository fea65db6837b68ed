"""Sketches estimate norms, also of gradients with few large rows or columns, and are linear."""

import math

import pytest
import torch

from gradcomp.compress.recording import LENGTH, chunk_numel, measure
from tests.tolerances import RECORDED_NORM, SKETCHED_RATIO


def measured(values, shift=0):
    out = torch.full((1 + LENGTH,), math.nan)
    measure(values, shift, out=out)
    return float(out[0]), out[1:].double()


@pytest.mark.parametrize(
    "numel", [0, 1, 7, LENGTH - 1, LENGTH, LENGTH + 1, 10_007, 4 * chunk_numel(torch.device("cpu")) + 300]
)
def test_the_norm_of_every_length(numel):
    values = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    norm, sketch = measured(values)
    assert math.isclose(norm, values.double().norm(), rel_tol=RECORDED_NORM)
    if 0 < numel <= LENGTH:
        assert math.isclose(sketch.norm(), norm, rel_tol=RECORDED_NORM), "a place for every element"
    elif numel:
        assert math.isclose(sketch.norm(), norm, rel_tol=SKETCHED_RATIO)


def shaped(kind):
    """Return a [512, 256] gradient: random, large in a few rows or columns, constant, or of rank 1."""
    generator = torch.Generator().manual_seed(5)
    values = torch.randn(512, 256, generator=generator)
    if kind == "columns":
        values[:, 2:] *= 1e-3
    elif kind == "rows":
        values[2:] *= 1e-3
    elif kind == "constant":
        values.fill_(0.5)
    elif kind == "rank 1":
        values = values[:, :1] @ values[:1]
    return values.flatten()


@pytest.mark.parametrize("kind", ["random", "columns", "rows", "constant", "rank 1"])
def test_the_norm_of_what_gradients_look_like(kind):
    values = shaped(kind)
    ratios = [
        float(measured(values, shift)[1].norm() / values.double().norm()) for shift in range(0, 800, 40)
    ]
    assert all(abs(ratio - 1) < SKETCHED_RATIO for ratio in ratios), ratios
    assert len(set(ratios)) > len(ratios) // 2, "other signs in every step"


def test_sketches_are_linear():
    one, other = (torch.randn(5000, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    expected = 2 * measured(one, 9)[1] - measured(other, 9)[1]
    assert torch.allclose(measured(2 * one - other, 9)[1], expected, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes(dtype):
    values = torch.randn(3000, generator=torch.Generator().manual_seed(1)).to(dtype)
    norm, sketch = measured(values)
    assert math.isclose(norm, values.double().norm(), rel_tol=RECORDED_NORM)
    assert torch.allclose(sketch, measured(values.float())[1], atol=1e-5)


def test_values_that_float16_can_not_add_up():
    norm, _ = measured(torch.full((4000,), 60_000.0, dtype=torch.float16))
    assert math.isclose(norm, 60_000 * math.sqrt(4000), rel_tol=1e-3)


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_what_is_not_finite_is_seen(value):
    values = torch.ones(1000)
    values[500] = value
    norm, sketch = measured(values)
    assert not math.isfinite(norm)
    assert not math.isfinite(sketch.norm())


def test_no_random_numbers_of_the_users_are_drawn():
    before = torch.get_rng_state()
    measured(torch.ones(5))
    assert torch.equal(torch.get_rng_state(), before)
