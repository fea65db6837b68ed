"""Test the Reducer's buckets: their order, their memory, and when their averaging starts."""

import pytest
import torch
from torch import nn

from gradcomp.hooks import default_hooks
from tests.ranks import of_all_ranks
from tests.reducer.models import MLP, STATIC, UNUSED, VIEW, Branches, loss_of, make_reducer


@pytest.mark.ranks(2)
@pytest.mark.parametrize("options", [{}, UNUSED, STATIC, VIEW], ids=str)
def test_buckets_are_averaged_in_order_while_backward_runs(rank, options):
    torch.manual_seed(0)
    model, events = MLP(), []
    reducer = make_reducer(model, **{"bucket_cap_mb": 0.0005, "first_bucket_cap_mb": 0.0005} | options)

    def hook(state, bucket):
        events.append(f"bucket {bucket.index()}")
        return default_hooks.allreduce_hook(state, bucket)

    reducer.register_comm_hook(None, hook)
    for index, param in enumerate(model.parameters()):
        param.register_post_accumulate_grad_hook(lambda _, index=index: events.append(f"ready {index}"))
    for step in range(3):
        events.clear()
        outputs = model(model.batch(torch.Generator().manual_seed(step)))
        reducer.prepare_for_backward(outputs)
        loss_of(outputs).backward()
    events = list(events)
    buckets = [event for event in events if event.startswith("bucket")]
    assert len(buckets) >= 3
    assert buckets == [f"bucket {i}" for i in range(len(buckets))]
    last_gradient = max(i for i, event in enumerate(events) if event.startswith("ready"))
    assert events.index("bucket 0") < last_gradient


class OutOfOrder(nn.Module):
    """This model uses its layers in the order given to forward, not in the order of its parameters."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(40, 40) for _ in range(5))

    def forward(self, x, order):
        for index in order:
            x = torch.tanh(self.layers[index](x))
        return x


@pytest.mark.ranks(2)
def test_buckets_are_rebuilt_once_in_rank_0s_order(rank):
    torch.manual_seed(0)
    model = OutOfOrder()
    reducer = make_reducer(model)
    orders = []
    for _ in range(3):
        order = [3, 0, 4, 1, 2] if rank == 0 else [1, 4, 2, 0, 3]
        loss_of(model(torch.randn(3, 40), order)).backward()
        orders.append([bucket.indices for bucket in reducer.communicator.buckets])
    first, second = of_all_ranks((orders, [param.grad for param in model.parameters()]))
    for orders, _ in (first, second):
        assert orders[0] == orders[1] == orders[2] == first[0][0]
        # The last layer of rank 0's forward is ready first.
        layers = [index // 2 for bucket in orders[0] for index in bucket]
        assert [layer for i, layer in enumerate(layers) if layer not in layers[:i]] == [2, 1, 4, 0, 3]
    assert all(torch.equal(one, other) for one, other in zip(first[1], second[1], strict=True))


@pytest.mark.ranks(1)
def test_new_gradients_do_not_outlive_their_bucket(rank):
    """With bucket views, gradients that autograd allocates are freed as soon as their bucket is filled."""
    model = MLP()
    caps = {"bucket_cap_mb": 0.0005, "first_bucket_cap_mb": 0.0005}
    reducer = make_reducer(model, gradient_as_bucket_view=True, **caps)
    facts = []

    def hook(state, bucket):
        before = reducer.communicator.buckets[: bucket.index() + 1]
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
    assert len(facts) >= 9
    assert all(facts)


@pytest.mark.ranks(2)
def test_buckets_without_used_parameters_can_be_skipped(rank):
    found = []
    for skips in (False, True):
        torch.manual_seed(0)
        model, indices = Branches(), []
        caps = {"bucket_cap_mb": 0.0005, "first_bucket_cap_mb": 0.0005}
        reducer = make_reducer(model, **UNUSED, **caps, skip_all_reduce_unused_params=skips)

        def hook(state, bucket, indices=indices):
            indices.append(bucket.index())
            return default_hooks.allreduce_hook(state, bucket)

        reducer.register_comm_hook(None, hook)
        x = torch.full((2, 12), 0.05) + rank
        x[0, 0] = 0.05  # both ranks use the first branch
        outputs = model(x)
        reducer.prepare_for_backward(outputs)
        loss_of(outputs).backward()
        found.append((indices, [param.grad for param in model.parameters()]))
    (all_, grads), (skipped, same) = found
    assert all_ == list(range(len(all_)))
    assert 0 < len(skipped) < len(all_)
    assert sum(grad is None for grad in grads) == 6
    for grad, other in zip(grads, same, strict=True):
        assert grad is other is None or torch.equal(grad, other)
