"""Run scenarios with torch's DistributedDataParallel and with gradcomp's, and compare how they end."""

import warnings
from functools import partial

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import gradcomp
from tests.reducer.models import CAP_MB, MODELS, loss_of, on_device, run_cases
from tests.tolerances import average

CLASSES = {"torch": TorchDDP, "gradcomp": gradcomp.DistributedDataParallel}


def run_quietly(scenario, cls, rank, *arguments):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own deprecations
        return scenario(cls, rank, *arguments)


def on_both(rank, scenario, *arguments):
    return {name: run_quietly(scenario, cls, rank, *arguments) for name, cls in CLASSES.items()}


def assert_alike(run_ranks, scenario, world_size, *arguments, exact=True):
    """Assert that both classes' results are equal, or within a sum's rounding; return gradcomp's by rank."""
    (ranks,) = assert_all_alike(run_ranks, scenario, world_size, [arguments], exact=exact)
    return ranks


def assert_all_alike(run_ranks, scenario, world_size, cases, exact=True):
    """Compare the classes for several cases, in one set of processes; return gradcomp's by case and rank."""
    ranks = run_ranks(run_cases, world_size, on_both, [(scenario, *case) for case in cases])
    return _all_alike(ranks, scenario, cases, exact)


def assert_scenarios_alike(run_ranks, world_size, *scenarios):
    """Compare the classes in several scenarios, with or without arguments, in one set of processes."""
    cases = [each if isinstance(each, tuple) else (each,) for each in scenarios]
    assert_all_alike(run_ranks, _run, world_size, cases)


def _run(cls, rank, scenario, *arguments):
    return scenario(cls, rank, *arguments)


def assert_alike_in_groups(run_group, scenario, cases, wire=torch.float32):
    """Compare the classes on the rank's device: exactly on a CPU, within the wire's rounding on a GPU."""
    ranks = run_group(run_cases, on_both, [(scenario, *case) for case in cases])
    return _all_alike(ranks, scenario, cases, exact=not torch.cuda.is_available(), wire=wire)


def _all_alike(ranks, scenario, cases, exact, wire=torch.float32):
    for index, case in enumerate(cases):
        for results in ranks:
            ours, theirs = results[index]["gradcomp"], results[index]["torch"]
            bound = None if exact else partial(average, wire, 10 * len(ranks))
            _compare(ours, theirs, bound, where=f"{scenario.__name__}{case}")
    return [[results[index]["gradcomp"] for results in ranks] for index in range(len(cases))]


def _compare(ours, theirs, bound, where):
    """Compare results. bound: of the error for values up to a magnitude; None if results must be equal."""
    if isinstance(theirs, torch.Tensor):
        assert isinstance(ours, torch.Tensor), where
        assert ours.shape == theirs.shape, where
        assert ours.dtype == theirs.dtype, where
        if bound is None or not (theirs.is_floating_point() or theirs.is_complex()):
            assert torch.equal(ours, theirs), where
        else:
            assert (ours - theirs).abs().max() <= bound(theirs.abs().max()), where
    elif isinstance(theirs, dict):
        assert list(ours) == list(theirs), where
        for key in theirs:
            _compare(ours[key], theirs[key], bound, where)
    elif isinstance(theirs, list | tuple):
        assert len(ours) == len(theirs), where
        for one, other in zip(ours, theirs, strict=True):
            _compare(one, other, bound, where)
    else:
        assert ours == theirs, where


def batch_of(model, rank, step):
    """Return a batch on the model's device."""
    x = model.batch(torch.Generator().manual_seed(1000 * rank + step))
    return x.to(next(model.parameters()).device)


def flat(model):
    return torch.cat([param.detach().flatten() for param in model.parameters()])


def gradients(model):
    def dense(gradient):
        return gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient

    return [None if p.grad is None else dense(p.grad).clone() for p in model.parameters()]


def train(cls, rank, name, options, hook=None, steps=5):
    """Train from weights that differ between ranks; return every step's gradients, and the state_dict.

    hook: the hook, or (state, hook).
    """
    torch.manual_seed(rank)
    model = on_device(MODELS[name]())
    if name == "Embeddings":  # NCCL has no sparse gradients
        options = options | {"process_group": dist.new_group(backend="gloo")}
    ddp = cls(model, **({"bucket_cap_mb": CAP_MB} | options))
    if hook is not None:
        state, hook = hook if isinstance(hook, tuple) else (None, hook)
        if hasattr(state, "number_parameters"):  # random directions depend on names
            state.number_parameters(model.named_parameters())
        ddp.register_comm_hook(state, hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    results = []
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(ddp(batch_of(model, rank, step))).backward()
        results.append(gradients(model))
        optimizer.step()
    return results, ddp.state_dict()
