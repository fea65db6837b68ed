"""Drawn workloads cover the workloads of training, and are readable when shrunk."""

import math

import pytest
import torch
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st

from gradcomp.testing import Workload, strategies

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
SETTINGS = settings(max_examples=500, derandomize=True, database=None, deadline=None)


@settings(SETTINGS, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
@given(strategies.workloads(dtype=st.sampled_from(DTYPES), log2_scales=(-6, 6)))
def test_workloads_are_sound(workload):
    assert eval(repr(workload), {"Workload": Workload, "torch": torch}) == workload
    assert sorted(sum(workload.buckets, ())) == list(range(len(workload.shapes)))
    for shape in workload.shapes:
        assert 1 <= math.prod(shape) <= 4096
    for gradient in workload.gradients(workload.num_steps - 1, workload.world_size - 1):
        assert gradient.dtype == workload.dtype
        assert gradient.isfinite().all()


def test_they_shrink_to_something_readable():
    noisy_buckets = find(strategies.workloads(), lambda w: w.noise and len(w.buckets) > 1, settings=SETTINGS)
    assert (
        repr(noisy_buckets)
        == "Workload(shapes=((1, 1), (1, 1)), buckets=((0,), (1,)), world_size=1, noise=0.1)"
    )


@pytest.mark.parametrize(
    "wanted",
    [
        lambda w: any(len(shape) == 4 and shape[2] > 1 for shape in w.shapes),
        lambda w: any(len(shape) == 2 and shape[0] > 100 for shape in w.shapes),
        lambda w: len(w.shapes) > 2 and len(set(w.shapes)) == 1,
        lambda w: w.buckets[0][0] > w.buckets[-1][-1] and len(w.buckets) > 1,
        lambda w: len(set(w.spectra)) > 1,
        lambda w: len(w.log2_scale) > 1 and max(w.log2_scale) - min(w.log2_scale) > 40,
        lambda w: w.sparsity and w.noise > 1 and w.drift,
        lambda w: w.world_size == 4 and w.steps == 3,
    ],
)
def test_every_kind_is_drawn(wanted):
    find(strategies.workloads(), wanted, settings=settings(SETTINGS, phases=[Phase.generate]))
