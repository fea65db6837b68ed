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
from tests.ranks import of_all_ranks
from tests.reducer.models import Embeddings, run_cases

# (option, value on rank 0, value on the other ranks, message)
OPTIONS = [
    ("bucket_cap_mb", 1, 2, "bucket_cap_mb is 1.0 on rank 0 and 2.0 on rank"),
    ("gradient_as_bucket_view", True, False, "gradient_as_bucket_view is true on rank 0 and false on rank"),
    ("find_unused_parameters", False, True, "find_unused_parameters is false on rank 0 and true on rank"),
    ("static_graph", True, False, "static_graph is true on rank 0 and false on rank"),
    (
        "skip_all_reduce_unused_params",
        False,
        True,
        "skip_all_reduce_unused_params is false on rank 0 and true",
    ),
]
OF_THE_WRAPPER = [
    (
        "broadcast_buffers",
        True,
        False,
        r"forward_sync_buffers \(broadcast_buffers\) is true on rank 0 and false",
    ),
    ("forward_sync_buffers", None, False, r"forward_sync_buffers .* is true on rank 0 and false"),
]
OF_THE_REDUCER = [("first_bucket_cap_mb", 1, 2, "first_bucket_cap_mb is 1.0 on rank 0 and 2.0 on rank")]


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
        for name, first, second, message in OPTIONS + others:
            with pytest.raises(RuntimeError, match=message):
                construct(rank, of_the_wrapper, {name: second if rank else first})


@pytest.mark.ranks(2)
def test_other_sparse_parameters_and_buffers(rank):
    """Construct with different sparse parameters, different buffers, and equal options of other types."""
    model = Embeddings()
    sparse = [] if rank else [model.sparse.weight]
    messages = [said_by(lambda: Reducer(model.named_parameters(), sparse_params=sparse))]
    model = nn.Linear(3, 3)
    model.register_buffer("count", torch.zeros(3 + rank))
    messages.append(said_by(DistributedDataParallel, model))
    Reducer(model.parameters(), bucket_cap_mb=1.0 if rank else 1, find_unused_parameters=1 if rank else True)
    sparse, buffers = messages
    assert "the number of sparse parameters is 1 on rank 0 and 0 on rank 1" in sparse
    assert 'buffers[0] is "count [3] torch.float32" on rank 0 and "count [4]' in buffers


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


def power(rank, **options):
    return powerSGD_hook.PowerSGDState(None, 1, 2, **options)


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


@pytest.mark.ranks(3)
def test_a_hook_of_another_group(rank):
    """Take a step where rank 2 of three isn't in the reducer's group, or in the hook's, or has left that."""
    pair = of_a_subgroup()
    messages = []
    for state in (power(rank), None, dist.group.WORLD):
        hook = default_hooks.fp16_compress_hook if not state or state is dist.group.WORLD else None
        if rank < 2:
            reducer = Reducer(nn.Linear(3, 3).parameters(), pair)
            reducer.register_comm_hook(state, hook or powerSGD_hook.powerSGD_hook)
            messages.append(said_by(sum(param.sum() for param in reducer._params).backward))
    if rank < 2:
        state, reducer = power(rank), Reducer(nn.Linear(3, 3).parameters(), pair)
        state.process_group = pair
        reducer.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        sum(param.sum() for param in reducer._params).backward()
        state.process_group = None
        messages.append(said_by(sum(param.sum() for param in reducer._params).backward))
    reducer = Reducer(nn.Linear(3, 3).parameters())
    reducer.register_comm_hook(pair, default_hooks.fp16_compress_hook)
    messages.append(said_by(sum(param.sum() for param in reducer._params).backward))
    same = dist.new_group(range(3))
    reducer = Reducer([param := nn.Parameter(torch.full((2,), float(rank)))], same)
    reducer.register_comm_hook(None, default_hooks.allreduce_hook)
    param.square().sum().backward()
    results = of_all_ranks((messages, param.grad))
    for messages, gradient in results:
        assert torch.equal(gradient, torch.full((2,), 2.0))
        for message in messages[:-1]:
            assert "averages over the ranks [0, 1, 2], but the parameters are averaged over [0, 1]" in message
        assert 'process group is "ranks [0, 1]" on ranks 0, 1 and "ranks [0, 1, 2]" on rank 2' in messages[-1]
    assert [len(messages) for messages, _ in results] == [5, 5, 1]


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
        assert results == [[2, 3, 3, 3], [0, 1, 1, 1], [3, 4, 4, 4], [0, 1, 1, 1]]


@pytest.mark.ranks(2)
def test_options_are_compared_in_the_first_step_at_the_latest(rank):
    model = nn.Linear(3, 3)
    ddp = DistributedDataParallel(model, init_sync=False, static_graph=bool(rank))
    message = said_by(ddp(torch.ones(1, 3)).sum().backward)
    assert "static_graph is false on rank 0 and true on rank 1" in message
