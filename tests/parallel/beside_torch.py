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


def assert_alike(rank, scenario, *arguments, wire=None):
    """Run a scenario on this rank with both classes; return gradcomp's results.

    wire: results may differ by a sum's rounding in this dtype; None: they are equal.
    """
    theirs, ours = on_both(rank, scenario, *arguments).values()
    bound = None if wire is None else partial(average, wire, 10 * dist.get_world_size())
    _compare(ours, theirs, bound, where=f"{scenario.__name__}{arguments}")
    return ours


def assert_alike_in_groups(run_group, scenario, cases, wire=torch.float32):
    """Compare the classes on the rank's device, on a CPU exactly; return results by case and rank."""
    compare = partial(assert_alike, wire=wire if torch.cuda.is_available() else None)
    return [*zip(*run_group(run_cases, compare, [(scenario, *case) for case in cases]), strict=True)]


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
