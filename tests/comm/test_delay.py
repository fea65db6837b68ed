"""Links with a delay: what ranks agree on, and hooks that then average in as few exchanges as they can."""

import math
import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import gradcomp
from gradcomp.comm import exchange
from gradcomp.comm.exchange import GIVEN, has_delay, round_trip_s
from gradcomp.hooks import default_hooks, powerSGD_hook
from gradcomp.hooks.quantization_hooks import (
    QuantizationState,
    quantization_hook,
    quantization_pertensor_hook,
)
from tests.hooks.powersgd_oracle import Bucket, random_gradient
from tests.reducer.models import run_cases

CPU = torch.zeros(1)


def measured(rank, by_rank):
    """Return the round trip that ranks agree on, if a rank measures these times one after another."""
    times = iter(by_rank[rank])
    with mock.patch.dict(os.environ), mock.patch.object(exchange, "_measured_s", side_effect=times):
        del os.environ[GIVEN]
        return round_trip_s(CPU, dist.group.WORLD), round_trip_s(CPU, dist.group.WORLD), len(list(times))


@pytest.mark.parametrize(
    ("by_rank", "expected", "left"),
    [
        ([[0.001, 9.0], [0.002, 9.0]], 0.002, 1),
        # A busy processor's time is measured again.
        ([[0.010, 0.001, 9.0], [0.001, 0.003, 9.0]], 0.003, 1),
        ([[0.050, 0.060, 0.070], [0.060, 0.052, 0.052]], 0.060, 0),
    ],
)
def test_ranks_agree_on_the_slowest_ranks_time(run_ranks, by_rank, expected, left):
    assert run_ranks(measured, 2, by_rank) == [(expected, expected, left)] * 2


def really_measured(rank):
    between = dist.new_group()
    with mock.patch.dict(os.environ, {GIVEN: "1000"}):
        assert has_delay(CPU, between)
    with (
        mock.patch.dict(os.environ),
        mock.patch.object(exchange._Channel, "take", side_effect=AssertionError),
    ):
        del os.environ[GIVEN]  # messages whose receives are posted ahead would take no time
        return round_trip_s(CPU, dist.group.WORLD, between)


def test_a_measured_time_is_the_same_on_all_ranks(run_ranks):
    first, second, third = run_ranks(really_measured, 3)
    assert 0 < first == second == third < math.inf


def given(rank, texts):
    with (
        mock.patch.dict(os.environ, {GIVEN: texts[rank]}),
        mock.patch.object(exchange, "_measured_s", side_effect=AssertionError),
    ):
        try:
            return round_trip_s(CPU, dist.group.WORLD), has_delay(CPU, dist.group.WORLD)
        except ValueError as error:
            return str(error)


@pytest.mark.parametrize(
    ("texts", "expected"),
    [(["0", "0"], (0.0, False)), (["50", "60"], (0.06, True)), (["4.9", "5"], (0.005, True))],
)
def test_a_given_time_is_not_measured(run_ranks, texts, expected):
    assert run_ranks(given, 2, texts) == [expected] * 2


@pytest.mark.parametrize("bad", ["-1", "inf", "nan", "25 ms", ""])
def test_a_bad_time_is_an_error_on_every_rank(run_ranks, bad):
    first, second = run_ranks(given, 2, [bad, "0"])
    assert f"{GIVEN} must be a finite number of at least 0" in first
    assert repr(bad) in first
    assert "on this rank it is '0'" in second


SHAPES = [[(60, 40), (40,)], [(30, 50)], [(7,), (20, 20)]]
STATELESS = {
    "allreduce": default_hooks.allreduce_hook,
    "fp16": default_hooks.fp16_compress_hook,
    "bf16": default_hooks.bf16_compress_hook,
    "pertensor": quantization_pertensor_hook,
    "bf16 around fp16": default_hooks.bf16_compress_wrapper(default_hooks.fp16_compress_hook),
}
POWERSGD = {"matrix_approximation_rank": 20, "start_powerSGD_iter": 2}
WITH_STATE = {
    "int4": (QuantizationState, {"bits": 4}),
    "int8": (QuantizationState, {"bits": 8}),
    "16 bits": (QuantizationState, {"bits": 16}),
    "int8 hierarchical": (QuantizationState, {"bits": 8, "ranks_per_node": 2}),
    "PowerSGD": (powerSGD_hook.PowerSGDState, POWERSGD),
    "PowerSGD bf16": (powerSGD_hook.PowerSGDState, POWERSGD | {"factor_dtype": torch.bfloat16}),
    "PowerSGD int8": (powerSGD_hook.PowerSGDState, POWERSGD | {"factor_dtype": torch.int8}),
    "PowerSGD hierarchical": (powerSGD_hook.PowerSGDState, POWERSGD | {"ranks_per_node": 2}),
}


