"""The short PowerSGD and quantized all-reduce stay short, import no library, and average as the hooks do."""

import ast
import inspect

import pytest
import torch
import torch.distributed as dist

from docs.examples import simple
from gradcomp.hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from gradcomp.hooks.quantization_hooks import QuantizationState, quantization_hook
from gradcomp.testing import run_ranks
from tests.hooks.powersgd_oracle import Bucket, random_gradient, relative
from tests.kept import directions_in, error_in
from tests.oracle import PowerSGDOracle, split
from tests.tolerances import SIMPLE_STEPS

# Two matrices of one shape, a kernel, a vector, a matrix too small to compress, and a number. With 2 or 3
# ranks, no rank has a block of zeros. Beside one, plain torch rounds scales twice.
SHAPES = ((12, 10), (7,), (8, 3, 2, 2), (12, 10), (3, 2), ())
STEPS, RANK, BLOCK_SIZE = 5, 2, 8


def gradients_of(rank, step):
    return split(random_gradient(SHAPES, rank, step, torch.float64), SHAPES)


def steps_of_hook(hook, state, rank, steps):
    bucket, outputs = Bucket(torch.zeros(0, dtype=torch.float64), SHAPES), []
    for step in steps:
        bucket.set_buffer(torch.cat([each.flatten() for each in gradients_of(rank, step)]))
        outputs.append(hook(state, bucket).wait().clone())
    return outputs


def steps_of_simple(average, memories, rank, steps):
    """Call average(gradient, memory) for every tensor in every step; return the averages as flat buckets."""
    return [
        torch.cat([average(*each).flatten() for each in zip(gradients_of(rank, step), memories, strict=True)])
        for step in steps
    ]


def power_sgd_steps(rank, group):
    state = PowerSGDState(group, RANK, start_powerSGD_iter=2)
    steps_of_hook(powerSGD_hook, state, rank, range(3))
    # The hook's first Q has other random numbers, so the short form continues after the hook's third step.
    memories = [{} for _ in SHAPES]
    errors = split(error_in(state), SHAPES)
    for index, q in zip(PowerSGDOracle(SHAPES, RANK).compressed, directions_in(state), strict=True):
        memories[index].update(Q=q, E=errors[index].flatten(1))
    steps = range(3, 3 + STEPS)
    expected = steps_of_hook(powerSGD_hook, state, rank, steps)
    got = steps_of_simple(lambda g, memory: simple.power_sgd(g, memory, RANK, group), memories, rank, steps)
    return expected, got


def quantized_steps(rank, group):
    """Each tensor is a bucket: the rank that owns a block depends on the bucket."""
    state, memories = QuantizationState(group, bits=8, block_size=BLOCK_SIZE), [{} for _ in SHAPES]
    buckets = [
        Bucket(torch.zeros(0, dtype=torch.float64), (shape,), index, index == 5)
        for index, shape in enumerate(SHAPES)
    ]

    def by_the_hook(gradient, bucket):
        bucket.set_buffer(gradient.flatten().clone())
        return quantization_hook(state, bucket).wait().clone()

    def average(gradient, memory):
        if gradient.ndim > 1 and gradient.numel() >= BLOCK_SIZE:
            return simple.quantized_all_reduce(gradient, memory, BLOCK_SIZE, group)
        dist.all_reduce(gradient, group=group)
        return gradient / group.size()

    expected = steps_of_simple(by_the_hook, buckets, rank, range(STEPS))
    return expected, steps_of_simple(average, memories, rank, range(STEPS))


@pytest.mark.usefixtures("plain_torch")
@pytest.mark.parametrize(
    ("function", "world_size", "ranks"),
    [
        (power_sgd_steps, 1, "simulated"),
        (power_sgd_steps, 2, "simulated"),
        (power_sgd_steps, 3, "simulated"),
        (power_sgd_steps, 2, "gloo"),
        (quantized_steps, 1, "simulated"),
        (quantized_steps, 3, "simulated"),  # the hook's two ranks average in one exchange
        (quantized_steps, 3, "gloo"),
    ],
)
def test_the_hooks_averages(function, world_size, ranks):
    """A single different code would change an element by 1 / 254 of its block's largest value."""
    results = run_ranks(function, world_size, ranks=ranks)
    for expected, got in results:
        assert len(got) == STEPS
        for theirs, ours, of_rank_0 in zip(expected, got, results[0][1], strict=True):
            assert relative(ours, theirs) <= SIMPLE_STEPS
            assert torch.equal(ours, of_rank_0)


def first_steps(rank, group):
    """Return the rank's sum of gradients, its sum of averages, and its error, all of one matrix."""
    memory, given, averages = {}, 0.0, 0.0
    for step in range(3):
        gradient = gradients_of(rank, step)[0]
        given, averages = given + gradient, averages + simple.power_sgd(gradient, memory, RANK, group)
    return given, averages, memory["E"]


def test_power_sgd_begins_with_the_same_q_on_every_rank_and_loses_nothing():
    given, averages, errors = map(torch.stack, zip(*run_ranks(first_steps, 2), strict=True))
    assert torch.equal(*averages)
    assert relative(averages[0] + errors.mean(0), given.mean(0)) <= SIMPLE_STEPS


def test_zeros_stay_zeros():
    codes, scales = simple.quantize(torch.zeros(2, 4))
    assert not codes.any()
    assert not scales.any()


def test_it_is_short_and_needs_torch_alone():
    for function in (simple.power_sgd, simple.quantized_all_reduce):
        assert len(inspect.getsource(function).splitlines()) <= 45
    nodes = list(ast.walk(ast.parse(inspect.getsource(simple))))
    imported = {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    imported |= {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    assert imported == {"__future__", "torch", "torch.distributed"}
