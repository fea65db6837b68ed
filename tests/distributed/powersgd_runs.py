"""What the tests of PowerSGD share: hooks, states, steps on fake buckets, and what they leave."""

import copy
import io
import logging

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_powersgd

from gradcomp import ops, testing
from gradcomp.hooks import default_hooks, powerSGD_hook
from tests.distributed.powersgd_oracle import (
    Bucket,
    random_gradient,
)

START = 2
# Convolutions, vectors, small tensors, tall, wide, and three of one shape apart from each other.
SHAPES = (
    *((64, 48), (7,), (16, 3, 3, 3), (64, 48), (5,), (2, 3), (200, 10), (10, 300), (33, 65)),
    *((96, 30, 2, 2), (1, 40), (64, 48), (13, 1), (128, 160), (1,), (31, 37)),
)
FEW_SHAPES = ((64, 48), (7,), (40, 90), (64, 48), (3, 3))
MATRICES = ((64, 48), (30, 90), (64, 48), (150, 40))
OTHER_SHAPES = ((64, 48), (40, 90), (7,))
HOOKS = {
    "powerSGD": powerSGD_hook.powerSGD_hook,
    "batched": powerSGD_hook.batched_powerSGD_hook,
    "fp16 around powerSGD": default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook),
    "bf16 around powerSGD": default_hooks.bf16_compress_wrapper(powerSGD_hook.powerSGD_hook),
    "fp16 around batched": default_hooks.fp16_compress_wrapper(powerSGD_hook.batched_powerSGD_hook),
    "bf16 around batched": default_hooks.bf16_compress_wrapper(powerSGD_hook.batched_powerSGD_hook),
    "none": None,
}
RESUMED = ("powerSGD", "batched", "fp16 around powerSGD", "bf16 around powerSGD")
LOGGER = "gradcomp.hooks.powerSGD_hook"
# What torch's state and ours both have.
COMMON = (
    *("matrix_approximation_rank", "start_powerSGD_iter", "min_compression_rate", "use_error_feedback"),
    *("warm_start", "orthogonalization_epsilon", "compression_stats_logging_frequency"),
    *("batch_tensors_with_same_shape", "iter", "next_stats_report"),
    *("total_numel_before_compression", "total_numel_after_compression"),
)


def error_of(state, bucket_index=0):
    return state.state_dict()["buckets"][bucket_index]["error"]


def directions_of(state, bucket_index=0):
    return state.state_dict()["buckets"][bucket_index]["directions"]


class Messages(logging.Handler):
    """What a logger said while in this context, as "LEVEL text"."""

    def __init__(self, name: str = LOGGER):
        super().__init__()
        self.lines, self._logger = [], logging.getLogger(name)

    def emit(self, record):
        self.lines.append(f"{record.levelname} {record.getMessage()}")

    def __enter__(self):
        self._level, self._propagate = self._logger.level, self._logger.propagate
        self._logger.setLevel(logging.INFO)
        self._logger.propagate = False
        self._logger.addHandler(self)
        return self.lines

    def __exit__(self, *_):
        self._logger.removeHandler(self)
        self._logger.setLevel(self._level)
        self._logger.propagate = self._propagate


def reload(value):
    """Through torch.save and torch.load with its safe default."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file)


def equal(one, other):
    """Of nested lists, dicts, tensors and plain values; tensors to the bit."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return one == other


def new_state(**options):
    return powerSGD_hook.PowerSGDState(
        **({"process_group": None, "matrix_approximation_rank": 2, "start_powerSGD_iter": START} | options)
    )


def run_steps(state, rank, steps, shapes=FEW_SHAPES, hook="powerSGD", dtype=torch.float32):
    """Each step's bucket has parameters that live for this step: a state takes them for a model made anew."""
    gradients = [random_gradient(shapes, rank, step, dtype) for step in steps]
    return [HOOKS[hook](state, Bucket(gradient, shapes)).wait() for gradient in gradients]


def steps_of_ours(rank, hook_name, options, shapes, num_steps, dtype):
    """num_steps compressed steps: each (gradient, error before, Q before, output, error after, Q after)."""
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=START, **options)
    for step in range(START):
        HOOKS[hook_name](state, Bucket(random_gradient(shapes, rank, step, dtype), shapes)).wait()
    results, before = [], None
    for step in range(num_steps):
        gradient = random_gradient(shapes, rank, START + step, dtype)
        output = HOOKS[hook_name](state, Bucket(gradient.clone(), shapes)).wait()
        after = (error_of(state), directions_of(state))
        results.append((gradient, before, output, after))
        before = after
    return results


def step_of_both(rank, options, shapes, steps_before):
    """(gradient, ours, theirs) of a step after steps_before of torch's: each (output, error before, after, Q)."""
    options = {"process_group": None, "start_powerSGD_iter": START, **options}
    theirs = torch_powersgd.PowerSGDState(**options)
    for step in range(START + steps_before):
        bucket = Bucket(random_gradient(shapes, rank, step), shapes)
        torch_powersgd.powerSGD_hook(theirs, bucket).wait()
    ours = powerSGD_hook.from_torch(copy.deepcopy(theirs), wait_for_buckets=False)
    gradient = random_gradient(shapes, rank, 99)
    their_error = theirs.error_dict.get(0)
    their_output = torch_powersgd.powerSGD_hook(theirs, Bucket(gradient.clone(), shapes)).wait()
    our_output = powerSGD_hook.powerSGD_hook(ours, Bucket(gradient.clone(), shapes)).wait()
    return (
        gradient,
        (our_output, error_of(ours), directions_of(ours)),
        (their_output, their_error, theirs.error_dict.get(0)),
    )


def simulate(function, world_size, *arguments):
    """function(rank, *arguments) on ranks in this process, where real ones would show nothing more; the results."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "_INTERPRETED", False)  # plain torch, as in a rank that is a process
        return testing.run_ranks(lambda rank, _, *rest: function(rank, *rest), world_size, *arguments)
