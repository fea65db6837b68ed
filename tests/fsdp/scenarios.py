"""Ways to shard a model and to take a step, which compression must not change."""

from functools import partial

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from tests.depth import everyday
from tests.fsdp.models import Net, batch_of, gradients, sharded, weights

STEPS = everyday(2, 3)


def step(model, rank, number, **options):
    model(batch_of(rank, number), **options).square().mean().backward()


def accumulate(model, rank, number, *, switch, uses_all=True):
    """Run three backwards, and average in the third.

    uses_all: False: layer 1 and the spare parameter are used in the first backward alone.
    """
    for part in range(3):
        getattr(model, switch)(part == 2)
        left_out = {} if uses_all else {"use_spare": part == 0, "skip": [1] if part else []}
        step(model, rank, 3 * number + part, **left_out)


def accumulate_in_grad(model, rank, number):
    """Reduce in each of two backwards: FSDP2 adds to .grad."""
    for part in range(2):
        model.set_is_last_backward(part == 1)
        step(model, rank, 2 * number + part)


def give_up(model, rank, number):
    """Run a first backward of an accumulation, and give it up as after an error."""
    model.set_requires_all_reduce(False)
    step(model, rank, number + 100)
    model.reset_iter_state()
    model.zero_grad()
    model.set_requires_all_reduce(True)
    step(model, rank, number)


def clip(model, rank, number):
    step(model, rank, number)
    assert torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1) > 0.1


def skip_a_layer(model, rank, number):
    step(model, rank, number, skip=[number % 3], use_spare=number % 2 == 1)


def run_a_layer_twice(model, rank, number):
    x = batch_of(rank, number)
    (model(x) + model(x + 1)).square().mean().backward()


def finalize(model, rank, number):
    """Run two backwards, and reduce the gradients that are left with finalize_backward()."""
    model.set_manual_backward_finalization(True)
    for part in range(2):
        model.set_requires_gradient_sync(part == 1)
        step(model, rank, 2 * number + part)
    model.finalize_backward()


def freeze(model):
    model.layers[1].requires_grad_(False)
    model.layers[2][0].weight.requires_grad_(False)
    return model


def with_zeros(model):
    if hasattr(model, "set_reduce_scatter_unused_params"):  # since torch 2.13
        model.set_reduce_scatter_unused_params(True)
    return model


def divided_by(model, factor):
    for module in (model.embed, *model.layers, model):
        module.set_gradient_divide_factor(factor)
        module.set_force_sum_reduction_for_comms(True)
    return model


def by_columns(parameter):
    return Shard(1) if parameter.ndim == 2 and parameter.shape[1] % 2 == 0 else None


class ComplexNet(torch.nn.Module):
    """Complex parameters, whose last shards are shorter."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(7, 12, dtype=torch.complex64))
        self.bias = torch.nn.Parameter(torch.randn(7, dtype=torch.complex64))

    def forward(self, x):
        return torch.nn.functional.linear(x.to(torch.complex64), self.weight, self.bias).abs()


def layers_in_one_group(mesh):
    model = Net()
    fully_shard(list(model.layers), mesh=mesh)
    return fully_shard(model, mesh=mesh)


def mixed(**dtypes):
    return partial(sharded, mp_policy=MixedPrecisionPolicy(**dtypes))


# name -> (how the model is made on a mesh, what a step does)
SCENARIOS = {
    "plain": (sharded, step),
    "resharded after forward": (partial(sharded, reshard_after_forward=True), step),
    "never resharded": (partial(sharded, reshard_after_forward=False), step),
    "clipped": (sharded, clip),
    "accumulated before the reduce-scatter": (
        sharded,
        partial(accumulate, switch="set_requires_gradient_sync"),
    ),
    "accumulated after the reduce-scatter": (sharded, partial(accumulate, switch="set_requires_all_reduce")),
    "accumulated in a wider dtype": (
        mixed(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        partial(accumulate, switch="set_requires_gradient_sync", uses_all=False),
    ),
    "accumulated in a narrower dtype": (
        mixed(reduce_dtype=torch.bfloat16),
        partial(accumulate, switch="set_requires_all_reduce"),
    ),
    "bf16 parameters": (mixed(param_dtype=torch.bfloat16), step),
    "reduced in bf16": (mixed(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16), step),
    "reduced in fp16": (mixed(reduce_dtype=torch.float16), step),
    "frozen parameters": (lambda mesh: freeze(sharded(mesh)), step),
    "unused parameters": (sharded, skip_a_layer),
    "zeros for unused parameters": (lambda mesh: with_zeros(sharded(mesh)), skip_a_layer),
    "two forwards": (sharded, run_a_layer_twice),
    "checkpointed activations": (lambda mesh: sharded(mesh, Net("non-reentrant")), step),
    "checkpointed activations, reentrant": (lambda mesh: sharded(mesh, Net("reentrant")), step),
    "another divisor": (lambda mesh: divided_by(sharded(mesh), 2.0), step),
    "sharded by columns": (partial(sharded, shard_placement_fn=by_columns), step),
    "several modules in one group": (layers_in_one_group, step),
    "complex parameters": (lambda mesh: fully_shard(ComplexNet(), mesh=mesh), step),
    "offloaded": (partial(sharded, offload_policy=CPUOffloadPolicy(pin_memory=False)), step),
}
if hasattr(FSDPModule, "reset_iter_state"):  # since torch 2.13
    SCENARIOS["an accumulation that is given up"] = (sharded, give_up)
if hasattr(FSDPModule, "set_manual_backward_finalization"):  # since torch 2.15
    SCENARIOS["backwards that the caller finalizes"] = (sharded, finalize)


def differences(models, run_step):
    """Train two models, and yield differences of gradients, relative to the largest, and of weights."""
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9) for model in models]
    for number in range(STEPS):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            run_step(model, number=number)
        theirs, ours = map(gradients, models)
        assert any(each is not None and each.any() for each in theirs)
        for one, other in zip(ours, theirs, strict=True):
            assert (one is None) == (other is None)
            if other is not None and other.numel():
                assert one.dtype == other.dtype
                yield ((one - other).abs().max() / other.abs().max().clamp(min=1)).item()
        for optimizer in optimizers:
            optimizer.step()
    for one, other in zip(*map(weights, models), strict=True):
        yield from (one - other).abs().flatten().tolist()
