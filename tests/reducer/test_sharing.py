"""Test several live Reducers and wrappers over the same parameters: every .grad is the ranks' mean."""

import gc
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradcomp
from gradcomp.hooks import default_hooks
from gradcomp.reducer import Reducer
from tests.ranks import of_all_ranks
from tests.reducer.models import CAP_MB, MLP, UNUSED, VIEW, Branches, loss_of
from tests.tolerances import average
from tests.training import gradients_of

NUM_STEPS = 3


def mean_of_gradients(loss, params):
    """Return the ranks' mean of a loss's gradients, flat, apart from any Reducer."""
    mean = torch.cat([gradient.flatten() for gradient in torch.autograd.grad(loss, [*params])])
    dist.all_reduce(mean)
    return mean / dist.get_world_size()


def reducer_of(model, options, cap_mb=CAP_MB):
    return Reducer(model.named_parameters(), bucket_cap_mb=cap_mb, first_bucket_cap_mb=cap_mb, **options)


def two_reducers(model, one, other):
    return model, [reducer_of(model, one), reducer_of(model, other)]


def reducers_with_other_buckets(model, one, other):
    return model, [reducer_of(model, one), reducer_of(model, other, cap_mb=3 * CAP_MB)]


def upper(model):
    return nn.Sequential(*list(model)[2:])


def of_a_part(model, one, other):
    return model, [reducer_of(model, one), reducer_of(upper(model), other)]


def of_a_part_first(model, one, other):
    return model, [reducer_of(upper(model), one), reducer_of(model, other)]


def with_a_hook(model, one, other):
    reducers = [reducer_of(model, one), reducer_of(model, other)]
    reducers[0].register_comm_hook(None, default_hooks.allreduce_hook)
    return model, reducers


def wrapper_and_reducer(model, one, other):
    return gradcomp.DistributedDataParallel(model, bucket_cap_mb=CAP_MB, **one), reducer_of(model, other)


def reducer_and_wrapper(model, one, other):
    reducer = reducer_of(model, one)
    return gradcomp.DistributedDataParallel(model, bucket_cap_mb=CAP_MB, **other), reducer


SHARED = [two_reducers, reducers_with_other_buckets, of_a_part, of_a_part_first, with_a_hook]
SHARED += [wrapper_and_reducer, reducer_and_wrapper]


@pytest.mark.ranks(2)
def test_gradients_are_the_mean_with_and_without_views(rank):
    gc.freeze()  # so that collecting garbage, as a new Reducer may do, is quick
    settings = [(VIEW, VIEW, True), (VIEW, VIEW, False), (VIEW, {}, False), ({}, VIEW, True)]
    for make, (one, other, set_to_none) in product(SHARED, settings):
        torch.manual_seed(0)
        model = MLP()
        forward, _kept = make(model, one, other)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(NUM_STEPS):
            optimizer.zero_grad(set_to_none=set_to_none)
            x = model.batch(torch.Generator().manual_seed(100 * step + rank))
            expected = mean_of_gradients(loss_of(model(x)), model.parameters())
            loss_of(forward(x)).backward()
            bound = 10 * average(torch.float32, 2, expected.abs().max())
            assert (gradients_of(model) - expected).abs().max() <= bound, (make, one, other, set_to_none)
            optimizer.step()


@pytest.mark.ranks(2)
def test_two_wrappers_with_a_layer_in_common(rank):
    gc.freeze()
    for options, together in product([(VIEW, VIEW), (VIEW, {}), ({}, VIEW)], [True, False]):
        torch.manual_seed(0)
        trunk, heads = nn.Linear(6, 40), [nn.Linear(40, 2), nn.Linear(40, 3)]
        wrappers = [
            gradcomp.DistributedDataParallel(nn.Sequential(trunk, head), bucket_cap_mb=0.001, **each)
            for head, each in zip(heads, options, strict=True)
        ]
        model = nn.ModuleList([trunk, *heads])
        for step in range(NUM_STEPS):
            model.zero_grad()
            x = torch.randn(5, 6, generator=torch.Generator().manual_seed(100 * step + rank))
            plain = sum(head(trunk(x)).square().sum() for head in heads)
            expected = mean_of_gradients(plain, model.parameters())
            if together:
                sum(wrapper(x).square().sum() for wrapper in wrappers).backward()
            for wrapper in () if together else wrappers:
                wrapper(x).square().sum().backward()
            torch.testing.assert_close(gradients_of(model), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.ranks(2)
def test_unused_parameters_keep_their_gradients(rank):
    """Check that a parameter that no rank uses keeps its gradient under two Reducers."""
    torch.manual_seed(0)
    model = Branches()
    reducers = [reducer_of(model, UNUSED | VIEW) for _ in range(2)]
    x = torch.full((2, 12), 0.2)
    for _ in range(NUM_STEPS):
        for param in model.parameters():
            param.grad = None
        model.never.weight.grad = torch.full_like(model.never.weight, rank + 1.0)
        outputs = model(x)
        for reducer in reducers:
            reducer.prepare_for_backward(outputs)
        loss_of(outputs).backward()
        assert (model.never.weight.grad == rank + 1.0).all()
    first, second = of_all_ranks(model.trunk.weight.grad)
    assert torch.equal(first, second)


class Cycle:
    """Garbage that only the collector finds."""

    def __init__(self, reducer):
        self.itself, self.reducer = self, reducer


@pytest.mark.ranks(2)
@pytest.mark.parametrize("ending", ["closed", "deleted", "garbage", "kept"])
def test_gradients_are_views_once_the_other_reducer_has_ended(rank, ending):
    model = MLP()
    gc.disable()
    holder = Cycle(reducer_of(model, VIEW))
    first = holder.reducer
    if ending == "garbage":
        first = None
        del holder
    second = reducer_of(model, VIEW)
    if ending == "closed":
        first.close()
    if ending == "deleted":
        holder.reducer = first = None
    for _ in range(2):
        loss_of(model(torch.ones(2, 20))).backward()
    buckets = second.communicator.buckets
    pairs = [pair for each in buckets for pair in zip(each.parameters, each.views, strict=True)]
    are_views = all(param.grad.data_ptr() == view.data_ptr() for param, view in pairs)
    assert are_views == (ending != "kept")
    if ending == "closed":
        _third = reducer_of(upper(model), VIEW)
        model[0].bias.grad, model[2].bias.grad = model[2].bias.grad, model[0].bias.grad
        with pytest.raises(RuntimeError, match=r"bias is in the memory of the gradient of .* a clone"):
            loss_of(model(torch.ones(2, 20))).backward()


@pytest.mark.ranks(2)
def test_two_reducers_over_different_ranks_are_refused(rank):
    model = MLP()
    alone = [dist.new_group([each]) for each in range(2)][rank]
    kept = Reducer(model.named_parameters(), process_group=alone)
    reducer = reducer_of(model, {})
    with pytest.raises(RuntimeError, match=r"parameter 0.weight is being averaged by two Reducers.*close"):
        loss_of(model(torch.ones(2, 20))).backward()
    del kept, reducer


@pytest.mark.ranks(2)
def test_a_reducer_that_only_one_rank_has_kept_is_named_on_every_rank(rank):
    model = MLP()
    kept = reducer_of(model, {"verify": False}) if rank == 1 else None
    with pytest.raises(RuntimeError) as caught:
        reducer_of(model, {})
    del kept
    first, second = of_all_ranks(str(caught.value))
    assert first == second
    assert "number of other live Reducers with some of the parameters is 0 on rank 0 and 1 on rank 1" in first
