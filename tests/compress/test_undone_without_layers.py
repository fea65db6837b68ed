"""Test undone steps that leave out layers, on one rank or on all: the errors stay complete."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradcomp
from gradcomp.hooks.default_hooks import bf16_compress_wrapper
from gradcomp.hooks.powerSGD_hook import PowerSGDState, batched_powerSGD_hook, powerSGD_hook
from gradcomp.hooks.quantization_hooks import QuantizationState, quantization_hook
from tests.depth import everyday
from tests.kept import entry_of

SIZE, STEPS, START = 32, everyday(12, 40), 2


def power_sgd(**options):
    return PowerSGDState(None, 2, start_powerSGD_iter=START, **options)


KINDS = {
    "int4": (lambda: QuantizationState(bits=4, block_size=32), quantization_hook),
    "int8": (lambda: QuantizationState(bits=8, block_size=32), quantization_hook),
    "PowerSGD": (power_sgd, powerSGD_hook),
    "batched": (power_sgd, batched_powerSGD_hook),
    "int8 factors after 4 bits": (lambda: power_sgd(factor_dtype=torch.int8, start_bits=4), powerSGD_hook),
    "bf16 around PowerSGD": (power_sgd, bf16_compress_wrapper(powerSGD_hook)),
}


class Weights(nn.Module):
    """This model's gradients are its inputs. With one input, it leaves out the second weight."""

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(SIZE, SIZE)) for _ in range(2))

    def forward(self, gradients):
        return sum((w * g).sum() for w, g in zip(self.weights, gradients, strict=False))


def gradients_of(rank, step, scale=1.0, num=2):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return scale * torch.randn(2, SIZE, SIZE, generator=generator)[:num]


def train(rank, library):
    """Undo a step before each step; return (relative loss, steps counted) by kind."""
    found = {}
    for name, (make, hook) in KINDS.items():
        model, state = Weights(), make()
        ddp = library(model, find_unused_parameters=True, bucket_cap_mb=0.003)
        ddp.register_comm_hook(state, hook)
        state.keep_undo = True
        given, out = torch.zeros(2, 2, SIZE, SIZE, dtype=torch.float64)
        for step in range(STEPS):
            num = 1 if step % 4 == 3 or (step % 4 == 1 and rank) else 2
            ddp(gradients_of(rank, step + 500, 10.0, num)).backward()
            state.undo_step()
            ddp.zero_grad()
            gradients = gradients_of(rank, step)
            ddp(gradients).backward()
            given += gradients.double()
            out += torch.stack([weight.grad for weight in model.weights]).double()
            ddp.zero_grad()
        owed = []
        for weight in model.weights:
            owed.append(entry_of(state, weight)["error"].double())
        lost = given - out - torch.stack(owed)
        dist.all_reduce(lost)
        found[name] = (float(lost.norm() / given.norm()), state.iter)
    return found


@pytest.mark.parametrize("library", [nn.parallel.DistributedDataParallel, gradcomp.DistributedDataParallel])
def test_undone_steps_take_nothing_out_of_the_errors(run_ranks, library):
    for found in run_ranks(train, 2, library):
        for name, (lost, num_steps) in found.items():
            # The bf16 wrapper rounds the bucket in every step, and keeps no error.
            assert lost < (0.02 if name.startswith("bf16") else 1e-4), name
            assert num_steps == STEPS
