"""A rank that leaves: the others are told the bucket, the hook, the rank and the likely cause."""

import gc
import json
import os
import re
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradcomp
from gradcomp.comm.process_group import ExplainedError
from gradcomp.compress import CompressorState, compress_hook
from gradcomp.fsdp import compress_replicas
from gradcomp.hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    bf16_compress_wrapper,
    fp16_compress_hook,
    fp16_compress_wrapper,
)
from gradcomp.hooks.powerSGD_hook import batched_powerSGD_hook, powerSGD_hook
from gradcomp.hooks.quantization_hooks import (
    QuantizationState,
    quantization_hook,
    quantization_perchannel_hook,
    quantization_pertensor_hook,
)
from gradcomp.reducer import Reducer
from tests import training
from tests.fsdp.models import Exact, new_grid, sharded
from tests.ranks import RankError

NUM_STEPS = 3


def users_hook(_, bucket):
    """Average with a collective that waits, as a user's own hook may."""
    dist.all_reduce(bucket.buffer())
    future = torch.futures.Future()
    future.set_result(bucket.buffer() / 2)
    return future


power_sgd = partial(training.power_sgd, min_compression_rate=1)


HOOKS = {
    "allreduce": (lambda: None, allreduce_hook),
    "fp16": (lambda: None, fp16_compress_hook),
    "bf16": (lambda: None, bf16_compress_hook),
    "per tensor": (lambda: None, quantization_pertensor_hook),
    "per channel": (lambda: None, quantization_perchannel_hook),
    "4 bits": (lambda: QuantizationState(bits=4), quantization_hook),
    "8 bits": (lambda: QuantizationState(bits=8), quantization_hook),
    "8 bits, plain start": (lambda: QuantizationState(bits=8, start_iter=100), quantization_hook),
    "PowerSGD": (power_sgd, powerSGD_hook),
    "PowerSGD, plain start": (lambda: power_sgd(start=100), powerSGD_hook),
    "PowerSGD, quantized start": (lambda: power_sgd(start=100, start_bits=8), powerSGD_hook),
    "PowerSGD, int8 factors": (lambda: power_sgd(factor_dtype=torch.int8), powerSGD_hook),
    "PowerSGD, batched": (power_sgd, batched_powerSGD_hook),
    "compressor": (lambda: CompressorState(Exact), compress_hook),
    "fp16 around PowerSGD": (power_sgd, fp16_compress_wrapper(powerSGD_hook)),
    "bf16 around 8 bits": (lambda: None, bf16_compress_wrapper(quantization_pertensor_hook)),
    "fp16 around bf16": (lambda: None, fp16_compress_wrapper(bf16_compress_hook)),
}
# Not with torch's DDP: gradcomp takes no part in these averages there, so torch's errors stay as they are.
OURS_ONLY = {"user's": (lambda: None, users_hook), "no hook": None}


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


IN_FSDP = ["no hook", "4 bits", "PowerSGD", "PowerSGD, plain start", "compressor"]
WAYS = {
    "torch's DDP": (in_torchs_ddp, list(HOOKS)),
    "our DDP": (in_our_ddp, [*HOOKS, *OURS_ONLY]),
    "the Reducer": (in_reducer, ["4 bits", "PowerSGD", "fp16", "user's", "no hook"]),
    "average_": (in_average, ["4 bits", "PowerSGD", "fp16", "user's", "no hook"]),
    "FSDP2": (in_fsdp, IN_FSDP),
}


def errors(rank, way, names, path):
    """Let rank 1 leave after some steps; write rank 0's (error type, message, cause's type) by hook."""
    make, steps = WAYS[way][0], {}
    for name in names:
        hook = (HOOKS | OURS_ONLY)[name]
        steps[name] = make(None if hook is None else (hook[0](), hook[1]))
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
        hook = (HOOKS | OURS_ONLY)[name]
        hook_name = "an all-reduce|allreduce_hook" if hook is None else re.escape(hook[1].__qualname__)
        inner = "|powerSGD_hook|quantization_pertensor_hook|bf16_compress_hook" if "around" in name else ""
        where = "compress_replicas|compress_hook|" if way == "FSDP2" else ""
        assert re.search(
            rf"^(Got .*)?rank 0 of 2 could not average bucket \d with ({where}{hook_name}{inner})\b.*: "
            r"\[.*gloo.*Connection (closed|reset) by peer.*If nothing is wrong on this rank, another rank "
            r"has ended.*a save.*Look for the first error in the output of the other ranks",
            message,
            re.DOTALL,
        ), (name, message)
        assert message.count("could not average") == 1, (name, message)
        if way != "torch's DDP":
            assert (kind, cause) == (ExplainedError.__name__, "RuntimeError"), name
            assert "At:" not in message
