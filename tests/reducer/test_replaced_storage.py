"""Test gradients that other code moves to other memory while they are views of the Reducer's buckets."""

import pytest
import torch

from gradcomp.hooks import default_hooks
from gradcomp.hooks.powerSGD_hook import powerSGD_hook
from gradcomp.hooks.quantization_hooks import QuantizationState, quantization_hook
from tests.reducer.models import PLAIN, STATIC, UNUSED, VIEW
from tests.training import Averaged, Given, power_sgd

NUM_STEPS = 4
SHAPES = (16, 8, 2, 2), (32, 32), (7,), (5,)  # of a kernel, a square matrix, a vector, an unused one


def gradients(rank, step, dtype):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return [torch.randint(1, 9, shape, generator=generator).to(dtype) for shape in SHAPES[:3]]


def data(model):
    for param in model.weights:
        param.grad.data = param.grad.data.clone()


def data_of_other_strides(model):
    for param in model.weights:
        order = tuple(reversed(range(param.dim())))
        param.grad.data = param.grad.permute(order).contiguous().permute(order)


def one_of_several(model):
    model.weights[1].grad.data = model.weights[1].grad.clone()


def set_storage(model):
    for param in model.weights:
        param.grad.set_(param.grad.clone())


def assigned(model):
    for param in model.weights:
        param.grad = param.grad.clone()


def memory_format(model):
    model.to(memory_format=torch.channels_last)


def applied(model):
    model._apply(torch.clone)


def parameters_data(model):
    for param in model.weights:
        param.data = param.data.clone()


def same(model):
    model.to(model.weights[0].dtype).to("cpu")


def dropped(model):
    """Keep the views, take them from the parameters, and write to them elsewhere."""
    for param in model.weights:
        view, param.grad = param.grad, None
        view.data = torch.full_like(view, 99)


def own_memory_transposed(model):
    model.weights[1].grad.data = model.weights[1].grad.t()


MEDDLING = (
    *(data, data_of_other_strides, one_of_several, set_storage, assigned, memory_format),
    *(applied, parameters_data, same, dropped, own_memory_transposed),
)
DTYPES = (torch.float32, torch.float16, torch.float64, torch.complex64)


def moved_by_the_hook(state, bucket):
    """Move the gradients and the buffer between the bucket's filling and the writing of its average."""
    future = default_hooks.allreduce_hook(state, bucket)
    future.wait()
    for param in bucket.parameters():
        if param.grad is not None:
            param.grad.data = torch.zeros_like(param.grad)
    bucket.buffer().data = bucket.buffer().clone()
    return future


HOOKS = {
    None: lambda: (None, None),
    "moved": lambda: (None, moved_by_the_hook),
    "int4": lambda: (QuantizationState(None, 4), quantization_hook),
    "psgd": lambda: (power_sgd(), powerSGD_hook),
}


def train(rank, meddle, wrapped, options, hook, dtype, accumulates=False, keeps=True):
    """Return every step's gradients, and whether all are in the buckets' memory in the end."""
    torch.manual_seed(0)
    unused = bool(options.get("find_unused_parameters") or options.get("static_graph"))
    caps = {"bucket_cap_mb": 0.002} | ({} if wrapped else {"first_bucket_cap_mb": 0.001})
    state, hook = HOOKS[hook]()
    way = "gradcomp" if wrapped else "reducer"
    model = Averaged(module := Given(*SHAPES, dtype=dtype), way, hook, state, **caps, **options)

    def backward(step):
        given = gradients(rank, step, dtype)
        model(given if unused else [*given, torch.ones(5, dtype=dtype)]).backward()

    results = []
    for step in range(NUM_STEPS):
        if step:
            module.zero_grad(set_to_none=not keeps)
        elif unused:
            module.weights[3].grad = torch.arange(5).to(dtype)
        if step == 2 and accumulates:
            with model.no_sync():
                backward(step + 50)
            if meddle is not None:
                meddle(module)
        backward(step)
        results.append([param.grad.clone() for param in module.weights])
        if step < NUM_STEPS - 1 and meddle is not None:
            meddle(module)
    reducer = model.averager.reducer if wrapped else model.averager
    storages = {bucket.buffer.untyped_storage().data_ptr() for bucket in reducer.communicator.buckets}
    reducer.close()
    return results, all(param.grad.untyped_storage().data_ptr() in storages for param in module.weights)


FLOAT = torch.float32
CASES = [
    *((meddle, wrapped, VIEW, None, FLOAT) for meddle in MEDDLING for wrapped in (False, True)),
    *((data, False, VIEW, None, dtype, True) for dtype in DTYPES),
    *((data_of_other_strides, True, VIEW, "int4", dtype, True) for dtype in DTYPES[:2]),
    *((meddle, True, VIEW | UNUSED, None, FLOAT, True) for meddle in (data, set_storage, memory_format)),
    *((meddle, True, VIEW | STATIC, None, FLOAT) for meddle in (data, set_storage, memory_format)),
    *((meddle, False, VIEW | UNUSED, "int4", FLOAT, True) for meddle in (data, applied)),
    *((meddle, True, VIEW, "psgd", FLOAT) for meddle in (data, set_storage)),
    *((None, wrapped, VIEW, "moved", FLOAT, False, wrapped) for wrapped in (False, True)),
    (dropped, True, VIEW, None, torch.float64, False, False),
    (dropped, False, VIEW, "int4", torch.float64, False, False),
    *((meddle, True, PLAIN, None, FLOAT, True) for meddle in (data, applied)),
]


@pytest.mark.ranks(2)
def test_averages_do_not_depend_on_where_gradients_are(rank):
    """The unused parameter's gradient stays as it was, and gradients are views in the end."""
    undisturbed = {}  # each step's gradients, by the options
    for case in CASES:
        if (key := repr(case[1:])) not in undisturbed:
            undisturbed[key], _ = train(rank, None, *case[1:])
        results, are_views = train(rank, *case)
        for pair in zip(undisturbed[key], results, strict=True):
            assert all(map(torch.equal, *pair)), case
        assert are_views == (VIEW.items() <= case[2].items()), case


def of_another_dtype(model):
    model.weights[0].grad.data = model.weights[0].grad.to(torch.bfloat16)


def of_another_shape(model):
    model.weights[2].grad.data = torch.zeros(2, 7)


def shared(model):
    model.weights[2].grad.data = model.weights[1].grad.view(-1)[:7]


def converted(model):
    model.weights[2].data = model.weights[2].double()


def overwritten(model):
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        model._apply(torch.clone)
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)


REFUSED = {
    of_another_dtype: "parameter weights.0 is torch.bfloat16 .* its bucket has torch.float32",
    of_another_shape: r"of shape \[2, 7\], but its bucket has torch.float32 on cpu, of shape \[7\]",
    shared: "gradient of parameter weights.2 is in the memory of the gradient of weights.1.* assign a clone",
    converted: "parameters weights.2 are no longer where gradients are averaged",
}


@pytest.mark.ranks(2)
def test_what_no_bucket_can_take_is_refused_by_name(rank):
    for meddle, message in REFUSED.items():
        for wrapped in (False, True):
            with pytest.raises(RuntimeError, match=message):
                train(rank, meddle, wrapped, VIEW, None, FLOAT)
    with pytest.raises(RuntimeError, match=r"parameters weights.0, .* are not averaged"):
        train(rank, overwritten, True, VIEW, None, FLOAT)
