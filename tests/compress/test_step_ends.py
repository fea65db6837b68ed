"""Test that states count steps, also if no bucket says that it is the last."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import gradcomp
from gradcomp.hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from gradcomp.hooks.quantization_hooks import QuantizationState, quantization_hook

SIZE, STEPS = 40, 5
TORCH, OURS = nn.parallel.DistributedDataParallel, gradcomp.DistributedDataParallel
KINDS = {
    "int4": (lambda: QuantizationState(bits=4), quantization_hook),
    "PowerSGD": (lambda: PowerSGDState(None, 2, start_powerSGD_iter=2), powerSGD_hook),
    "int8 factors": (
        lambda: PowerSGDState(None, 2, start_powerSGD_iter=2, factor_dtype=torch.int8, start_bits=8),
        powerSGD_hook,
    ),
}


class TwoDtypes(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE).bfloat16()

    def forward(self, x):
        return self.second(self.first(x).bfloat16()).float()


class Heads(nn.Module):
    """This model never uses its first layer. That layer's gradients are in the last bucket."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in range(4))

    def forward(self, x):
        for layer in self.layers[1:]:
            x = layer(x).tanh()
        return x


class Checkpointed(Heads):
    """Every layer runs a backward of its own, nested in the model's backward."""

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True).tanh()
        return x


class Towers(Heads):
    """This model has two outputs. Each comes from two layers."""

    def forward(self, x):
        first, second, third, fourth = self.layers
        return second(first(x).tanh()), fourth(third(x).tanh())


def train(rank, make_model, options, libraries):
    """Train with every kind of state on every library.

    Returns for each: the step counts, is_compared, the compression rate, whether the ranks' gradients are
    equal, and how many elements they have.
    """
    found = []
    for library in libraries:
        for make, hook in KINDS.values():
            torch.manual_seed(0)
            ddp, state = library(make_model(), **options), make()
            ddp.register_comm_hook(state, hook)
            counted = []
            for step in range(STEPS):
                ddp.zero_grad()
                x = torch.randn(4, SIZE, generator=torch.Generator().manual_seed(10 * step + rank))
                outputs = ddp(x.requires_grad_())
                for output in outputs if isinstance(outputs, tuple) else [outputs]:
                    output.square().sum().backward()
                counted.append(state.iter)
            flat = torch.cat([p.grad.flatten().double() for p in ddp.parameters() if p.grad is not None])
            gathered = [torch.empty_like(flat) for _ in range(2)]
            dist.all_gather(gathered, flat)
            rate = state.compression_stats()[0]
            found.append((counted, state.is_compared, rate, torch.equal(*gathered), len(flat)))
    return found


@pytest.mark.parametrize(
    ("make_model", "options", "libraries"),
    [
        (TwoDtypes, {"static_graph": True}, (TORCH, OURS)),
        (Checkpointed, {"bucket_cap_mb": 0.006}, (TORCH,)),
        (Towers, {"bucket_cap_mb": 0.006}, (TORCH,)),
        (
            Heads,
            {"find_unused_parameters": True, "skip_all_reduce_unused_params": True, "bucket_cap_mb": 0.006},
            (TORCH, OURS),
        ),
    ],
    ids=["a static graph", "reentrant checkpoints", "two backwards", "an unused last bucket"],
)
def test_every_step_counts_once(run_ranks, make_model, options, libraries):
    """Nothing hangs, though in a static graph's first step torch calls no hook or callback once it waits."""
    for results in run_ranks(train, 2, make_model, options, libraries):
        for counted, is_compared, rate, is_equal, numel in results:
            assert counted == list(range(1, STEPS + 1))
            assert (is_compared, is_equal) == (True, True)
            assert rate > 1.5
            assert numel >= 2 * SIZE * SIZE
