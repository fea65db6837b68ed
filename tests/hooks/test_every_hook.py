"""Test what every hook averages in training, on DDP and on the Reducer, on gloo and on NCCL."""

import copy
from functools import wraps

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradcomp.reducer import Reducer
from tests.devices import device_of_rank
from tests.hooks.checked import HOOKS, NUM_STEPS_WITH_ERROR, HookCheck
from tests.kept import entry_of

NUM_STEPS = 4
NUM_PARTS = 3  # which may run at once: on a GPU each compiles its hooks' kernels
CHECKS = {"none": HookCheck(lambda: None), **HOOKS}
CAP_MB = 0.02  # of several buckets, so that several are in flight


def on_ddp(model):
    return DistributedDataParallel(model, bucket_cap_mb=CAP_MB)


def on_reducer(model, **options):
    caps = {"bucket_cap_mb": CAP_MB, "first_bucket_cap_mb": CAP_MB}
    return Reducer(model.named_parameters(), **caps, **options)


def on_views(model):
    return on_reducer(model, gradient_as_bucket_view=True)


def train(rank, check, averager_of):
    """Return per step this rank's own gradients and the averages, and the errors at the end (or zeros)."""
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.ReLU(), nn.Linear(64, 64))]
    local = nn.Sequential(nn.Linear(48, 64), *layers).to(device_of_rank())
    model, buckets = copy.deepcopy(local), {}
    averager = averager_of(model)
    forward = averager if isinstance(averager, nn.Module) else model
    hook, state = check.make(), check.make_state and check.make_state()
    if hook is not None:

        @wraps(hook)  # DDP checks the annotations
        def recording(state, bucket):
            buckets[bucket.index()] = bucket.parameters()
            return hook(state, bucket)

        averager.register_comm_hook(state, recording)
    steps = []
    for step in range(NUM_STEPS_WITH_ERROR if state else NUM_STEPS):
        torch.manual_seed(100 * step + rank + 1)
        inputs = torch.randn(32, 48).to(device_of_rank())
        for each in (local, model):
            each.zero_grad()
            (forward if each is model else each)(inputs).square().sum().backward()
        steps.append([[p.grad.clone() for p in each.parameters()] for each in (local, model)])
    assert hook is None or len(buckets) > 1, "one bucket is never in flight beside others"
    errors = {id(param): torch.zeros_like(param) for param in model.parameters()}
    for param in model.parameters() if state else ():
        errors[id(param)] = entry_of(state, param)["error"]
    return steps, [errors[id(param)].view_as(param) for param in model.parameters()]


def train_with_hooks(rank, names):
    return {
        f"{name}, {averager_of.__name__}": train(rank, CHECKS[name], averager_of)
        for name in names
        for averager_of in (on_ddp, on_reducer, on_views)
    }


def mean(tensors):
    return torch.stack([tensor.double() for tensor in tensors]).mean(0)


@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_averages(run_group, part):
    """Each average is the mean; with error feedback, the averages' sum plus the mean error at the end is."""
    ranks = run_group(train_with_hooks, list(CHECKS)[part::NUM_PARTS])
    for where in ranks[0]:
        check = CHECKS[where.rpartition(", ")[0]]
        steps, errors = zip(*(results[where] for results in ranks), strict=True)
        own, averaged = ([[step[i] for step in of_rank] for of_rank in steps] for i in (0, 1))
        sent = held_back = 0.0
        for index, errors_of_param in enumerate(zip(*errors, strict=True)):
            means, results = [], []
            for step in range(len(steps[0])):
                locals_ = [of_rank[step][index] for of_rank in own]
                replicas = [of_rank[step][index] for of_rank in averaged]
                scale = max(local.abs().max() for local in locals_)
                if not check.averages:
                    for replica, local in zip(replicas, locals_, strict=True):
                        assert (replica - local).abs().max() <= check.max_error * scale, where
                    continue
                assert all(torch.equal(replica, replicas[0]) for replica in replicas), where
                means.append(mean(locals_))
                results.append(replicas[0].double())
                if not check.make_state:
                    assert (results[-1] - means[-1]).abs().max() <= check.max_error * scale, where
            if check.make_state:
                total, error = sum(means), mean(errors_of_param)
                assert (sum(results) + error - total).abs().max() <= check.max_error * total.abs().max(), (
                    where
                )
                sent, held_back = sent + total.square().sum(), held_back + error.square().sum()
        # A hook that sends nothing and keeps everything as its error would satisfy that too. Steps are
        # independent here, so it would hold back 0.89 of the sum, all but the plain steps.
        assert held_back == 0 or (held_back / sent).sqrt() < 0.75, where
