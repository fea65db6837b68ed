"""Test torch.compile around the wrapper, within it, and around a function that calls it."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import gradcomp
from gradcomp.parallel import compiled
from tests.distributed.beside_torch import assert_all_alike, gradients
from tests.distributed.ranks import run_ranks
from tests.distributed.reducer_models import run_cases

BACKEND = "aot_eager"  # compiles graphs as the default does, without a C++ compiler
NUM_LAYERS = 12


def chain():
    """Return a model whose twelve layers have 1 MiB each."""
    torch.manual_seed(0)
    return nn.Sequential(*(module for _ in range(NUM_LAYERS) for module in (nn.Linear(512, 512), nn.Tanh())))


def wrapped(cls, order, **options):
    """Return (the model, its wrapper, what a training step calls)."""
    model = chain()
    if order == "ddp(compile)":
        ddp = cls(torch.compile(model, backend=BACKEND), **options)
        return model, ddp, ddp
    ddp = cls(model, **options)
    if order == "compile(step)":
        return model, ddp, torch.compile(lambda inputs: ddp(inputs).square(), backend=BACKEND)
    return model, ddp, torch.compile(ddp, backend=BACKEND) if order == "compile(ddp)" else ddp


def training(cls, rank, order, options):
    torch._dynamo.reset()
    model, _, step = wrapped(cls, order, bucket_cap_mb=2, **options)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(3):
        model.zero_grad()
        step(torch.randn(4, 512, generator=generator)).sum().backward()
    return gradients(model)


def test_compiled_gradients_are_averaged_as_torchs():
    unused, static = {"find_unused_parameters": True}, {"static_graph": True}
    cases = [("compile(ddp)", {}), ("ddp(compile)", {}), ("compile(step)", {})]
    cases += [("compile(ddp)", unused), ("compile(ddp)", static)]
    assert_all_alike(training, 2, cases, exact=False)


class Products(TorchDispatchMode):
    """A counter of matrix products."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm)
        return func(*args, **(kwargs or {}))


def products_before_first_bucket(rank, order):
    """Return the part of backward's matrix products that comes before bucket 0 is full, in the third step."""
    torch._dynamo.reset()
    model, ddp, step = wrapped(gradcomp.DistributedDataParallel, order, bucket_cap_mb=2)
    products, counts = Products(), []

    def hook(state, bucket):
        if bucket.index() == 0:
            counts.append(products.count)
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    ddp.register_comm_hook(None, hook)
    for _ in range(3):
        model.zero_grad()
        loss = step(torch.randn(4, 512)).sum()
        products.count = 0
        with products:
            loss.backward()
    return counts[-1] / products.count


def test_the_first_bucket_leaves_before_four_tenths_of_backward():
    """A graph that is compiled in one piece would compute all gradients first."""
    orders = ["eager", "compile(ddp)", "ddp(compile)", "compile(step)"]
    (parts,) = run_ranks(run_cases, 1, products_before_first_bucket, [(order,) for order in orders])
    assert dict(zip(orders, parts, strict=True)) == pytest.approx(dict.fromkeys(orders, 0.2), abs=0.2)


def test_a_torch_with_other_private_names_is_asked_in_public(monkeypatch):
    monkeypatch.setattr(compiled, "eval_frame", object())
    function = compiled.not_compiled(lambda number: number + 1)
    assert function(1) == 2
    assert function._torchdynamo_disable
