"""Test that all ranks raise an error that names the option or hook, if Reducers or wrappers differ in one."""

import functools
import re
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as torch_default

from gradcomp import DistributedDataParallel
from gradcomp.hooks import default_hooks, powerSGD_hook
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
        return default_hooks.allreduce_hook(None, bucket)


def one_hook(rank, hooks):
    """Take a first step with the (state, hook) of this rank; return the message, or None and the gradient."""
    model = nn.Linear(3, 3)
    reducer = Reducer(model.parameters())
    chosen = hooks(rank)
    if chosen is not None:
        reducer.register_comm_hook(*chosen)
    nn.init.ones_(model.weight)
    said = said_by(model(torch.full((1, 3), rank + 1.0)).sum().backward)
    reducer.close()
    return said if said != "nothing" else model.weight.grad


def power(rank, process_group=None):
    return powerSGD_hook.PowerSGDState(process_group, 1, 2)


def of_a_subgroup():
    """Return a group of all ranks except the last; None on the last rank."""
    group = dist.new_group(range(dist.get_world_size() - 1), timeout=timedelta(seconds=20))
    return group if isinstance(group, dist.ProcessGroup) else None


HOOKS = [
    (
        lambda rank: (None, (default_hooks.fp16_compress_hook, default_hooks.bf16_compress_hook)[rank]),
        r'hook is "gradcomp\.hooks\.default_hooks\.fp16_compress_hook" on rank 0 '
        r'and .*bf16_compress_hook" on rank 1',
    ),
    (lambda rank: (None, default_hooks.fp16_compress_hook) if rank else None, "hook is null on rank 0 and "),
    (
        lambda rank: (None, (default_hooks.fp16_compress_hook, torch_default.fp16_compress_hook)[rank]),
        r'"torch\.distributed\.algorithms\.ddp_comm_hooks\.default_hooks\.fp16_compress_hook" on rank 1',
    ),
    (
        lambda rank: (power(rank), (powerSGD_hook.powerSGD_hook, powerSGD_hook.batched_powerSGD_hook)[rank]),
        r"powerSGD_hook\.powerSGD_hook\" on rank 0 and .*batched_powerSGD_hook\" on rank 1",
    ),
    (
        lambda rank: (
            power(rank),
            (default_hooks.fp16_compress_wrapper, default_hooks.bf16_compress_wrapper)[rank](
                powerSGD_hook.powerSGD_hook
            ),
        ),
        r"fp16_compress_wrapper\(powerSGD_hook\)\" on rank 0 "
        r"and .*bf16_compress_wrapper\(powerSGD_hook\)\" on rank 1",
    ),
    (
        lambda rank: ({} if rank else None, MyHook()),
        r"the state's type is null on rank 0 and \"builtins.dict\"",
    ),
]
ALIKE = [
    lambda rank: None,
    lambda rank: ({"rank": rank}, MyHook()),
    lambda rank: (None, functools.partial(MyHook())),
    lambda rank: (None, functools.partial(default_hooks.allreduce_hook)),
    lambda rank: (None, default_hooks.fp16_compress_wrapper(MyHook())),
    lambda rank: (dist.group.WORLD if rank else None, default_hooks.allreduce_hook),
]


@pytest.mark.ranks(2)
def test_other_hooks(rank):
    for hooks, message in HOOKS:
        assert re.search(message, one_hook(rank, hooks))


@pytest.mark.ranks(2)
def test_hooks_that_are_the_same(rank):
    """Instances and partials, the default group given as None, and states without a group are the same."""
    for hooks in ALIKE:
        assert torch.equal(one_hook(rank, hooks), torch.full((3, 3), 1.5))


def step_with(state, hook, group):
    """Take a step of a Reducer; return it, its parameter, and the message."""
    reducer = Reducer([param := nn.Parameter(torch.full((2,), float(dist.get_rank())))], group)
    reducer.register_comm_hook(state, hook)
    return reducer, param, said_by(param.square().sum().backward)


@pytest.mark.ranks(3)
def test_a_hook_of_another_group(rank):
    """Take a step where rank 2 of three isn't in the reducer's group, or in the hook's, or has left that."""
    pair = of_a_subgroup()
    powersgd, fp16 = powerSGD_hook.powerSGD_hook, default_hooks.fp16_compress_hook
    if rank < 2:
        messages = [
            step_with(state, hook, pair)[2]
            for state, hook in ((power(rank), powersgd), (None, fp16), (dist.group.WORLD, fp16))
        ]
        state = power(rank, process_group=pair)
        _kept, param, said = step_with(state, powersgd, pair)
        assert said == "nothing"
        state.process_group = None
        for message in (*messages, said_by(param.square().sum().backward)):
            assert "averages over the ranks [0, 1, 2], but the parameters are averaged over [0, 1]" in message
    *_, message = step_with(pair, fp16, None)
    assert 'process group is "ranks [0, 1]" on ranks 0, 1 and "ranks [0, 1, 2]" on rank 2' in message
    _, param, said = step_with(None, default_hooks.allreduce_hook, dist.new_group(range(3)))
    assert (said, param.grad.tolist()) == ("nothing", [2.0, 2.0])


def collectives(rank, cls, options):
    """Return the collectives of construction and of each of three steps."""
    counted = []
    gather = dist.all_gather
    dist.all_gather = lambda *args, **kwargs: (counted.append(1), gather(*args, **kwargs))[1]
    model = nn.Linear(3, 3)
    reducer = Reducer(model.parameters(), **options) if cls is Reducer else cls(model, **options)
    counts = [len(counted)]
    reducer.register_comm_hook(None, default_hooks.fp16_compress_hook)
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
    model = nn.Linear(3, 3)
    ddp = DistributedDataParallel(model, init_sync=False, static_graph=bool(rank))
    message = said_by(ddp(torch.ones(1, 3)).sum().backward)
    assert "static_graph is false on rank 0 and true on rank 1" in message
