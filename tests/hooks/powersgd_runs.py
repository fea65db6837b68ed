"""Run PowerSGD on fake buckets: hooks, states, steps, and the state's error and directions after them."""

import io
import logging
import math

import torch
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_powersgd

from gradcomp.hooks import default_hooks, powerSGD_hook
from tests.hooks.powersgd_oracle import Bucket, random_gradient
from tests.kept import error_in
from tests.ranks import simulate as simulate

START = 2
# Convolutions, vectors, small, tall and wide tensors, and three tensors of one shape, not side by side.
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
    "bf16 around batched": default_hooks.bf16_compress_wrapper(powerSGD_hook.batched_powerSGD_hook),
}
LOGGER = "gradcomp.hooks.powerSGD_hook"
# The attributes of both torch's state and gradcomp's.
COMMON = (
    *("matrix_approximation_rank", "start_powerSGD_iter", "min_compression_rate", "use_error_feedback"),
    *("warm_start", "orthogonalization_epsilon", "compression_stats_logging_frequency"),
    *("batch_tensors_with_same_shape", "iter", "next_stats_report"),
    *("total_numel_before_compression", "total_numel_after_compression"),
)


class Messages(logging.Handler):
    """A context that collects a logger's messages as "LEVEL text"."""

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


def reload(value, **options):
    """Save the value with torch.save, and load it with torch.load's safe default. options: of torch.load."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, **options)


def equal(one, other):
    """Return whether nested lists, dicts, tensors and plain values are equal, tensors to the bit."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return one == other


def new_state(module=powerSGD_hook, **options):
    """Return a PowerSGDState of this module, gradcomp's or torch's."""
    defaults = {"process_group": None, "matrix_approximation_rank": 2, "start_powerSGD_iter": START}
    return module.PowerSGDState(**(defaults | options))


def run_step(module, state, gradient, shapes, hook="powerSGD_hook"):
    return getattr(module, hook)(state, Bucket(gradient.clone(), shapes)).wait()


def run_steps(state, rank, steps, shapes=FEW_SHAPES, hook="powerSGD", dtype=torch.float32):
    """Run the hook once per step, on new parameters each time; the state takes them for a new model's."""
    gradients = [random_gradient(shapes, rank, step, dtype) for step in steps]
    return [HOOKS[hook](state, Bucket(gradient, shapes)).wait() for gradient in gradients]


def continued_from(theirs, shapes, **options):
    """Return a gradcomp state with the options, the error and the Q of torch's state.

    theirs: has compressed one bucket, with tensors of these shapes.
    options: options that torch doesn't have.
    """
    given = {name: getattr(theirs, name) for name in COMMON[:8]}
    ours = powerSGD_hook.PowerSGDState(theirs.process_group, **given, **options)
    for _ in range(ours.start_powerSGD_iter + 1):  # now the state has an error and a Q to replace
        powerSGD_hook.powerSGD_hook(ours, Bucket(random_gradient(shapes, 0, 0), shapes)).wait()
    saved, flat = ours.state_dict(), theirs.q_memory_dict[0]
    entries = list(saved["parameters"].values())
    errors = theirs.error_dict[0].split([math.prod(shape) for shape in shapes])
    for entry, error in zip(entries, errors, strict=True):
        entry["error"] = error.clone().view_as(entry["error"])
    for tensor in [each.tensor for each in ours.options.layout(shapes, torch.float32).matrices]:
        direction = entries[tensor]["direction"]
        entries[tensor]["direction"] = flat[: direction.numel()].view_as(direction).clone()
        flat = flat[direction.numel() :]
    ours.load_state_dict(saved)
    return ours


def step_of_both(rank, options, shapes, **own):
    """Take three compressed steps with torch's hook, then one step with both from torch's state.

    own: options that torch doesn't have.

    Returns (output, error) of ours, and of theirs.
    """
    options = {"process_group": None, "start_powerSGD_iter": START, **options}
    theirs = torch_powersgd.PowerSGDState(**options)
    for step in range(START + 3):
        torch_powersgd.powerSGD_hook(theirs, Bucket(random_gradient(shapes, rank, step), shapes)).wait()
    ours = continued_from(theirs, shapes, **own)
    gradient = random_gradient(shapes, rank, 99)
    their_output = torch_powersgd.powerSGD_hook(theirs, Bucket(gradient.clone(), shapes)).wait()
    our_output = powerSGD_hook.powerSGD_hook(ours, Bucket(gradient, shapes)).wait()
    return (our_output, error_in(ours)), (their_output, theirs.error_dict[0])
