"""The Reducer with real processes: the gradients of torch's DDP, on every rank the same."""

import copy
import weakref

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks as torch_default,
)

from gradcomp.hooks import debugging_hooks, default_hooks, powerSGD_hook
from gradcomp.reducer import Reducer
from tests.distributed.ranks import run_ranks
from tests.distributed.reducer_models import (
    MLP,
    Branches,
    Embeddings,
    loss_of,
    make_reducer,
    train_both,
)
from tests.tolerances import average

STEPS = 5
UNUSED = {"find_unused_parameters": True}
STATIC = {"static_graph": True}
VIEW = {"gradient_as_bucket_view": True}
GRID = [
    *((model, {}) for model in ("MLP", "ConvNet", "Transformer", "Embeddings")),
    *((model, VIEW) for model in ("MLP", "ConvNet", "Transformer")),
    *((model, UNUSED) for model in ("MLP", "Branches", "Embeddings")),
    ("Branches", UNUSED | VIEW),
    *((model, STATIC) for model in ("MLP", "Repeated", "Transformer")),
    ("Repeated", STATIC | VIEW),
]


def assert_as_torchs(ranks, wire=torch.float32):
    """Every gradient is torch's up to the rounding of a sum of the ranks; and the replicas' have the same bits."""
    world_size = len(ranks)
    for rank, (steps, (_, parameters)) in enumerate(ranks):
        assert torch.equal(parameters, ranks[0][1][1])
        for step, (theirs, ours) in enumerate(steps):
            # A bias before BatchNorm has a gradient of zero, and rounding errors of its neighbours' size.
            largest = max(gradient.abs().max() for gradient in theirs if gradient is not None)
            for number, (their, our) in enumerate(zip(theirs, ours, strict=True)):
                where = f"rank {rank}, step {step}, parameter {number}"
                assert (their is None) == (our is None), where
                if our is not None:
                    first = ranks[0][0][step][1][number]
                    assert torch.equal(our, first), where
                    bound = (step + 1) * average(wire, world_size, largest)
                    assert (their - our).abs().max() <= bound, where


@pytest.mark.parametrize(("model", "options"), GRID, ids=str)
def test_gradients_are_those_of_torchs_ddp(model, options):
    assert_as_torchs(run_ranks(train_both, 2, model, "none", options, STEPS))


@pytest.mark.parametrize(
    ("model", "options"), [("ConvNet", {}), ("Branches", UNUSED), ("Embeddings", {})], ids=str
)
def test_on_three_ranks(model, options):
    assert_as_torchs(run_ranks(train_both, 3, model, "none", options, STEPS))


