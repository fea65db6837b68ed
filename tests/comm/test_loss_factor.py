"""Test loss_factor, and that averages of losses multiplied by it are means over all ranks' tokens."""

import copy
import math
import re
from contextlib import nullcontext

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradcomp
from gradcomp.hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from gradcomp.hooks.quantization_hooks import QuantizationState, quantization_hook

RANKS = 3
VALID = {
    "numbers": ([5, 0, 7], 3 / 12),
    "weights": ([0.5, 0.25, 0.0], 3 / 0.75),
    "numpy's": ([numpy.int64(2), numpy.float32(3), 1], 3 / 6),
    "counts that fp32 rounds": ([2**24 + 1, 2**24 + 1, 0], 3 / (2**25 + 2)),
    "nothing to count": ([0, 0, 0], 0.0),
    "tensors": ([torch.tensor(4), torch.tensor([2.0]), torch.tensor([[6]], dtype=torch.int32)], 3 / 12),
    "tensors of nothing": ([torch.tensor(0)] * 3, 0.0),
    "bf16, with a graph": ([torch.tensor(2.0, dtype=torch.bfloat16, requires_grad=True)] * 3, 3 / 6),
    "the largest": ([1.7e308, 0, 0], 3 / 1.7e308),
    "the smallest normal one, and less": ([6e-308, 6e-309, 6e-310], 1 / 2.22e-308),
    "tensors of less than fp32's smallest": ([torch.tensor(2.0**-149)] * 3, 2.0**149),
    "a number and tensors": ([1, torch.tensor(2), torch.tensor(3)], 3 / 6),
}
INVALID = [
    *(-3, math.nan, math.inf, 10**400, torch.tensor(-2.0), None, "7", 1j, [1, 2], torch.tensor([1, 2])),
    torch.ones(1).to_sparse(),
]


def ask(rank):
    """Return the factors of valid counts, those of two ranks alone, and the errors of invalid counts."""
    pair = dist.new_group([0, 1])
    factors = {name: gradcomp.loss_factor(counts[rank]) for name, (counts, _) in VALID.items()}
    of_pair = gradcomp.loss_factor(10 + rank, pair) if rank < 2 else None
    errors = []
    for count in INVALID:
        with pytest.raises(ValueError, match="a finite number of 0 or more on every rank") as error:
            gradcomp.loss_factor(count if rank == 1 else torch.tensor(1) if rank == 2 else 1)
        errors.append(str(error.value))
    for extreme in (5e-324, torch.tensor(2e-310, dtype=torch.float64), 1.7e308):
        with pytest.raises(ValueError, match="a finite sum and a mean of at least 6e-309"):
            gradcomp.loss_factor(extreme)
    return factors, of_pair, errors, gradcomp.loss_factor(1)


def test_factors_and_errors_are_the_same_on_every_rank(run_ranks):
    for rank, (factors, of_pair, errors, last) in enumerate(run_ranks(ask, RANKS)):
        for name, (counts, expected) in VALID.items():
            if isinstance(counts[rank], torch.Tensor):
                dtype = torch.float64 if counts[rank].is_floating_point() else torch.float32
                assert (factors[name].dtype, factors[name].shape) == (dtype, ()), name
                assert not factors[name].requires_grad, name
                rel = 1e-14 if dtype is torch.float64 else 1e-7
                assert factors[name].item() == pytest.approx(expected, rel=rel, abs=0), name
            else:
                assert type(factors[name]) is float, name
                assert factors[name] == pytest.approx(expected, rel=1e-14, abs=0), name
        assert of_pair == (None if rank == 2 else 2 / 21)
        for count, message in zip(INVALID, errors, strict=True):
            assert message.endswith(f"this rank's is {repr(count)[:100] if rank == 1 else '1'}") or rank == 2
        assert last == 1.0


