"""Test torch.compile around the wrapper, within it, and around a function that calls it."""

import pytest
import torch
from torch import nn
from torch._dynamo import convert_frame
from torch.utils._python_dispatch import TorchDispatchMode

import gradcomp
from gradcomp.hooks import default_hooks
from gradcomp.hooks.quantization_hooks import QuantizationState, quantization_hook
from tests.depth import everyday, mixed
from tests.parallel.beside_torch import TorchDDP, assert_alike, gradients
from tests.ranks import of_all_ranks
from tests.training import Averaged

BACKEND = "aot_eager"  # compiles graphs as the default does, without a C++ compiler
NUM_LAYERS = 8
PYTHON_REDUCER = "python_reducer"


class Chain(nn.Sequential):
    """This model has a forward of its own: torch.compile passes over nn.Sequential's."""

    def forward(self, inputs):
        for layer in self:
            inputs = layer(inputs)
        return inputs


def chain(num_layers=NUM_LAYERS, width=512):
    """Return a model of layers, each of 1 MiB by default."""
    torch.manual_seed(0)
    return Chain(*(module for _ in range(num_layers) for module in (nn.Linear(width, width), nn.Tanh())))


def wrapped(cls, order, model, **options):
    """Return (the model, its wrapper, the function that a training step calls)."""
    if order == "ddp(compile)":
        ddp = cls(torch.compile(model, backend=BACKEND), **options)
        return model, ddp, ddp
    ddp = cls(model, **options)
    if order == "compile(step)":
        return model, ddp, torch.compile(lambda inputs: ddp(inputs).square(), backend=BACKEND)
    return model, ddp, torch.compile(ddp, backend=BACKEND) if order == "compile(ddp)" else ddp


def training(cls, rank, order, options):
    """Train; only gradcomp's wrapper is compiled."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(disable=cls is TorchDDP):
        model, _, step = wrapped(cls, order, chain(4), bucket_cap_mb=2, **options)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(3):
        model.zero_grad()
        step(torch.randn(4, 512, generator=generator)).sum().backward()
    return gradients(model)


@pytest.mark.ranks(2)
def test_compiled_gradients_are_averaged_as_torchs(rank):
    unused, static = {"find_unused_parameters": True}, {"static_graph": True}
    cases = [("compile(ddp)", unused), ("ddp(compile)", {}), ("compile(step)", {})]
    cases += everyday([], [("compile(ddp)", {}), ("compile(ddp)", static)])
    for case in cases:
        assert_alike(rank, training, *case, wire=torch.float32)


@pytest.mark.ranks(1)
def test_wrappers_in_turns_compile_the_model_and_nothing_else(rank):
    compiled = []
    convert_frame.register_bytecode_hook(lambda code, _: compiled.append(code.co_filename))
    for backend, static_graph in mixed(("eager", BACKEND), (False, True)) + everyday(
        [], [("inductor", False)]
    ):
        torch._dynamo.reset()
        wrappers = [
            gradcomp.DistributedDataParallel(chain(2, 8), static_graph=static_graph) for _ in range(2)
        ]
        plain = chain(2, 8)
        steps = [torch.compile(ddp, backend=backend) for ddp in wrappers]
        for number in range(4):
            for step in (plain, *steps):
                step(torch.full((4, 8), number / 4)).sum().backward()
                wrappers[0].module[0].weight.register_post_accumulate_grad_hook(lambda param: None)
        torch.testing.assert_close([gradients(each) for each in wrappers], [gradients(plain)] * 2)
    assert set(compiled) == {__file__}


class Products(TorchDispatchMode):
    """A counter of matrix products."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm)
        return func(*args, **(kwargs or {}))


@pytest.mark.ranks(1)
@pytest.mark.parametrize("order", ["eager", "compile(ddp)", "ddp(compile)", "compile(step)"])
def test_the_first_bucket_leaves_before_four_tenths_of_backward(rank, order):
    """Count matrix products. A graph compiled in one piece computes all gradients before the first bucket."""
    model, ddp, step = wrapped(gradcomp.DistributedDataParallel, order, chain(), bucket_cap_mb=2)
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
    assert 0 < counts[-1] <= 0.4 * products.count


def in_compiled_autograd(rank, way, hook, optimize_ddp, state=None):
    """Compile steps with their backwards; return the last gradients.

    optimize_ddp: None: don't compile.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32))
    compiled = {"compiled_autograd": True, "optimize_ddp": optimize_ddp}
    with torch._dynamo.config.patch(**compiled if optimize_ddp else {"disable": True}):
        averaged = Averaged(model, way, hook, state)

        @torch.compile(backend=BACKEND)
        def step(inputs):
            averaged(inputs).square().mean().backward()

        generator = torch.Generator().manual_seed(rank)
        for _ in range(2):
            model.zero_grad()
            step(torch.randn(4, 32, generator=generator))
    return gradients(model)


@pytest.mark.ranks(1)
def test_a_compiled_backward_is_refused_with_what_to_do(rank):
    for way, optimize_ddp in (("gradcomp", True), ("reducer", PYTHON_REDUCER)):
        with pytest.raises(
            RuntimeError, match=r"^compiled autograd \(torch._dynamo.config.compiled"
        ) as raised:
            in_compiled_autograd(rank, way, None, optimize_ddp)
        assert "compiled_autograd = False" in str(raised.value), way
        assert "optimize_ddp = 'python_reducer'" in str(raised.value), way


@pytest.mark.ranks(2)
def test_all_reduce_hooks_run_in_torchs_python_reducer(rank):
    """The hooks give the mean of torch's DDP without a hook, rounded to the wire's dtype."""
    means = in_compiled_autograd(rank, "torch", None, None)
    for hook, bound in (
        (default_hooks.allreduce_hook, 1e-6),
        (default_hooks.fp16_compress_hook, 2**-10),
        (default_hooks.bf16_compress_hook, 2**-7),
    ):
        averages = in_compiled_autograd(rank, "torch", hook, PYTHON_REDUCER)
        for mean, average in zip(means, averages, strict=True):
            assert torch.equal(*of_all_ranks(average))
            assert (average - mean).abs().max() <= bound * mean.abs().max()
        is_rounded = hook is not default_hooks.allreduce_hook
        assert not (is_rounded and torch.equal(averages[0], means[0]))


@pytest.mark.ranks(1)
def test_other_hooks_say_what_to_do_in_torchs_python_reducer(rank):
    """The message holds no values of a gradient."""
    message = "got an object of type tuple. Likely cause: torch._dynamo.config.optimize_ddp.*optimize_ddp = T"
    with pytest.raises(TypeError, match=message) as raised:
        in_compiled_autograd(rank, "torch", quantization_hook, PYTHON_REDUCER, QuantizationState())
    assert "tensor(" not in str(raised.value)
