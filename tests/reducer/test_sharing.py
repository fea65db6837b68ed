"""Test several live Reducers and wrappers over the same parameters: every .grad is the ranks' mean."""

import gc

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradcomp
from gradcomp.hooks import default_hooks
from gradcomp.reducer import Reducer
from tests.ranks import of_all_ranks
from tests.reducer.models import CAP_MB, MLP, UNUSED, VIEW, Branches, loss_of, run_cases
from tests.tolerances import average

NUM_STEPS = 3


def freeze_and_run_cases(rank, function, cases):
    """Run the cases after gc.freeze(), so that collecting garbage, as a new Reducer may do, is quick."""
    gc.freeze()
    return run_cases(rank, function, cases)


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
    ddp = gradcomp.DistributedDataParallel(model, bucket_cap_mb=CAP_MB, **one)
    return ddp, reducer_of(model, other)


def reducer_and_wrapper(model, one, other):
    reducer = reducer_of(model, one)
    return gradcomp.DistributedDataParallel(model, bucket_cap_mb=CAP_MB, **other), reducer


SHARED = [two_reducers, reducers_with_other_buckets, of_a_part, of_a_part_first, with_a_hook]
SHARED += [wrapper_and_reducer, reducer_and_wrapper]


def errors_of(rank, make, one, other, set_to_none):
    """Train; return per step the distance of .grad from the mean, in units of the bound."""
    torch.manual_seed(0)
    model = MLP()
    forward, kept = make(model, one, other)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    errors = []
    for step in range(NUM_STEPS):
        optimizer.zero_grad(set_to_none=set_to_none)
        x = model.batch(torch.Generator().manual_seed(100 * step + rank))
        expected = torch.cat(
            [gradient.flatten() for gradient in torch.autograd.grad(loss_of(model(x)), [*model.parameters()])]
        )
        dist.all_reduce(expected)
        expected /= dist.get_world_size()
        loss_of(forward(x)).backward()
        gradients = torch.cat([param.grad.flatten() for param in model.parameters()])
        bound = 10 * average(torch.float32, dist.get_world_size(), expected.abs().max())
        errors.append(float((gradients - expected).abs().max() / bound))
        optimizer.step()
    del kept
    return errors


def test_gradients_are_the_mean_with_and_without_views(run_ranks):
    settings = [(VIEW, VIEW, True), (VIEW, VIEW, False), (VIEW, {}, False), ({}, VIEW, True)]
    cases = [(make, *setting) for make in SHARED for setting in settings]
    for errors in run_ranks(freeze_and_run_cases, 2, errors_of, cases):
        for case, of_steps in zip(cases, errors, strict=True):
            assert max(of_steps) <= 1, case


def through_wrappers(rank, one, other, together):
    """Check that the gradients of layers that two wrappers share are the mean of torch.autograd.grad's."""
    torch.manual_seed(0)
    trunk, heads = nn.Linear(6, 40), [nn.Linear(40, 2), nn.Linear(40, 3)]
    wrappers = [
        gradcomp.DistributedDataParallel(nn.Sequential(trunk, head), bucket_cap_mb=0.001, **options)
        for head, options in zip(heads, (one, other), strict=True)
    ]
    params = [*trunk.parameters(), *(param for head in heads for param in head.parameters())]
    for step in range(NUM_STEPS):
        for param in params:
            param.grad = None
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(100 * step + rank))
        plain = sum(head(trunk(x)).square().sum() for head in heads)
        expected = torch.cat([gradient.flatten() for gradient in torch.autograd.grad(plain, params)])
        dist.all_reduce(expected)
        if together:
            sum(wrapper(x).square().sum() for wrapper in wrappers).backward()
        else:
            for wrapper in wrappers:
                wrapper(x).square().sum().backward()
        gradients = torch.cat([param.grad.flatten() for param in params])
        torch.testing.assert_close(gradients, expected / 2, rtol=1e-5, atol=1e-6)


def test_two_wrappers_with_a_layer_in_common(run_ranks):
    options = [(VIEW, VIEW), (VIEW, {}), ({}, VIEW)]
    cases = [(*each, together) for each in options for together in (True, False)]
    run_ranks(freeze_and_run_cases, 2, through_wrappers, cases)


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


def views_after(rank, ending):
    """Return whether gradients are views of the second Reducer's buckets, after the first has ended."""
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
    is_view = all(
        param.grad.data_ptr() == bucket.views[position].data_ptr()
        for bucket in second.communicator.buckets
        for position, param in enumerate(bucket.parameters)
    )
    gc.enable()
    return is_view


def test_gradients_are_views_once_the_other_reducer_has_ended(run_ranks):
    cases = [("closed",), ("deleted",), ("garbage",), ("kept",)]
    for results in run_ranks(freeze_and_run_cases, 2, views_after, cases):
        assert results == [True, True, True, False]


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
