"""Test torch.compile around the wrapper, within it, and around a function that calls it."""

import pytest
import torch
from torch import nn
from torch._dynamo import convert_frame
from torch.utils._python_dispatch import TorchDispatchMode

import gradcomp
from gradcomp.hooks import debugging_hooks, default_hooks, powerSGD_hook, quantization_hooks
from tests.depth import everyday, mixed
from tests.parallel.beside_torch import TorchDDP, assert_alike, gradients
from tests.reducer.models import run_cases

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


def in_turns(rank, backend, static_graph):
    """Train two compiled wrappers; return their and a plain model's gradients, and what was compiled."""
    torch._dynamo.reset()
    compiled = []
    hook = convert_frame.register_bytecode_hook(lambda code, _: compiled.append(code.co_filename))
    wrappers = [gradcomp.DistributedDataParallel(chain(2, 8), static_graph=static_graph) for _ in range(2)]
    plain = chain(2, 8)
    steps = [torch.compile(ddp, backend=backend) for ddp in wrappers]
    for number in range(4):
        for step in (plain, *steps):
            step(torch.full((4, 8), number / 4)).sum().backward()
            wrappers[0].module[0].weight.register_post_accumulate_grad_hook(lambda param: None)
    hook.remove()
    return [gradients(each) for each in (*wrappers, plain)], compiled


def test_wrappers_in_turns_compile_the_model_and_nothing_else(run_ranks):
    cases = mixed(("eager", BACKEND), (False, True)) + everyday([], [("inductor", False)])
    (results,) = run_ranks(run_cases, 1, in_turns, cases)
    for (first, second, expected), compiled in results:
        torch.testing.assert_close([first, second], [expected] * 2)
        assert set(compiled) == {__file__}


class Products(TorchDispatchMode):
    """A counter of matrix products."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm)
        return func(*args, **(kwargs or {}))


def products_before_first_bucket(rank, order):
    """Return the fraction of backward's matrix products before bucket 0 is full, in the third step."""
    torch._dynamo.reset()
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
    return counts[-1] / products.count


def test_the_first_bucket_leaves_before_four_tenths_of_backward(run_ranks):
    """A graph compiled in one piece would compute all gradients before the first bucket."""
    orders = ["eager", "compile(ddp)", "ddp(compile)", "compile(step)"]
    (parts,) = run_ranks(run_cases, 1, products_before_first_bucket, [(order,) for order in orders])
    assert dict(zip(orders, parts, strict=True)) == pytest.approx(dict.fromkeys(orders, 0.2), abs=0.2)


def in_compiled_autograd(rank, kind, hook, state_of, optimize_ddp, options):
    """Compile steps with their backwards; return the last gradients, or an error's type and message.

    optimize_ddp: None: don't compile.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32))
    forward = model
    compiled = {"compiled_autograd": True, "optimize_ddp": optimize_ddp}
    with torch._dynamo.config.patch(**compiled if optimize_ddp else {"disable": True}):
        if kind == "reducer":
            averaging = gradcomp.Reducer(model.named_parameters(), **options)
        else:
            averaging = {"torch": TorchDDP, "gradcomp": gradcomp.DistributedDataParallel}[kind](
                model, **options
            )
            forward = averaging
        if hook is not None:
            averaging.register_comm_hook(state_of(), hook)

        @torch.compile(backend=BACKEND)
        def step(inputs):
            outputs = forward(inputs)
            if kind == "reducer":
                averaging.prepare_for_backward(outputs)
            outputs.square().mean().backward()

        generator = torch.Generator().manual_seed(rank)
        try:
            for _ in range(2):
                model.zero_grad()
                step(torch.randn(4, 32, generator=generator))
        except Exception as error:
            return type(error), str(error)
    return gradients(model)


def no_state():
    return None


def test_a_compiled_backward_is_refused_with_what_to_do(run_ranks):
    cases = [("gradcomp", None, no_state, True, {}), ("reducer", None, no_state, PYTHON_REDUCER, {})]
    (results,) = run_ranks(run_cases, 1, in_compiled_autograd, cases)
    for case, (error, message) in zip(cases, results, strict=True):
        assert error is RuntimeError, (case, message)
        assert message.startswith("compiled autograd (torch._dynamo.config.compiled_autograd) runs"), case
        assert "compiled_autograd = False" in message, case
        assert "optimize_ddp = 'python_reducer'" in message, case


def test_all_reduce_hooks_run_in_torchs_python_reducer(run_ranks):
    """The hooks give the mean of torch's DDP without a hook, rounded to the wire's dtype."""
    hooks = {
        None: 0.0,
        default_hooks.allreduce_hook: 1e-6,
        default_hooks.fp16_compress_hook: 2**-10,
        default_hooks.bf16_compress_hook: 2**-7,
    }
    cases = [("torch", hook, no_state, hook and PYTHON_REDUCER, {}) for hook in hooks]
    first, second = run_ranks(run_cases, 2, in_compiled_autograd, cases)
    means = first[0]
    for bound, ours, others in zip(hooks.values(), first, second, strict=True):
        for mean, our, other in zip(means, ours, others, strict=True):
            assert torch.equal(our, other)
            assert (our - mean).abs().max() <= bound * mean.abs().max()
    assert not torch.equal(first[2][0], means[0])  # it has been rounded


def test_other_hooks_say_what_to_do_in_torchs_python_reducer(run_ranks):
    """The hooks' messages hold no values of a gradient."""
    states = {
        powerSGD_hook.powerSGD_hook: powersgd_state,
        quantization_hooks.quantization_hook: quantization_state,
        quantization_hooks.quantization_pertensor_hook: no_state,
        debugging_hooks.noop_hook: no_state,
    }
    some = everyday(list(states)[::2], list(states))
    cases = [("torch", hook, states[hook], PYTHON_REDUCER, {}) for hook in some]
    (results,) = run_ranks(run_cases, 1, in_compiled_autograd, cases)
    for case, (error, message) in zip(cases, results, strict=True):
        assert error is TypeError, (case, message)
        assert "got an object of type tuple. Likely cause: torch._dynamo.config.optimize_ddp" in message, case
        assert "optimize_ddp = True" in message, case
        assert "tensor(" not in message, case


def powersgd_state():
    return powerSGD_hook.PowerSGDState(None)


def quantization_state():
    return quantization_hooks.QuantizationState()
