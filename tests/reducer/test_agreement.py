"""Test that all ranks raise an error that names the option or hook, if Reducers or wrappers differ in one."""

import functools
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as torch_default

from gradcomp import DistributedDataParallel
from gradcomp.hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    bf16_compress_wrapper,
    fp16_compress_hook,
    fp16_compress_wrapper,
)
from gradcomp.hooks.powerSGD_hook import PowerSGDState, batched_powerSGD_hook, powerSGD_hook
from gradcomp.reducer import Reducer
from tests.parallel.beside_torch import run_quietly
from tests.reducer.models import Embeddings, run_cases

# The values on ranks 0 and 1, by the option.
OPTIONS = {
    "bucket_cap_mb": (1.0, 2.0),
    "gradient_as_bucket_view": (True, False),
    "find_unused_parameters": (False, True),
    "static_graph": (True, False),
    "skip_all_reduce_unused_params": (False, True),
}
OF_THE_WRAPPER = {"broadcast_buffers": (True, False), "forward_sync_buffers": (True, False)}
OF_THE_REDUCER = {"first_bucket_cap_mb": (1.0, 2.0)}


def said_by(function, *arguments):
    try:
        function(*arguments)
    except RuntimeError as error:
        return str(error)
    return "nothing"


def construct(rank, of_the_wrapper, options):
    if of_the_wrapper:
        run_quietly(lambda cls, _: cls(nn.BatchNorm1d(3), **options), DistributedDataParallel, rank)
    else:
        Reducer(nn.Linear(3, 3).parameters(), **options)


@pytest.mark.ranks(2)
def test_other_options(rank):
    for of_the_wrapper, others in ((True, OF_THE_WRAPPER), (False, OF_THE_REDUCER)):
        for name, values in (OPTIONS | others).items():
            first, second = (str(value).lower() for value in values)
            with pytest.raises(RuntimeError, match=f"{name}.* is {first} on rank 0 and {second} on rank 1"):
                construct(rank, of_the_wrapper, {name: values[rank]})


@pytest.mark.ranks(2)
def test_other_sparse_parameters(rank):
    """Construct with different sparse parameters, and with equal options of other types."""
    model = Embeddings()
    sparse = [] if rank else [model.sparse.weight]
    with pytest.raises(RuntimeError, match="the number of sparse parameters is 1 on rank 0 and 0 on rank 1"):
        Reducer(model.named_parameters(), sparse_params=sparse)
    Reducer(model.parameters(), bucket_cap_mb=1.0 if rank else 1, find_unused_parameters=1 if rank else True)


class MyHook:
    """This hook is an instance, whose repr has an address."""

    def __call__(self, state, bucket):
        return allreduce_hook(None, bucket)


def one_hook(rank, state, hook):
    """Take a first step; return the message, or the gradient."""
    model = nn.Linear(3, 3)
    reducer = Reducer(model.parameters())
    if hook is not None:
        reducer.register_comm_hook(state, hook)
    said = said_by(model(torch.full((1, 3), rank + 1.0)).sum().backward)
    reducer.close()
    return said if said != "nothing" else model.weight.grad


def power(process_group=None):
    return PowerSGDState(process_group, 1, 2)


def named(hook):
    return "null" if hook is None else f'"{hook.__module__}.{hook.__qualname__}"'


def of_a_subgroup():
    """Return a group of all ranks except the last; None on the last rank."""
    group = dist.new_group(range(dist.get_world_size() - 1), timeout=timedelta(seconds=20))
    return group if isinstance(group, dist.ProcessGroup) else None


# Of ranks 0 and 1.
HOOKS = [
    (fp16_compress_hook, bf16_compress_hook),
    (None, fp16_compress_hook),
    (fp16_compress_hook, torch_default.fp16_compress_hook),
    (powerSGD_hook, batched_powerSGD_hook),
    (fp16_compress_wrapper(powerSGD_hook), bf16_compress_wrapper(powerSGD_hook)),
]
ALIKE = [
    lambda rank: (None, None),
    lambda rank: ({"rank": rank}, MyHook()),
    lambda rank: (None, functools.partial(MyHook())),
    lambda rank: (None, functools.partial(allreduce_hook)),
    lambda rank: (None, fp16_compress_wrapper(MyHook())),
    lambda rank: (dist.group.WORLD if rank else None, allreduce_hook),
]


