"""Test the Reducer's averages: late, exact and unused gradients; tests/parallel compares with torch's DDP."""

import copy
import weakref

import pytest
import torch

from gradcomp.reducer import Reducer
from gradcomp.reducer.usage import StaticGraph
from tests.parallel.beside_torch import gradients
from tests.ranks import of_all_ranks
from tests.reducer.models import MLP, STATIC, UNUSED, VIEW, Branches, loss_of, make_reducer, on_device
from tests.tolerances import average, backward_noise

SLEEP_CYCLES = 50_000_000  # tens of milliseconds, more than a step takes

WIRES = {None: torch.float32, "allreduce": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def train_late(rank):
    """On a stream of its own, read and overwrite gradients at once after backward, behind a sleeping kernel.

    Return per hook, options and step (the dtype on the wire, own gradients, averages).
    """
    has_streams, results = torch.cuda.is_available(), []
    cases = [(hook, options) for hook in (None, "allreduce", "bf16") for options in ({}, VIEW)]
    with torch.cuda.stream(torch.cuda.Stream() if has_streams else None):
        for hook, options in cases:
            torch.manual_seed(0)
            model = on_device(MLP())
            local, reducer = copy.deepcopy(model), make_reducer(model, hook, **options)
            for step in range(3):
                x = on_device(model.batch(torch.Generator().manual_seed(10 * rank + step)))
                own = torch.autograd.grad(loss_of(local(x)), [*local.parameters()])
                model.zero_grad(set_to_none=step % 2 == 0)
                if has_streams:
                    torch.cuda._sleep(SLEEP_CYCLES)
                loss_of(model(x)).backward()
                averages = [param.grad.clone() for param in model.parameters()]
                for param in model.parameters():
                    param.grad.fill_(torch.nan)
                results.append((WIRES[hook], own, averages))
            reducer.close()
    if has_streams:
        torch.cuda.synchronize()
    return results


def test_late_gradients(run_group):
    ranks = run_group(train_late)
    for cases in zip(*ranks, strict=True):
        for index, averages in enumerate(zip(*(averages for _, _, averages in cases), strict=True)):
            own = torch.stack([own[index] for _, own, _ in cases]).double()
            bound = backward_noise() * average(cases[0][0], len(ranks), own.abs().max())
            assert all(torch.equal(each, averages[0]) for each in averages)
            assert (averages[0] - own.mean(0)).abs().max() <= bound


@pytest.mark.ranks(2)
def test_close_and_construct_again(rank):
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
    first, second = of_all_ranks((averaged, local, model[0].weight.grad, gone() is None))
    assert torch.equal(first[0], second[0])
    assert not torch.equal(first[1], second[1])
    assert torch.equal(first[2], first[0])
    assert first[3]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("options", [{}, VIEW], ids=str)
def test_a_static_graph_asks_once_which_parameters_no_rank_uses(rank, options):
    """Train a static graph that differs between ranks."""
    asked, results, exchanged = [], [], StaticGraph._exchanged
    StaticGraph._exchanged = lambda *arguments: asked.append(arguments) or exchanged(*arguments)
    torch.manual_seed(0)
    model = Branches()
    kept = make_reducer(model, **STATIC, **options)
    for _ in range(3):
        model.zero_grad()
        loss_of(model(torch.full((5, 12), 0.05 + 0.1 * rank))).backward()
        results.append((gradients(model), len(asked)))
    kept.close()
    first, second = of_all_ranks(results)
    unused_by_all = [name.startswith(("branches.2", "never")) for name, _ in Branches().named_parameters()]
    for (ours, asked), (theirs, _) in zip(first, second, strict=True):
        assert asked == 1
        assert [each is None for each in ours] == unused_by_all
        for our, their, expected in zip(ours, theirs, first[0][0], strict=True):
            assert our is None or (torch.equal(our, their) and torch.equal(our, expected))


@pytest.mark.ranks(2)
def test_the_division_comes_first(rank):
    """Average gradients whose mean fits float16 while their sum does not."""
    param = torch.nn.Parameter(torch.zeros(3, dtype=torch.float16))
    reducer = Reducer([param])
    (param * 40000.0).sum().backward()
    reducer.close()
    gradient = param.grad
    assert gradient.tolist() == [40000.0] * 3


@pytest.mark.ranks(2)
def test_gradients_that_no_rank_uses_stay_exactly_as_they_were(rank):
    """In the second of two steps, leave branch 0 unused on all ranks."""
    results = []
    for options in ({}, VIEW):
        torch.manual_seed(0)
        model = Branches()
        reducer = make_reducer(model, "fp16", **UNUSED, **options)
        for x in (0.05, 0.15):  # branch 0, branch 1
            outputs = model(torch.full((2, 12), x) + 1e-3 * rank)
            reducer.prepare_for_backward(outputs)
            loss_of(outputs).backward()
            if x == 0.05:
                # This exceeds the wire's precision.
                model.branches[0].weight.grad.add_(1e-6)
                before = model.branches[0].weight.grad.clone()
        results.append((before, model.branches[0].weight.grad, model.branches[1].weight.grad))
    first, second = of_all_ranks(results)
    for results in (first, second):
        for before, after, _ in results:
            assert torch.equal(before, after)
    assert all(torch.equal(one[2], other[2]) for one, other in zip(first, second, strict=True))
