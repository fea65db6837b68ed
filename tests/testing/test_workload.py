"""Workloads have the gradients that their recipe describes."""

import math
from dataclasses import replace
from itertools import product

import pytest
import torch

from gradcomp.testing import RecordedWorkload, Workload

SHAPES = ((12, 7), (5,), (4, 3, 2, 2), (1, 1))


def test_the_repr_is_the_recipe():
    assert repr(Workload(((1, 1),))) == "Workload(shapes=((1, 1),))"
    full = Workload(
        *(SHAPES, ((3, 2), (1, 0)), 3, 4, torch.bfloat16, ("zero", "flat"), 2, (-3, 8), 0.5, 1.0, 0.1, 9),
        order=(2, 0, 1),
        log2_factor=4,
        zero_steps=2,
        poison=(0, 1, 2, math.inf),
    )
    again = eval(repr(full), {"Workload": Workload, "torch": torch, "inf": math.inf})
    assert again == full
    assert all(torch.equal(a, b) for a, b in zip(again.gradients(1, 2), full.gradients(1, 2), strict=True))


def test_gradients_are_fresh_copies_of_the_same_numbers():
    workload = Workload(SHAPES, noise=1.0)
    one, other = workload.gradients(0, 1), workload.gradients(0, 1)
    for gradient, same, shape in zip(one, other, SHAPES, strict=True):
        assert (gradient.shape, gradient.dtype) == (shape, torch.float32)
        assert torch.equal(gradient, same)
        gradient.zero_()
        assert not torch.equal(gradient, same)


@pytest.mark.parametrize("spectrum", ["flat", "low_rank", "power_law", "clustered", "zero"])
def test_the_signal_has_its_spectrum_and_scale(spectrum):
    (gradient,) = Workload(((24, 16),), spectra=(spectrum,), rank=3, log2_scale=(5,)).mean(0)
    values = torch.linalg.svdvals(gradient)
    expected = {
        "flat": torch.ones(16),
        "low_rank": (torch.arange(16) < 3).float(),
        "power_law": 1 / torch.arange(1.0, 17.0),
        "clustered": torch.where(torch.arange(16) < 4, 1.0, 0.01),
        "zero": torch.zeros(16),
    }[spectrum].double()
    torch.testing.assert_close(values / values[0].clamp(min=1e-9), expected, rtol=1e-4, atol=1e-5)
    rms = float(gradient.square().mean().sqrt())
    assert rms == pytest.approx(0.0 if spectrum == "zero" else 32.0, rel=1e-5)


def test_a_mean_of_noisy_low_rank_gradients_has_low_rank():
    options = {"spectra": ("low_rank",), "rank": 2, "noise": 1.0, "drift": 0.5, "dtype": torch.float64}
    workload = Workload(((24, 16),), world_size=3, steps=2, **options)
    for step in range(2):
        values = torch.linalg.svdvals(workload.mean(step)[0])
        assert values[1] > 0.01 * values[0]
        assert values[2] < 1e-12 * values[0]
    assert not torch.equal(*(workload.gradients(0, rank)[0] for rank in range(2)))


@pytest.mark.parametrize("noise", [0.0, 0.1, 10.0])
def test_noise_is_a_ranks_own(noise):
    workload = Workload(((30, 30),), world_size=2, noise=noise)
    one, other = (workload.gradients(0, rank)[0] for rank in range(2))
    assert float((one - other).square().mean().sqrt()) == pytest.approx(noise * math.sqrt(2), rel=0.1)


def test_drift_leads_from_the_first_step_to_new_gradients():
    def cosine(drift, step):
        workload = Workload(((30, 30),), steps=3, drift=drift, noise=0.1)
        one, other = workload.mean(0)[0].flatten(), workload.mean(step)[0].flatten()
        return float(torch.cosine_similarity(one, other, dim=0))

    assert cosine(0.0, 2) == pytest.approx(1.0)
    assert 0.5 < cosine(0.1, 2) < 1.0
    assert abs(cosine(1.0, 2)) < 0.2


def test_sparse_rows_are_the_same_on_every_rank():
    workload = Workload(((40, 6),), noise=1.0, sparsity=0.75)
    empty = [workload.gradients(0, rank)[0].abs().sum(1) == 0 for rank in range(2)]
    assert int(empty[0].sum()) == 30
    assert torch.equal(empty[0], empty[1])


def test_masked_elements_are_zero_in_every_step():
    workload = Workload(((20, 30), (9,)), world_size=3, steps=4, noise=1.0, drift=1.0, masked=0.5)
    zeros = [[each == 0 for each in workload.gradients(*place)] for place in product(range(4), range(3))]
    for matrix, vector in zeros:
        assert all(map(torch.equal, (matrix, vector), zeros[0]))
        assert vector.sum() == 5
        assert (int(matrix.all(1).sum()), int(matrix.all(0).sum())) == (5, 7)
        assert 0.5 < matrix.float().mean() < 0.75
    assert Workload(((1, 1),), masked=0.5).gradients(0, 0)[0] == 0


def test_modifiers():
    workload = Workload(((6, 5), (5,)), world_size=3, steps=2, noise=1.0)
    swapped = replace(workload, order=(2, 0, 1), log2_factor=-3, zero_steps=1, poison=(1, 0, 1, math.nan))
    assert torch.equal(swapped.gradients(0, 0)[0], workload.gradients(0, 2)[0] / 8)
    poisoned = swapped.gradients(1, 0)
    assert poisoned[0].isfinite().all()
    assert poisoned[1].isnan().tolist() == [False, False, False, False, True]
    assert swapped.gradients(1, 1)[1].isfinite().all()
    assert swapped.num_steps == 3
    assert not any(gradient.any() for gradient in swapped.gradients(2, 0))
    with pytest.raises(IndexError, match="step 3, rank 0"):
        swapped.gradients(3, 0)


def test_recorded_gradients():
    recorded = [[[torch.full((2, 3), 1.0 + rank), torch.ones(4)] for rank in range(2)] for _ in range(3)]
    workload = RecordedWorkload.of(recorded, buckets=[[1], [0]])
    assert (workload.world_size, workload.steps, workload.shapes) == (2, 3, ((2, 3), (4,)))
    assert torch.equal(workload.mean(2)[0], torch.full((2, 3), 1.5, dtype=torch.float64))
    swapped = replace(workload, order=(1, 0), log2_factor=1)
    assert torch.equal(swapped.gradients(0, 0)[0], torch.full((2, 3), 4.0))
    # Two recordings with equal shapes are different workloads.
    zeros = [[[torch.zeros(2, 3), torch.zeros(4)]] * 2] * 3
    assert workload != RecordedWorkload.of(zeros, buckets=[[1], [0]])
    recorded[1][1][0] = torch.ones(3, 2)
    with pytest.raises(ValueError, match="differ between steps or ranks"):
        RecordedWorkload.of(recorded)


def test_what_makes_no_sense_is_refused():
    with pytest.raises(ValueError, match="don't hold each of 2 tensors once"):
        Workload(((1,), (2,)), buckets=((0,),))
    with pytest.raises(ValueError, match="order"):
        Workload(((1,),), order=(0, 0))
    with pytest.raises(ValueError, match="spectrum 'flatt'"):
        Workload(((1,),), spectra=("flatt",)).mean(0)
