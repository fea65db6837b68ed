"""Test average_, which averages a list of tensors once, through any hook."""

import copy
import pickle
import re

import pytest
import torch

import gradcomp
from gradcomp.hooks import debugging_hooks, default_hooks
from gradcomp.hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from gradcomp.hooks.quantization_hooks import QuantizationState, quantization_hook
from tests.reducer.models import on_device, run_cases
from tests.tolerances import average

HOOKS = {"none": None, "fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.complex64)


# The hook with the dtypes that one call averages.
CASES = [("none", DTYPES), ("fp16", [torch.float32]), ("bf16", [torch.float32])]
WIRES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def tensors_of(rank, dtype):
    """Return contiguous, 0-dim and empty tensors, two strided on even ranks, and every other row of one."""
    seeded = torch.Generator().manual_seed(rank)
    shapes = ((3, 4), (), (0, 2), (7,), (5, 6), (4, 6, 3, 3), (40, 7))
    *tensors, wide, images, rows = [on_device(torch.randn(s, generator=seeded).to(dtype)) for s in shapes]
    strided = [wide.t(), images.to(memory_format=torch.channels_last)]
    return [*tensors, *(each.contiguous() if rank % 2 else each for each in strided), rows[::2]]


def average_once(rank, hook, dtypes):
    mine, result = ([each for dtype in dtypes for each in tensors_of(rank, dtype)] for _ in range(2))
    assert gradcomp.average_(result, HOOKS[hook]) is result
    between = result[-1].as_strided((20, 7), (14, 1), 7)
    assert torch.equal(between, mine[-1].as_strided((20, 7), (14, 1), 7))
    return mine, result


def test_the_mean(run_group):
    check_all(run_group(run_cases, average_once, CASES))


def test_the_mean_of_three_ranks(run_ranks):
    check_all(run_ranks(run_cases, 3, average_once, CASES))


def check_all(ranks):
    for index, (hook, _) in enumerate(CASES):
        check([results[index] for results in ranks], WIRES.get(hook))


def check(ranks, wire):
    for index, first in enumerate(ranks[0][1]):
        wide = torch.complex128 if first.is_complex() else torch.float64
        values = torch.stack([mine[index].to(wide) for mine, _ in ranks])
        own = torch.float32 if first.is_complex() else first.dtype
        bound = average(wire or own, len(ranks), values.abs().amax(0).double())
        assert all(torch.equal(result[index], first) for _, result in ranks)
        assert first.dtype == ranks[0][0][index].dtype
        assert ((first.to(wide) - values.mean(0)).abs() <= 2 * bound).all()


@pytest.mark.ranks(1)
def test_arguments(rank):
    ones, world = torch.ones(2), torch.distributed.group.WORLD
    for message, *given in [
        (r"TypeError.*floating-point or complex tensors, got torch\.int64", [ones.long()]),
        ("TypeError.*got str", ["text"]),
        ("TypeError.*expanded view: give it a", [torch.ones(1, 2).expand(2, 2)]),
        ("TypeError.*conjugated, negated or", [torch.ones(2, dtype=torch.complex64).conj().imag]),
        ("TypeError.*takes a list of tensors, got an object of type list_iterator", iter([ones])),
        (r"TypeError.*got a tensor .*average_\(\[tensor\]\)", ones),
        ("ValueError.*in its state", [ones], debugging_hooks.noop_hook, None, world),
        ("ExplainedError.*returned Tensor, but must return", [ones], lambda state, bucket: bucket.buffer()),
    ]:
        with pytest.raises((TypeError, ValueError, RuntimeError)) as caught:
            gradcomp.average_(*given)
        assert re.match(message, repr(caught.value)), caught.value
    kept = torch.nn.Parameter(torch.ones(2))
    gradcomp.average_([kept])
    assert gradcomp.average_([]) == []


def test_no_process_group():
    with pytest.raises(RuntimeError, match="init_process_group"):
        gradcomp.average_([torch.ones(2)])


@pytest.mark.ranks(2)
def test_keys_tell_lists_apart(rank):
    """Average two lists of new tensors of one shape alternately, with one state."""
    state = PowerSGDState(None, 1, 2)
    errors = {}
    for step in range(8):
        name = ("first", "second")[step % 2]
        tensor = torch.full((40, 30), 1.0) if name == "first" else torch.randn(40, 30)
        gradcomp.average_([tensor], powerSGD_hook, state, keys=[name])
        errors[name] = state.state.get(f"average_({name!r})", {}).get("error")
    for wrong in ["one"], ["one", "one"]:
        with pytest.raises(ValueError, match="one key per tensor"):
            gradcomp.average_([torch.ones(2), torch.ones(2)], powerSGD_hook, state, keys=wrong)
    # A matrix of rank 1 leaves no error, and the second list's error doesn't reach it.
    assert errors["first"].abs().max() < 1e-5
    assert errors["second"].abs().max() > 0.1


@pytest.mark.ranks(2)
def test_what_else_lives_on_a_rank_does_not_matter(rank):
    """Average persistent tensors, and replace some between calls; rank 0 keeps the old ones alive."""
    state = PowerSGDState(None, 1, 100)
    tensors, kept = [torch.empty(8, 8) for _ in range(4)], []
    results = []
    for step in range(6):
        if step == 3:
            if rank == 0:
                kept.extend(tensors)
            tensors = [torch.empty(8, 8) for _ in range(3)] + tensors[3:]
        for index, tensor in enumerate(tensors):
            tensor.fill_(10.0**index)
        gradcomp.average_(tensors, powerSGD_hook, state)
        results.append([tensor.unique().tolist() for tensor in tensors])
    assert results == [[[1.0], [10.0], [100.0], [1000.0]]] * 6


@pytest.mark.ranks(1)
def test_what_another_shape_replaces_is_forgotten_but_keys_are_not(rank):
    """Average a tensor with a key, then others of several sizes without, then zeros with the key."""
    state, errors = QuantizationState(bits=4, block_size=16), []
    for rows in (8, 8, 8, 9, 10):
        keys = ["kept"] if rows == 8 else None
        gradcomp.average_([torch.randn(rows, 16)], quantization_hook, state, keys=keys)
        errors.append(state.state["average_('kept')"]["error"].clone() if rows != 8 else None)
    assert len(state.state) == 2
    gradcomp.average_([zeros := torch.zeros(8, 16)], quantization_hook, state, keys=["kept"])
    assert torch.equal(errors[3], errors[4])
    assert zeros.any()


def loaded(state, make):
    new = make()
    new.load_state_dict(state.state_dict())
    return new


RESUMED = {
    "int4": (lambda: QuantizationState(bits=4, block_size=32), quantization_hook),
    "PowerSGD": (lambda: PowerSGDState(None, 2, 2), powerSGD_hook),
    "int8 factors": (lambda: PowerSGDState(None, 2, 2, factor_dtype=torch.int8), powerSGD_hook),
}
KEYS = (torch.float32, "abc"), (torch.float64, (0, 1, 2)), (torch.float32, (("x", 1), "x", 1))
WAYS = {
    "loaded": loaded,
    "copied": lambda state, make: copy.deepcopy(state),
    "pickled": lambda state, make: pickle.loads(pickle.dumps(state)),
}


@pytest.mark.ranks(2)
def test_errors_go_on_by_key_in_another_order(rank):
    """The ranks' orders differ. The state also averages a model whose parameters have the keys as names."""
    lost = {}
    for name, (make, hook) in RESUMED.items():
        for way, go_on in WAYS.items():
            for dtype, keys in KEYS:
                state, shapes = make(), [(24, 20), (20, 24), (24, 20)]
                model = torch.nn.ParameterDict({str(key): torch.zeros(2, dtype=dtype) for key in keys})
                state.number_parameters(model.named_parameters())
                total = torch.zeros(3, 480, dtype=torch.float64)
                for step in range(8):
                    if step == 4:
                        state = go_on(state, make)
                        state.number_parameters(model.named_parameters())
                    generator = torch.Generator().manual_seed(10 * step + rank)
                    tensors = [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]
                    total += torch.stack([each.flatten().double() for each in tensors])
                    order = (0, 1, 2) if (step < 4) == (rank == 0) else (2, 0, 1)
                    given = [tensors[index] for index in order]
                    gradcomp.average_(given, hook, state, keys=[keys[index] for index in order])
                    total -= torch.stack([each.flatten().double() for each in tensors])
                owed = [state.state[f"average_({key!r})"]["error"].flatten().double() for key in keys]
                left = total - torch.stack(owed)
                torch.distributed.all_reduce(left)
                lost[f"{name}, {way}, {dtype}, {keys}"] = float(left.norm() / total.norm())
    assert {name: value for name, value in lost.items() if value > 1e-5} == {}
