"""Test PowerSGD with factors in fewer bits on the wire, and with quantized first steps."""

from functools import partial

import pytest
import torch

from gradcomp.comm.bucket import GradBucket
from gradcomp.hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from gradcomp.testing import check_hook, run_ranks
from tests.depth import everyday
from tests.hooks.powersgd_oracle import Bucket, random_gradient, relative
from tests.hooks.powersgd_runs import HOOKS, START, new_state, simulate, step_of_both
from tests.kept import error_in
from tests.tolerances import FACTOR_ROUNDINGS, FACTOR_UNIT

pytestmark = pytest.mark.usefixtures("plain_torch")


SHAPES = ((64, 48), (7,), (30, 90), (2, 3), (150, 40))
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int8], ids=str)


def make_state(group, **options):
    return PowerSGDState(group, 2, START, min_compression_rate=1, **options)


CHECKED = [
    ("powerSGD", {"factor_dtype": torch.int8, "uncompressed_dtype": torch.bfloat16, "start_bits": 4}),
    ("batched", {"factor_dtype": torch.int8}),
    ("powerSGD", {"factor_dtype": torch.bfloat16}),
    ("powerSGD", {"factor_dtype": torch.float16}),
    ("powerSGD", {"factor_dtype": torch.int8}),
]


# Every day those properties that factors change.
HELD = (
    *("completes", "replicas_identical", "contraction"),
    *("nonfinite_seen_by_all", "held_back_comes_out", "scale_equivariant", "checkpoint_round_trip"),
    "zero_stays_zero",
)


@pytest.mark.parametrize(("name", "options"), everyday(CHECKED[:3:2], CHECKED), ids=str)
def test_every_property_of_the_kit(name, options):
    make = partial(make_state, **options)
    report = check_hook(HOOKS[name], make, max_examples=everyday(1, 3), only=everyday(HELD, ()))
    report.raise_if_failed()
    assert {name for name, verdict in report.verdicts.items() if verdict.outcome == "holds"} >= set(HELD)


@DTYPES
@pytest.mark.parametrize("world_size", [1, 3])
def test_one_step_as_torchs_but_for_rounding(dtype, world_size):
    options, shapes = {"matrix_approximation_rank": 2}, ((64, 48), (30, 90), (150, 40))
    ranks = simulate(partial(step_of_both, factor_dtype=dtype), world_size, options, shapes)
    for (ours, _), (theirs, _) in ranks:
        assert relative(ours, theirs) <= FACTOR_ROUNDINGS * FACTOR_UNIT[dtype]
        assert torch.equal(ours, ranks[0][0][0])


def sent(rank, group, options):
    state = PowerSGDState(group, 8, 2, **options)
    shapes = ((64, 256), (256, 64), (64,))
    for step in range(3):
        powerSGD_hook(state, Bucket(random_gradient(shapes, rank, step), shapes)).wait()
    return state.compression_stats()


def test_bytes_on_the_wire():
    """The statistics count elements of the bucket's dtype."""
    factors, vectors = 2 * 8 * (64 + 256), 64
    for options, expected in (
        ({}, factors + vectors),
        ({"factor_dtype": torch.bfloat16}, (factors + vectors) / 2),
        ({"factor_dtype": torch.int8}, factors * (1 + 2 / 128) / 4 + vectors),
        (
            {"factor_dtype": torch.int8, "uncompressed_dtype": torch.bfloat16},
            factors * (1 + 2 / 128) / 4 + vectors / 2,
        ),
        ({"start_bits": 4}, factors + vectors + 2 * ((64 * 256 * 2) * (0.5 + 2 / 128) / 4 + vectors)),
    ):
        (_, before, after), _ = run_ranks(sent, 2, options)
        assert before == (3 if "start_bits" in options else 1) * (2 * 64 * 256 + 64)
        assert expected <= after <= expected + 50  # two payloads' alignment


def compressed_numel(rank, group, dtype):
    state = PowerSGDState(group, 4, 2, min_compression_rate=2, factor_dtype=dtype)
    for step in range(3):
        powerSGD_hook(state, Bucket(random_gradient(((12, 12),), rank, step), ((12, 12),))).wait()
    return int((error_in(state) != 0).sum())


def test_min_compression_rate_counts_bytes():
    """96 elements of factors replace 144. They take half of the bytes or less only in 16 bits or fewer."""
    assert run_ranks(compressed_numel, 1, None) == [0]
    assert run_ranks(compressed_numel, 1, torch.bfloat16)[0] > 100
    assert run_ranks(compressed_numel, 1, torch.int8)[0] > 100


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"uncompressed_dtype": torch.bfloat16},
            r"factor_dtype=torch\.int8 only, but factor_dtype is None: .* are sent in their own dtype",
        ),
        (
            {"uncompressed_dtype": torch.bfloat16, "factor_dtype": torch.float16},
            r"but factor_dtype is torch\.float16: .* are sent in torch\.float16",
        ),
    ],
)
def test_a_dtype_without_int8_factors_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        new_state(**options)


def averages_beside(rank, group, scale):
    """Return a weight's averages of four steps, beside another matrix with gradients of this scale."""
    options = {"matrix_approximation_rank": 4, "factor_dtype": torch.int8, "process_group": group}
    state, shapes, averages = new_state(**options), ((1000, 64), (3200, 128)), []
    parameters = [torch.zeros(shape) for shape in shapes]
    for step in range(START + 4):
        beside, own = (random_gradient([shape], rank, step) for shape in shapes)
        bucket = GradBucket(0, torch.cat([scale * beside, own]), parameters, is_last=True)
        averages.append(powerSGD_hook(state, bucket).wait()[64000:].clone())
    return torch.stack(averages[START:])


def test_codes_of_a_large_factor_do_not_depend_on_the_matrix_beside_it():
    """Otherwise weights that ranks of tensor parallelism share would drift apart."""
    one, other = (run_ranks(averages_beside, 2, scale)[0] for scale in (1.0, 100.0))
    assert one.any()
    assert torch.equal(one, other)
