"""Every state, in every dtype, saved and loaded in every way, continues like the state that was saved."""

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from gradcomp.comm.bucket import GradBucket
from gradcomp.compress import (
    CompressorState,
    compress_hook,
    consolidated_state_dict,
    load_from_dcp,
    per_rank_state_dict,
)
from gradcomp.frameworks import CommHook
from gradcomp.hooks.default_hooks import bf16_compress_wrapper, fp16_compress_wrapper
from gradcomp.hooks.powerSGD_hook import batched_powerSGD_hook, powerSGD_hook
from gradcomp.hooks.quantization_hooks import QuantizationState, quantization_hook
from tests import training
from tests.compress.test_undo_step import Halved
from tests.depth import everyday
from tests.hooks.powersgd_oracle import random_gradient
from tests.hooks.powersgd_runs import reload
from tests.kept import error_in

SHAPES = [(24, 40), (7,), (16, 3, 3, 3), (30, 20)]
START = 2


power_sgd = partial(training.power_sgd, start=START, min_compression_rate=1.2)


def quantization(bits):
    return QuantizationState(bits=bits, block_size=32)


STATES = {
    "PowerSGD": (power_sgd, powerSGD_hook),
    "bf16 factors": (lambda: power_sgd(factor_dtype=torch.bfloat16), powerSGD_hook),
    "int8 factors after 4 bits": (
        lambda: power_sgd(factor_dtype=torch.int8, uncompressed_dtype=torch.bfloat16, start_bits=4),
        powerSGD_hook,
    ),
    "cold start": (lambda: power_sgd(warm_start=False), powerSGD_hook),
    "no error feedback": (lambda: power_sgd(use_error_feedback=False), powerSGD_hook),
    "batched": (power_sgd, batched_powerSGD_hook),
    "int4": (lambda: quantization(4), quantization_hook),
    "int8": (lambda: quantization(8), quantization_hook),
    "fp16 around int8": (lambda: quantization(8), fp16_compress_wrapper(quantization_hook)),
    "bf16 around PowerSGD": (power_sgd, bf16_compress_wrapper(powerSGD_hook)),
    "a user's": (lambda: CompressorState(Halved), compress_hook),
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def loaded(make, state_dict):
    state = make()
    state.load_state_dict(reload(state_dict))
    return state


def loaded_twice(make, state_dict):
    """Save a loaded state again before it has seen any bucket."""
    return loaded(make, loaded(make, state_dict).state_dict())


def through_comm_hook(state, make, hook, folder):
    comm_hook = CommHook(make(), hook)
    comm_hook.load_state_dict(reload(CommHook(state, hook).state_dict()))
    return comm_hook.state


def through_dcp(state, make, hook, folder):
    dcp.save({"state": per_rank_state_dict(state)}, checkpoint_id=folder)
    fresh = make()
    load_from_dcp(fresh, folder, "state")
    return fresh


# True: each rank gets its own errors back. False: each rank gets the mean of all ranks' errors.
WAYS = {
    "a file": (lambda s, make, hook, folder: loaded_twice(make, s.state_dict()), True),
    "a pickle": (lambda s, make, hook, folder: reload(s, weights_only=type(s) is not CompressorState), True),
    "a copy": (lambda s, make, hook, folder: copy.copy(s), True),
    "the process group's checkpoint": (through_dcp, True),
    "one file": (lambda s, make, hook, folder: loaded(make, consolidated_state_dict(s)), False),
    "a framework's file": (through_comm_hook, False),
}


def average(hook, state, parameters, gradient):
    return hook(state, GradBucket(0, gradient.clone(), parameters, is_last=True)).wait()


def error_of(state):
    error = error_in(state)
    return None if error is None else error.double()


def round_trips(rank, dtype, names, folder):
    """Return the failures as (state, number of steps before saving, way, message)."""
    wrong = []
    for name in names:
        make, hook = STATES[name]
        for num_steps in (START - 1, START + 2):
            state, parameters = make(), [torch.zeros(shape, dtype=dtype) for shape in SHAPES]
            for step in range(num_steps):
                average(hook, state, parameters, random_gradient(SHAPES, rank, step, dtype))
            resumed = {}
            for way, (save_and_load, _) in WAYS.items():
                try:
                    resumed[way] = save_and_load(state, make, hook, f"{folder}/{name}/{num_steps}")
                except Exception as error:
                    wrong.append((name, num_steps, way, f"{type(error).__name__}: {error}"))
            error = error_of(state)
            gradient = random_gradient(SHAPES, rank, num_steps, dtype)
            expected = average(hook, state, parameters, gradient)
            for way, other in resumed.items():
                if WAYS[way][1]:
                    found = average(hook, other, parameters, gradient)
                    is_right = torch.equal(found, expected) and found.dtype == expected.dtype
                elif error is None:
                    is_right = error_of(other) is None
                else:
                    mean, kept = error.clone(), error_of(other)
                    dist.all_reduce(mean)
                    is_right = (kept - mean / 2).norm() <= 0.01 * (mean / 2).norm()
                if not is_right or other.iter != num_steps + WAYS[way][1]:
                    wrong.append((name, num_steps, way, "goes on differently"))
    return wrong


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_loaded_goes_on_as_what_was_saved(run_ranks, dtype, tmp_path):
    names = everyday(list(STATES)[DTYPES.index(dtype) :: 2], list(STATES))
    assert run_ranks(round_trips, 2, dtype, names, str(tmp_path)) == [[], []]