@pytest.mark.parametrize("hook", ["allreduce", "fp16", "bf16"])
@pytest.mark.parametrize("options", [{}, VIEW], ids=str)
def test_hooks(hook, options):
    wire = {"allreduce": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[hook]
    assert_as_torchs(run_ranks(train_both, 2, "MLP", hook, options, STEPS), wire)


# torch's DDP raises in its first step after no_sync with static_graph.
@pytest.mark.parametrize("options", [{}, VIEW, UNUSED], ids=str)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_accumulation_under_no_sync(options, set_to_none):
    ranks = run_ranks(train_both, 2, "MLP", "none", options, STEPS, 3, set_to_none)
    assert_as_torchs(ranks)


# Buckets.


def order_of_events(rank, options):
    """What happened in the third backward: "ready n" for a parameter's gradient, "bucket i" for its averaging."""
    torch.manual_seed(0)
    model, events = MLP(), []
    reducer = make_reducer(model, **{"bucket_cap_mb": 0.005, "first_bucket_cap_mb": 0.005} | options)

    def hook(state, bucket):
        events.append(f"bucket {bucket.index()}")
        return default_hooks.allreduce_hook(state, bucket)

    reducer.register_comm_hook(None, hook)
    for number, param in enumerate(model.parameters()):
        param.register_post_accumulate_grad_hook(lambda _, number=number: events.append(f"ready {number}"))
    for step in range(3):
        events.clear()
        generator = torch.Generator().manual_seed(step)
        outputs = model(model.batch(generator))
        reducer.prepare_for_backward(outputs)
        loss_of(outputs).backward()
    return list(events)


@pytest.mark.parametrize("options", [{}, UNUSED, STATIC, VIEW], ids=str)
def test_buckets_are_averaged_in_order_while_backward_runs(options):
    for events in run_ranks(order_of_events, 2, options):
        buckets = [event for event in events if event.startswith("bucket")]
        assert len(buckets) >= 3
        assert buckets == [f"bucket {i}" for i in range(len(buckets))]
        last_gradient = max(i for i, event in enumerate(events) if event.startswith("ready"))
        assert events.index("bucket 0") < last_gradient


class OutOfOrder(nn.Module):
    """The layers' gradients are ready in another order than their parameters suggest, and rank 1 differs."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(40, 40) for _ in range(5))

    def forward(self, x, order):
        for number in order:
            x = torch.tanh(self.layers[number](x))
        return x


def rebuilt_order(rank):
    torch.manual_seed(0)
    model = OutOfOrder()
    reducer = make_reducer(model)
    orders = []
    for _ in range(3):
        order = [3, 0, 4, 1, 2] if rank == 0 else [1, 4, 2, 0, 3]
        loss_of(model(torch.randn(3, 40), order)).backward()
        orders.append([bucket.numbers for bucket in reducer._buckets])
    return orders, [param.grad for param in model.parameters()]


def test_buckets_are_rebuilt_once_in_rank_0s_order():
    first, second = run_ranks(rebuilt_order, 2)
    for orders, _ in (first, second):
        assert orders[0] == orders[1] == orders[2] == first[0][0]
        # The layer that came last in rank 0's forward is ready first.
        layers = [number // 2 for bucket in orders[0] for number in bucket]
        assert [layer for i, layer in enumerate(layers) if layer not in layers[:i]] == [2, 1, 4, 0, 3]
    assert all(torch.equal(one, other) for one, other in zip(first[1], second[1], strict=True))


def memory_of_gradients(rank, set_to_none):
    """Whether all gradients lie in the buckets, after each of several steps."""
    model = MLP()
    reducer = make_reducer(model, gradient_as_bucket_view=True)
    facts = []
    for step in range(4):
        if step:
            model.zero_grad(set_to_none=set_to_none)
        loss_of(model(torch.randn(3, 20))).backward()
        storages = {bucket.buffer.untyped_storage().data_ptr() for bucket in reducer._buckets}
        facts.append(all(p.grad.untyped_storage().data_ptr() in storages for p in model.parameters()))
    return facts


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_are_views_of_the_buckets(set_to_none):
    assert run_ranks(memory_of_gradients, 1, set_to_none) == [[True] * 4]


def views_during_backward(rank):
    """For every bucket, whether the gradients of those before it lie in their buckets when it is averaged."""
    model = MLP()
    caps = {"bucket_cap_mb": 0.005, "first_bucket_cap_mb": 0.005}
    reducer = make_reducer(model, gradient_as_bucket_view=True, **caps)
    facts = []

    def hook(state, bucket):
        before = reducer._buckets[: bucket.index() + 1]
        grads = [
            (param.grad, view)
            for each in before
            for param, view in zip(each.parameters, each.views, strict=True)
        ]
        facts.append(all(grad.data_ptr() == view.data_ptr() for grad, view in grads))
        return default_hooks.allreduce_hook(state, bucket)

    reducer.register_comm_hook(None, hook)
    for _ in range(3):
        model.zero_grad()
        loss_of(model(torch.randn(3, 20))).backward()
    return facts


def test_new_gradients_do_not_outlive_their_bucket():
    """With bucket views, what autograd made anew is free as soon as its bucket is filled."""
    (facts,) = run_ranks(views_during_backward, 1)
    assert len(facts) >= 9
    assert all(facts)


def skip_unused(rank, skip):
    """How many buckets of a model with layers that no rank uses were averaged, and their gradients."""
    torch.manual_seed(0)
    model, indices = Branches(), []
    options = {"find_unused_parameters": True, "skip_all_reduce_unused_params": skip}
    reducer = make_reducer(model, bucket_cap_mb=0.004, first_bucket_cap_mb=0.004, **options)

    def hook(state, bucket):
        indices.append(bucket.index())
        return default_hooks.allreduce_hook(state, bucket)

    reducer.register_comm_hook(None, hook)
    x = torch.full((2, 12), 0.05) + rank
    x[0, 0] = 0.05  # the first branch, on both ranks
    outputs = model(x)
    reducer.prepare_for_backward(outputs)
    loss_of(outputs).backward()
    return indices, [param.grad for param in model.parameters()]


def test_buckets_without_used_parameters_can_be_skipped():
    (all_, grads), (skipped, same) = (run_ranks(skip_unused, 2, skip)[0] for skip in (False, True))
    assert all_ == list(range(len(all_)))
    assert 0 < len(skipped) < len(all_)
    assert [grad is None for grad in grads] == [grad is None for grad in same]
    assert sum(grad is None for grad in grads) == 6
    assert all(grad is None or torch.equal(grad, other) for grad, other in zip(grads, same, strict=True))


# Hooks.


def with_torchs_hook(rank, name):
    torch.manual_seed(0)
    model = MLP()
    local = copy.deepcopy(model)
    reducer = make_reducer(model)
    state, hook = {
        "allreduce": (None, torch_default.allreduce_hook),
        "fp16": (None, torch_default.fp16_compress_hook),
        "noop": (None, debugging_hooks.noop_hook),
        "powerSGD": (powerSGD_hook.PowerSGDState(None, 2, 2), powerSGD_hook.powerSGD_hook),
    }[name]
    reducer.register_comm_hook(state, hook)
    for step in range(4):
        x = torch.randn(6, 20, generator=torch.Generator().manual_seed(10 * rank + step))
        for each in (local, model):
            each.zero_grad()
            loss_of(each(x)).backward()
    return [torch.cat([p.grad.flatten() for p in each.parameters()]) for each in (local, model)]


@pytest.mark.parametrize(
    ("hook", "tolerance"),
    [("allreduce", 1e-6), ("fp16", 1e-2), ("powerSGD", 0.9)],
)
def test_hooks_of_torchs_and_ours(hook, tolerance):
    """Every one runs, gives all ranks the same and something like the mean."""
    ranks = run_ranks(with_torchs_hook, 2, hook)
    mean = torch.stack([local for local, _ in ranks]).mean(0)
    for _, averaged in ranks:
        assert torch.equal(averaged, ranks[0][1])
        assert (averaged - mean).norm() <= tolerance * mean.norm()


def test_a_hook_that_does_nothing():
    for local, averaged in run_ranks(with_torchs_hook, 2, "noop"):
        assert torch.equal(local, averaged)


def one_step_with(hook):
    model = MLP()
    reducer = make_reducer(model)
    reducer.register_comm_hook(None, hook)
    loss_of(model(torch.randn(3, 20))).backward()


def bad_hooks(rank):
    messages = []

    def holding(value):
        future = torch.futures.Future()
        future.set_result(value)
        return future

    def raising(state, bucket):
        raise ZeroDivisionError("in the hook")

    for hook in (
        lambda state, bucket: bucket.buffer(),
        lambda state, bucket: holding("text"),
        lambda state, bucket: holding(bucket.buffer()[:-1]),
        raising,
    ):
        with pytest.raises((RuntimeError, ZeroDivisionError)) as caught:
            one_step_with(hook)
        messages.append(f"{type(caught.value).__name__}: {caught.value}")
    reducer = make_reducer(MLP())
    with pytest.raises(TypeError, match="must be callable"):
        reducer.register_comm_hook(None, "hook")
    reducer.register_comm_hook(None, default_hooks.allreduce_hook)
    with pytest.raises(RuntimeError, match="can only be called once"):
        reducer.register_comm_hook(None, default_hooks.allreduce_hook)
    return messages


def test_hooks_that_are_wrong():
    ((no_future, text, short, raised),) = run_ranks(bad_hooks, 1)
    assert "returned Tensor, but has to return a torch.futures.Future" in no_future
    assert "holds str, but a bucket of 4419 elements has to come back" in text
    assert "elements has to come back" in short
    assert raised == "ZeroDivisionError: in the hook"


# What can be wrong.


def different_models(rank):
    """The message that each rank gets for a parameter more, another shape, another dtype on rank 1."""
    messages = []
    for change in ("number", "shape", "dtype"):
        model = MLP()
        if rank == 1:
            model.append(nn.Linear(3, 3)) if change == "number" else None
            model[2] = nn.Linear(65, 64) if change == "shape" else model[2]
            model = model.double() if change == "dtype" else model
        with pytest.raises(RuntimeError) as caught:
            make_reducer(model)
        messages.append(str(caught.value))
    return messages


def test_ranks_with_different_models():
    first, second = run_ranks(different_models, 2)
    assert first == second
    number, shape, dtype = first
    assert "rank 0 has 6 parameters that require gradients, rank 1 has 8" in number
    assert (
        "2.weight, [64, 64] in torch.float32, on rank 0, but 2.weight, [64, 65] in torch.float32, on rank 1"
        in shape
    )
    assert "0.weight, [64, 20] in torch.float32, on rank 0, but 0.weight, [64, 20] in torch.float64" in dtype


def unfinished(rank):
    model = Branches()
    kept = make_reducer(model)
    messages = []
    for _ in range(2):
        with pytest.raises(RuntimeError) as caught:
            loss_of(model(torch.ones(2, 12))).backward()
        messages.append(str(caught.value))
    kept.close()
    return messages


def test_a_backward_that_does_not_reach_all_parameters():
    for messages in run_ranks(unfinished, 2):
        for message in messages:
            assert "Expected to have finished reduction in the prior iteration" in message
            assert "never.weight, never.bias" in message
            assert "`find_unused_parameters=True`" in message
            assert "`forward` function outputs participate in calculating loss" in message


class Late(torch.autograd.Function):
    """Runs a second backward over the same parameters from within the first."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.weight = weight
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        with torch.enable_grad():
            ctx.weight.sum().backward()
        return gradient, None


def twice(rank):
    model = MLP()
    kept = make_reducer(model)
    with pytest.raises(RuntimeError) as caught:
        loss_of(Late.apply(model(torch.randn(3, 20)), model[0].weight)).backward()
    return str(caught.value), len(kept._names)


def test_a_parameter_that_is_ready_twice():
    ((message, _),) = run_ranks(twice, 1)
    assert "Expected to mark a variable ready only once: parameter 0.weight became ready twice" in message


def not_prepared(rank):
    model = MLP()
    kept = make_reducer(model, find_unused_parameters=True)
    with pytest.raises(RuntimeError, match="prepare_for_backward"):
        loss_of(model(torch.randn(3, 20))).backward()
    return kept._names[0]


def test_find_unused_parameters_needs_the_outputs():
    assert run_ranks(not_prepared, 1) == ["0.weight"]


def changed_graph(rank):
    model = Branches()
    reducer = make_reducer(model, static_graph=True)
    messages = []
    for x in (torch.full((2, 12), 0.05), torch.full((2, 12), 0.15)):
        try:
            loss_of(model(x)).backward()
        except RuntimeError as error:
            messages.append(str(error))
    reducer.close()
    return messages


def test_a_static_graph_that_changes():
    for messages in run_ranks(changed_graph, 2):
        (message,) = messages
        assert message.startswith("Your training graph has changed in this iteration")
        assert "branches." in message


def undeclared_sparse(rank):
    model = Embeddings()
    kept = make_reducer(model, sparse_params=[])
    with pytest.raises(RuntimeError, match=r"sparse.weight has a sparse gradient.*sparse_params"):
        loss_of(model(torch.randint(0, 30, (5, 4)))).backward()
    return len(kept._names)


def test_sparse_gradients_have_to_be_declared():
    assert run_ranks(undeclared_sparse, 1) == [4]


def arguments(rank):
    frozen = MLP().requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter that requires gradients"):
        Reducer(frozen.parameters())
    with pytest.raises(TypeError, match="got str"):
        Reducer(["weight"])
    shared = nn.Parameter(torch.zeros(3))
    assert len(Reducer([shared, shared])._params) == 1


def test_arguments():
    run_ranks(arguments, 1)


def test_no_process_group():
    with pytest.raises(RuntimeError, match="init_process_group"):
        Reducer(MLP().parameters())


# Ends.


def close_and_forget(rank):
    torch.manual_seed(0)
    model = MLP()
    reducer = make_reducer(model)
    x = torch.randn(3, 20, generator=torch.Generator().manual_seed(rank))
    loss_of(model(x)).backward()
    averaged = model[0].weight.grad.clone()
    reducer.close()
    model.zero_grad()
    loss_of(model(x)).backward()
    local = model[0].weight.grad.clone()
    gone = weakref.ref(reducer)
    del reducer
    again = make_reducer(model)
    model.zero_grad()
    loss_of(model(x)).backward()
    del again
    return averaged, local, model[0].weight.grad, gone() is None


def test_close_and_construct_again():
    first, second = run_ranks(close_and_forget, 2)
    assert torch.equal(first[0], second[0])
    assert not torch.equal(first[1], second[1])
    assert torch.equal(first[2], first[0])
    assert first[3]
