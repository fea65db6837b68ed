"""Test hooks with errors on the Triton kernels (on a GPU, or interpreted), with real processes."""

import math
from functools import partial

import pytest
import torch

from gradcomp.comm.bucket import GradBucket
from gradcomp.compress.powersgd import PowerSGDCompressor
from gradcomp.hooks.powerSGD_hook import powerSGD_hook
from gradcomp.hooks.quantization_hooks import QuantizationState, quantization_hook
from gradcomp.kernels.launch import Stage
from gradcomp.kernels.powersgd.plan import PowerSGDPlan
from tests.depth import everyday
from tests.devices import device_of_rank
from tests.hooks.powersgd_oracle import random_gradient, relative
from tests.hooks.powersgd_runs import HOOKS as POWERSGDS
from tests.hooks.powersgd_runs import START, equal, new_state, reload
from tests.kept import error_in
from tests.ranks import of_all_ranks
from tests.tolerances import ONE_STEP, QUANTIZED_IDENTITY

# Of each bucket. The interpreter is slow.
SHAPES = (((24, 18), (7,), (20, 30)), ((24, 18), (3, 3)))
NUMELS = [sum(math.prod(shape) for shape in shapes) for shapes in SHAPES]
BAD_STEP, NUM_STEPS = START + 2, START + 4
# Each has the error that a resumed run is allowed, and the wire's dtype.
HOOKS = {
    "powerSGD": (new_state, powerSGD_hook, ONE_STEP, torch.float32),
    "bf16 around batched": (new_state, POWERSGDS["bf16 around batched"], 2e-2, torch.bfloat16),
    "4 bits": (partial(QuantizationState, bits=4, block_size=16), quantization_hook, 0.0, torch.float32),
    "8 bits": (partial(QuantizationState, bits=8, block_size=16), quantization_hook, 0.0, torch.float32),
}


def take_step(state, hook, parameters, rank, step):
    """Average two buckets, both in flight; return the rank's gradients, and the averages."""
    gradient = random_gradient([(sum(NUMELS),)], rank, step)
    if rank == 1 and step == BAD_STEP:
        gradient[100] = math.nan
    parts = [part.to(device_of_rank(), copy=True) for part in gradient.split(NUMELS)]
    futures = [
        hook(state, GradBucket(index, part, of_bucket, is_last=index == len(NUMELS) - 1))
        for index, (part, of_bucket) in enumerate(zip(parts, parameters, strict=True))
    ]
    return gradient, torch.cat([future.wait().cpu() for future in futures])


def is_on_kernels(compressor):
    if isinstance(compressor, PowerSGDCompressor):
        return isinstance(compressor.plan, PowerSGDPlan)
    return isinstance(compressor._sum.operations[0], Stage)


@pytest.mark.ranks(2, interpret=True)
@pytest.mark.parametrize("name", everyday(["powerSGD", "bf16 around batched", "4 bits"], list(HOOKS)))
def test_nothing_is_lost_also_around_a_bad_step_and_a_checkpoint(rank, name):
    """Σ averages + mean error = Σ mean gradients where averages are finite. Replicas stay equal."""
    make, hook, bound, wire = HOOKS[name]
    state = make()
    parameters = [[torch.empty(shape, device=device_of_rank()) for shape in shapes] for shapes in SHAPES]
    given, out, averages = 0.0, 0.0, []
    for step in range(NUM_STEPS):
        if step == NUM_STEPS - 1:
            resumed = make()
            # On the CPU, as the next run may have another GPU.
            resumed.load_state_dict(reload(state.state_dict(), map_location="cpu"))
            (_, resumed_average) = take_step(resumed, hook, parameters, rank, step)
        gradient, average = take_step(state, hook, parameters, rank, step)
        averages.append(average)
        assert average.isfinite().all() == (step != BAD_STEP)
        given, out = given + gradient.double(), out + average.double()
    assert relative(resumed_average, average) <= bound
    compressors = [each.compressor for each in state._states._buckets]
    assert len(compressors) == len(SHAPES)
    assert all(map(is_on_kernels, compressors))
    ranks = of_all_ranks((averages, given, error_in(state).cpu().double()))
    assert equal(*([each.nan_to_num() for each in averages] for averages, *_ in ranks))
    expected, error = (torch.stack(each).mean(0) for each in list(zip(*ranks, strict=True))[1:])
    assert error.any()
    is_sound = averages[BAD_STEP].isfinite()
    assert relative((out + error)[is_sound], expected[is_sound]) <= QUANTIZED_IDENTITY[wire]
