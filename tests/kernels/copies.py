"""Tensors for the tests of copying operations, and the comparison with float64."""

import math

import torch

from gradcomp.kernels import flatten
from tests.tolerances import SMALLEST, scaled_copy

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
BLOCK = flatten.BLOCK


def tensors_of(shapes: list[tuple[int, ...]], dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(len(shapes))
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype) for shape in shapes
    ]


def assert_scaled_copy(result: torch.Tensor, source: torch.Tensor, scale: float, dtype: torch.dtype) -> None:
    """Check that result is scale · source within rounding.

    source: the source in float64, converted from dtype.
    """
    expected = scale * source
    bound = scaled_copy(dtype, result.dtype) * expected.abs() + SMALLEST[result.dtype]
    error = (result.double() - expected).abs()
    worst = int((error - bound).argmax()) if error.numel() else 0
    assert bool((error <= bound).all()), f"element {worst}: {result[worst]}, expected {expected[worst]}"


def poisoned(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.full((numel,), math.nan, dtype=dtype, device=device)