@pytest.mark.ranks(2)
def test_other_hooks(rank):
    for first, second in HOOKS:
        state = power() if "powerSGD" in named(first) else None
        message = one_hook(rank, state, (first, second)[rank])
        assert f"hook is {named(first)} on rank 0 and {named(second)} on rank 1" in message
    message = one_hook(rank, {} if rank else None, MyHook())
    assert 'the state\'s type is null on rank 0 and "builtins.dict"' in message


@pytest.mark.ranks(2)
def test_hooks_that_are_the_same(rank):
    """Instances and partials, the default group given as None, and states without a group are the same."""
    for hooks in ALIKE:
        assert torch.equal(one_hook(rank, *hooks(rank)), torch.full((3, 3), 1.5))


def step_with(state, hook, group):
    """Take a step of a Reducer; return it, its parameter, and the message."""
    reducer = Reducer([param := nn.Parameter(torch.full((2,), float(dist.get_rank())))], group)
    reducer.register_comm_hook(state, hook)
    return reducer, param, said_by(param.square().sum().backward)


@pytest.mark.ranks(3)
def test_a_hook_of_another_group(rank):
    """Take a step where rank 2 of three isn't in the reducer's group, or in the hook's, or has left that."""
    pair = of_a_subgroup()
    if rank < 2:
        messages = [
            step_with(state, hook, pair)[2]
            for state, hook in (
                (power(), powerSGD_hook),
                (None, fp16_compress_hook),
                (dist.group.WORLD, fp16_compress_hook),
            )
        ]
        state = power(pair)
        _kept, param, said = step_with(state, powerSGD_hook, pair)
        assert said == "nothing"
        state.process_group = None
        for message in (*messages, said_by(param.square().sum().backward)):
            assert "averages over the ranks [0, 1, 2], but the parameters are averaged over [0, 1]" in message
    *_, message = step_with(pair, fp16_compress_hook, None)
    assert 'process group is "ranks [0, 1]" on ranks 0, 1 and "ranks [0, 1, 2]" on rank 2' in message
    _, param, said = step_with(None, allreduce_hook, dist.new_group(range(3)))
    assert (said, param.grad.tolist()) == ("nothing", [2.0, 2.0])


def collectives(rank, cls, options):
    """Return the collectives of construction and of each of three steps."""
    counted = []
    gather = dist.all_gather
    dist.all_gather = lambda *args, **kwargs: (counted.append(1), gather(*args, **kwargs))[1]
    model = nn.Linear(3, 3)
    reducer = Reducer(model.parameters(), **options) if cls is Reducer else cls(model, **options)
    counts = [len(counted)]
    reducer.register_comm_hook(None, allreduce_hook)
    for _ in range(3):
        (model if cls is Reducer else reducer)(torch.ones(1, 3)).sum().backward()
        counts.append(len(counted))
    dist.all_gather = gather
    return counts


def test_hooks_are_compared_once(run_ranks):
    cases = [
        (Reducer, {}),
        (Reducer, {"verify": False}),
        (DistributedDataParallel, {}),
        (DistributedDataParallel, {"init_sync": False}),
    ]
    for results in run_ranks(run_cases, 2, collectives, cases):
        assert results == [[1, 2, 2, 2], [0, 1, 1, 1], [2, 3, 3, 3], [0, 1, 1, 1]]


@pytest.mark.ranks(2)
def test_options_are_compared_in_the_first_step_at_the_latest(rank):
    ddp = DistributedDataParallel(nn.Linear(3, 3), init_sync=False, static_graph=bool(rank))
    message = said_by(ddp(torch.ones(1, 3)).sum().backward)
    assert "static_graph is false on rank 0 and true on rank 1" in message
