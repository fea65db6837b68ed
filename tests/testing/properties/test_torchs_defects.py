"""Each known defect of torch's hooks is found on the smallest workload, and gradcomp's hooks lack it."""

import math
from dataclasses import replace
from functools import partial

import pytest
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as torch_default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_powerSGD

from gradcomp.hooks import default_hooks
from gradcomp.hooks import powerSGD_hook as powerSGD
from gradcomp.testing import PropertyFailure, Workload, claims_of, properties

pytestmark = pytest.mark.usefixtures("plain_torch")


def theirs(process_group, rank=1):
    return torch_powerSGD.PowerSGDState(process_group, rank, start_powerSGD_iter=2)


def ours(process_group, rank=1):
    return powerSGD.PowerSGDState(process_group, rank, start_powerSGD_iter=2)


# The defects of torch 2.13's hooks, as check_hook found them.
ONE = Workload(((1, 1),), steps=3)
ZEROS = Workload(((3, 7),), steps=3, spectra=("zero",))
TWO_BUCKETS = Workload(((1, 1), (1, 1)), ((0,), (1,)), steps=3)
DEFECTS = [
    ("completes", "powerSGD_hook", TWO_BUCKETS, "ranks disagree on collective"),
    ("completes", "batched_powerSGD_hook", ONE, "raised AssertionError"),
    ("finite_in_finite_out", "powerSGD_hook", ZEROS, "got nan in 21 of 21"),
    ("nonfinite_seen_by_all", "powerSGD_hook", replace(ONE, poison=(2, 0, 0, math.inf)), "step 3, .* after"),
    ("no_error_where_exact", "powerSGD_hook", replace(ONE, noise=0.1), "expected no error"),
    ("checkpoint_round_trip", "powerSGD_hook", ONE, "UnpicklingError"),
]


@pytest.mark.parametrize(("name", "hook", "workload", "message"), DEFECTS)
def test_torchs_defects_are_found_and_ours_has_none_of_them(name, hook, workload, message):
    claims = replace(
        claims_of(torch_powerSGD.powerSGD_hook, theirs), exact_shapes=lambda shape: shape == (1, 1)
    )
    with pytest.raises(PropertyFailure, match=f"(?s){message}"):
        getattr(properties, name)(getattr(torch_powerSGD, hook), theirs, workload, claims=claims)
    claims = claims_of(getattr(powerSGD, hook), ours)
    getattr(properties, name)(getattr(powerSGD, hook), ours, workload, claims=claims)


def test_torchs_powersgd_fills_zero_rows_and_ours_does_not():
    workload = Workload(((13, 24),), steps=3, masked=0.5)
    message = r"(?s)zero_stays_zero: claimed keeps_zeros lines; step 2, .* expected 0, .* such elements"
    with pytest.raises(PropertyFailure, match=message):
        properties.zero_stays_zero(torch_powerSGD.powerSGD_hook, partial(theirs, rank=4), workload)
    properties.zero_stays_zero(powerSGD.powerSGD_hook, partial(ours, rank=4), workload)


def test_torchs_fp16_hook_overflows_before_it_divides():
    check = partial(properties.finite_in_finite_out, claims=claims_of(default_hooks.fp16_compress_hook))
    for factor, message in ((0, "1 of 1 elements, with log2_factor=16"), (16, "1 of 1")):
        workload = Workload(((1, 1),), noise=0.1, log2_factor=factor)
        with pytest.raises(PropertyFailure, match=f"got inf in {message}"):
            check(torch_default_hooks.fp16_compress_hook, None, workload)
        check(default_hooks.fp16_compress_hook, None, workload)