@pytest.mark.parametrize("default_dtype", [torch.float16, torch.float32])
def test_one_process_without_a_group(default_dtype, monkeypatch):
    before = torch.get_default_dtype()
    torch.set_default_dtype(default_dtype)
    try:
        assert gradcomp.loss_factor(100_003) == 1 / 100_003
        assert gradcomp.loss_factor(torch.tensor(100_003)).dtype is torch.float32
        assert gradcomp.loss_factor(0) == 0.0
    finally:
        torch.set_default_dtype(before)
    for count in INVALID:
        with pytest.raises(ValueError, match=re.escape(f"this rank's is {repr(count)[:100]}")):
            gradcomp.loss_factor(count)
    with pytest.raises(TypeError, match="process group or None"):
        gradcomp.loss_factor(1, 7)


# --- training ---

STEPS, MICRO_BATCHES, WORDS = 8, 2, 24
HOOKS = {
    "none": (lambda: None, None),
    "int4": (lambda: QuantizationState(None, bits=4, block_size=16), quantization_hook),
    "PowerSGD, int8 factors": (
        lambda: PowerSGDState(None, 2, 2, factor_dtype=torch.int8, min_compression_rate=1),
        powerSGD_hook,
    ),
}


def tokens_of(rank, step, part):
    """Return the tokens of a micro-batch, and their labels: from none to 90."""
    generator = torch.Generator().manual_seed(100 * step + 10 * part + rank)
    number = (0 if rank == 2 and part else 1) * int(10.0 ** (2 * torch.rand((), generator=generator)))
    return torch.randint(WORDS, (2, number), generator=generator)


def summed_loss(model, tokens, labels):
    return nn.functional.cross_entropy(model(tokens), labels, reduction="sum")


def weighted_mean(model, step):
    """Return the gradient of the mean over all ranks' tokens, in float64."""
    wide = copy.deepcopy(model).double()
    all_tokens = [tokens_of(rank, step, part) for rank in range(RANKS) for part in range(MICRO_BATCHES)]
    tokens, labels = torch.cat(all_tokens, dim=1)
    (summed_loss(wide, tokens, labels) / len(labels)).backward()
    return torch.cat([each.grad.flatten() for each in wide.parameters()])


def train(rank, name):
    """Train with uneven tokens and loss_factor.

    Returns by how much Σ averages + mean error misses Σ weighted means, and the errors, both relative.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(WORDS, 16), nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, WORDS))
    parameters = list(model.parameters())
    make, hook = HOOKS[name]
    state, ddp = make(), DistributedDataParallel(model)
    if state is not None:
        state.number_parameters(model.named_parameters())
        ddp.register_comm_hook(state, hook)
    optimizer, found, expected = torch.optim.SGD(parameters, lr=0.1), 0.0, 0.0
    for step in range(STEPS):
        batches = [tokens_of(rank, step, part) for part in range(MICRO_BATCHES)]
        mean = weighted_mean(model, step)
        factor = gradcomp.loss_factor(sum(labels.numel() for _, labels in batches))
        optimizer.zero_grad()
        for part, (tokens, labels) in enumerate(batches):
            with nullcontext() if part == MICRO_BATCHES - 1 else ddp.no_sync():
                (factor * summed_loss(ddp, tokens, labels)).backward()
        found = found + torch.cat([each.grad.flatten() for each in parameters]).double()
        expected = expected + mean
        optimizer.step()
    errors = torch.zeros_like(expected)
    if state is not None:
        kept = state.state
        errors = torch.cat([kept[key]["error"].double().flatten() for key, _ in model.named_parameters()])
        dist.all_reduce(errors)
    errors /= RANKS
    return float((found + errors - expected).norm() / expected.norm()), float(errors.norm() / expected.norm())


def train_all(rank):
    return {name: train(rank, name) for name in HOOKS}


def test_averages_are_means_over_all_tokens_and_errors_keep_the_rest(run_ranks):
    for results in run_ranks(train_all, RANKS):
        for name, (lost, errors) in results.items():
            assert lost < 1e-5, (name, lost)
            assert (errors > 0.005) == (name != "none"), (name, errors)
