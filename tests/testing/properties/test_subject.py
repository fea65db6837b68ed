"""If an output is a multiple of the mean, the message says so."""

from functools import partial

import pytest
import torch
import torch.distributed as dist

from gradcomp.hooks import debugging_hooks
from gradcomp.testing import Claims, Tolerance, check_hook
from tests.testing import compressors
from tests.testing.averaging import eight_bits, first_element_lost, scaled_mean

pytestmark = pytest.mark.usefixtures("plain_torch")

SUMS = [
    # Which property finds that a hook sums depends on its claims.
    (None, Claims(Tolerance.rounding(torch.float32), torch.float32), "averages"),
    (None, None, "unbiased"),
    (compressors.Int8, None, "held_back_comes_out"),
    (compressors.TopK, None, "held_back_comes_out"),
]


@pytest.mark.parametrize(("state", "claims", "by"), SUMS)
def test_a_sum_is_called_a_multiple_of_the_mean(state, claims, by):
    def hook(state, bucket, factor=2.0):
        if state is None or isinstance(state, dist.ProcessGroup):
            return scaled_mean(factor)(state, bucket)
        return compressors.hook(state, bucket).then(lambda future: future.value() * factor)

    for factor, said in ((2.0, "the output is 2 × the mean"), (0.9, "the output is 0.9 × the mean")):
        (failure,) = check_hook(
            partial(hook, factor=factor), state, claims=claims, only=[by], max_examples=6
        ).failures
        assert said in failure.message


def test_what_is_no_multiple_of_the_mean_is_not_called_one():
    claims = Claims(Tolerance.rounding(torch.float32), torch.float32)
    for hook in (debugging_hooks.noop_hook, first_element_lost, eight_bits):
        (failure,) = check_hook(hook, claims=claims, only=["averages"], max_examples=6).failures
        assert "× the mean" not in failure.message
