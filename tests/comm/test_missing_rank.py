"""A rank that leaves: the others are told the bucket, the hook, the rank and the likely cause."""

import gc
import json
import os
import re
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradcomp
from gradcomp.comm.process_group import ExplainedError
from gradcomp.compress import CompressorState, compress_hook
from gradcomp.fsdp import compress_replicas
from gradcomp.hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from gradcomp.hooks.quantization_hooks import QuantizationState, quantization_hook
from gradcomp.reducer import Reducer
from tests.fsdp.models import Exact, new_grid, sharded
from tests.hooks import checked
from tests.ranks import RankError

NUM_STEPS = 3


def users_hook(_, bucket):
    """Average with a collective that waits, as a user's own hook may."""
    dist.all_reduce(bucket.buffer())
    future = torch.futures.Future()
    future.set_result(bucket.buffer() / 2)
    return future


# (makes the state, makes the hook) by name.
HOOKS = {
    name: (check.make_state or (lambda: None), check.make)
    for name, check in checked.HOOKS.items()
    if check.averages
}
HOOKS |= {
    "quantization_hook, plain start": (lambda: QuantizationState(start_iter=100), lambda: quantization_hook),
    "powerSGD_hook, quantized start": (
        lambda: PowerSGDState(None, 1, 100, start_bits=8),
        lambda: powerSGD_hook,
    ),
    "compress_hook": (lambda: CompressorState(Exact), lambda: compress_hook),
}
# Not with torch's DDP: gradcomp takes no part in these averages there, so torch's errors stay as they are.
OURS_ONLY = {"users_hook": (lambda: None, lambda: users_hook), "no hook": None}


class Model(nn.Sequential):
    """A model with two buckets."""

    def __init__(self):
        super().__init__(nn.Linear(64, 64), nn.Linear(64, 64))


def in_torchs_ddp(hook):
    model = DistributedDataParallel(Model(), bucket_cap_mb=0.01)
    model.register_comm_hook(*hook)
    return lambda: model(torch.ones(2, 64)).sum().backward()


def in_our_ddp(hook):
    model = gradcomp.DistributedDataParallel(Model(), bucket_cap_mb=0.01)
    if hook is not None:
        model.register_comm_hook(*hook)
    return lambda: model(torch.ones(2, 64)).sum().backward()


def in_reducer(hook):
    model = Model()
    reducer = Reducer(model.named_parameters(), bucket_cap_mb=0.01, first_bucket_cap_mb=0.01)
    if hook is not None:
        reducer.register_comm_hook(*hook)

    def step(_=reducer):
        model(torch.ones(2, 64)).sum().backward()

    return step


def in_average(hook):
    state, function = hook or (None, None)
    return lambda: gradcomp.average_([torch.ones(64, 64), torch.ones(64, 64).double()], function, state)


def in_fsdp(hook):
    grid = new_grid(2, 1)
    replicas = grid.replicas
    model = sharded(grid.shards)
    state = None if hook is None else hook[0]
    if state is not None:
        state.process_group = replicas
    compress_replicas(model, replicas, state)
    return lambda: model(torch.ones(2, 12)).sum().backward()


SOME = ["quantization_hook int4", "powerSGD_hook", "fp16_compress_hook", *OURS_ONLY]
IN_FSDP = ["no hook", "quantization_hook int4", "powerSGD_hook", "compress_hook"]
WAYS = {
    "torch's DDP": (in_torchs_ddp, list(HOOKS)),
    "our DDP": (in_our_ddp, [*HOOKS, *OURS_ONLY]),
    "the Reducer": (in_reducer, SOME),
    "average_": (in_average, SOME),
    "FSDP2": (in_fsdp, IN_FSDP),
}


def errors(rank, way, names, path):
    """Let rank 1 leave after some steps; write rank 0's (error type, message, cause's type) by hook."""
    make, steps = WAYS[way][0], {}
    for name in names:
        hook = (HOOKS | OURS_ONLY)[name]
        steps[name] = make(None if hook is None else (hook[0](), hook[1]()))
        for _ in range(NUM_STEPS):
            steps[name]()
    if rank == 1:
        if way == "FSDP2":
            os._exit(0)  # torch keeps a sharded model's groups alive
        steps.clear()
        gc.collect()
        dist.destroy_process_group()
        return
    found = {}
    for name, step in steps.items():
        with pytest.raises(RuntimeError) as raised:
            step()
        error = raised.value
        found[name] = type(error).__name__, str(error), type(error.__cause__).__name__
    path.write_text(json.dumps(found))


@pytest.mark.parametrize("way", WAYS)
def test_the_message_names_bucket_hook_and_rank(run_ranks, way, tmp_path):
    names, path = WAYS[way][1], tmp_path / "found"
    with pytest.raises(RankError, match="rank 1 failed") if way == "FSDP2" else nullcontext():
        run_ranks(errors, 2, way, names, path)
    found = json.loads(path.read_text())
    assert list(found) == names
    for name, (kind, message, cause) in found.items():
        hook_names = re.findall(r"\w+_(?:hook|wrapper)", name) or [
            "an all-reduce",
            "allreduce_hook",
            "compress_hook",
        ]
        if way == "FSDP2":
            hook_names += ["compress_replicas", "compress_hook"]
        assert re.search(
            rf"^(Got .*)?rank 0 of 2 could not average bucket \d with ({'|'.join(hook_names)})\b.*: "
            r"\[.*gloo.*Connection (closed|reset) by peer.*If nothing is wrong on this rank, another rank "
            r"has ended.*a save.*Look for the first error in the output of the other ranks",
            message,
            re.DOTALL,
        ), (name, message)
        assert message.count("could not average") == 1, (name, message)
        if way != "torch's DDP":
            assert (kind, cause) == (ExplainedError.__name__, "RuntimeError"), name
            assert "At:" not in message