def trained(rank, name, limit):
    """Return the gradients and averages of four steps."""
    with mock.patch.dict(os.environ, {GIVEN: "50"}), mock.patch.object(exchange, "ONE_EXCHANGE_BYTES", limit):
        if name in STATELESS:
            hook, state = STATELESS[name], None
        else:
            make, options = WITH_STATE[name]
            hook = quantization_hook if make is QuantizationState else powerSGD_hook.powerSGD_hook
            state = make(None, **options)
        parameters = [Bucket(torch.zeros(1), shapes).parameters() for shapes in SHAPES]
        found = []
        for step in range(4):
            gradients = [random_gradient(shapes, rank, step) for shapes in SHAPES]
            buckets = [
                gradcomp.comm.bucket.GradBucket(index, gradient.clone(), owned, index == len(SHAPES) - 1)
                for index, (gradient, owned) in enumerate(zip(gradients, parameters, strict=True))
            ]
            futures = [hook(state, bucket) for bucket in buckets]
            found.append((torch.cat(gradients), torch.cat([future.wait() for future in futures])))
        return found


@pytest.mark.parametrize(
    ("world_size", "limit"), [(2, 0), (4, 0), (4, 2**18)], ids=["2", "4, two exchanges", "4, one"]
)
def test_replicas_are_equal_and_averages_right(run_ranks, world_size, limit):
    names = [*STATELESS, *WITH_STATE]
    ranks = run_ranks(run_cases, world_size, trained, [(name, limit) for name in names])
    for name, results in zip(names, zip(*ranks, strict=True), strict=True):
        for of_step in zip(*results, strict=True):
            mean = torch.stack([gradient.double() for gradient, _ in of_step]).mean(0)
            assert all(torch.equal(averaged, of_step[0][1]) for _, averaged in of_step), name
        # Of the last step; of a matrix PowerSGD of rank 20 keeps the most.
        lost = (of_step[0][1].double() - mean).norm() / mean.norm()
        assert lost <= {"allreduce": 1e-6, "fp16": 1e-3}.get(name, 0.6), name


def without_a_hook(rank):
    """Average by the Reducer, and by average_. No rank uses the last layer, one rank the middle one."""
    with mock.patch.dict(os.environ, {GIVEN: "50"}):
        layers = torch.nn.ModuleList([torch.nn.Linear(30, 30) for _ in range(3)])
        for each in layers.parameters():
            torch.nn.init.constant_(each, 0.01)
        reducer = gradcomp.Reducer(layers.parameters(), bucket_cap_mb=0.002, find_unused_parameters=True)
        output = layers[0](torch.full((2, 30), float(rank + 1)))
        output = output if rank else layers[1](output)
        reducer.prepare_for_backward(output)
        output.sum().backward()
        tensors = [torch.full((5,), float(rank)), torch.full((2, 2), 2.0 * rank, dtype=torch.float64)]
        gradcomp.average_(tensors)
        own = torch.nn.ModuleList([torch.nn.Linear(30, 30) for _ in range(2)])
        for each in own.parameters():
            torch.nn.init.constant_(each, 0.01)
        output = own[0](torch.full((2, 30), float(rank + 1)))
        (output if rank else own[1](output)).sum().backward()
        wanted = [torch.zeros_like(each) if each.grad is None else each.grad for each in own.parameters()]
        return [each.grad for each in layers.parameters()], tensors, wanted


@pytest.mark.parametrize("world_size", [2, 3])
def test_averages_without_a_hook(run_ranks, world_size):
    results = run_ranks(without_a_hook, world_size)
    wanted = [sum(each) / world_size for each in zip(*(own for *_, own in results), strict=True)]
    for averaged, tensors, _ in results:
        assert averaged[4] is averaged[5] is None
        torch.testing.assert_close(averaged[:4], wanted)
        middle = (world_size - 1) / 2
        torch.testing.assert_close(tensors[0], torch.full((5,), middle))
        torch.testing.assert_close(tensors[1], torch.full((2, 2), 2 * middle, dtype=torch.float64))
