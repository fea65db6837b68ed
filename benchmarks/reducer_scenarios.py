"""The scenarios of reducer_check that average gradients, on the Reducer or on the wrapper.

Every scenario except join compares with the float64 mean of the ranks' own gradients, from a twin of the
model.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import gradcomp
from benchmarks import checked_hooks
from benchmarks.rank_results import Results, rounding
from benchmarks.reducer_models import (
    MLP,
    BesideTwin,
    Branches,
    Complex,
    ConvNet,
    Embeddings,
    MixedDtypes,
    On,
    Repeated,
    current_stream_of_its_own,
    loss_of,
    made,
    numbers,
    wrapped,
)

VIEW: dict[str, Any] = {"gradient_as_bucket_view": True}
BOTH: tuple[dict[str, Any], ...] = ({}, VIEW)
SLEEP_CYCLES = 50_000_000  # tens of milliseconds, more than a step takes


def unused_parameters(device: torch.device, rank: int, world_size: int, on: On) -> Results:
    """Use a layer on rank 0, on the last rank, on none, and on all; another layer never."""
    results = Results(world_size)
    users = ([0], [world_size - 1], [], list(range(world_size)))
    for options in (*BOTH, {"skip_all_reduce_unused_params": True}):
        both = BesideTwin(on, made(Branches, device), device, find_unused_parameters=True, **options)
        model = both.averaged.model
        for step in range(2 * len(users)):
            used = users[step % len(users)]
            where = f"{_named(options)}, step {step}, used on {used}"
            both.zero_grad()
            # Old gradients, which differ between ranks, so averaging them shows.
            kept = {"never.weight": model.never.weight}
            if not used:
                kept["sometimes.weight"] = model.sometimes.weight
            old = {name: torch.full_like(param, step + rank + 0.1) for name, param in kept.items()}
            for name, param in kept.items():
                param.grad = old[name].clone()
            both.backward((numbers(device, rank, step, (6, 20)), rank in used))
            for name, param, own in both.named():
                if name in kept:
                    results.same(f"{where}, {name} as it was", old[name], param.grad)
                else:
                    results.mean(f"{where}, {name}", own.grad, param.grad)
    return results


def static_graph(device: torch.device, rank: int, world_size: int, on: On) -> Results:
    """Use layers twice, on rank 0 only, and never, and say that the graph is static."""
    results = Results(world_size)
    for options in BOTH:
        model = made(lambda: Repeated(rank == 0), device)
        both = BesideTwin(on, model, device, static_graph=True, **options)
        for step in range(3):
            both.zero_grad()
            both.backward((numbers(device, rank, step, (6, 20)),))
            both.expect_means(results, f"{_named(options)}, step {step}")
    return results


def sparse_gradients(device: torch.device, rank: int, world_size: int, on: On) -> Results:
    """Average sparse rows beside dense gradients. The number of rows differs by rank, and may be zero."""
    results = Results(world_size)
    for options in (*BOTH, {"find_unused_parameters": True}):
        both = BesideTwin(on, made(Embeddings, device), device, **options)
        for step in range(4):
            both.zero_grad()
            generator = torch.Generator().manual_seed(10 * rank + step)
            # In step 2 no rank has any token: sparse gradients without a row.
            shape = (5, 0) if step == 2 else (5 + rank, 4)
            tokens = torch.randint(0, 30, shape, generator=generator).to(device)
            # With unused parameters: on the last rank only, then on none.
            is_used = step != 3 and (step != 1 or rank == world_size - 1)
            inputs = (tokens, is_used) if "find_unused_parameters" in options else (tokens,)
            both.backward(inputs)
            where = f"{_named(options)}, step {step}"
            both.expect_means(results, where)
            weight = both.averaged.model.sparse.weight
            results.fact(f"{where}, sparse or None", weight.grad is None or weight.grad.is_sparse)
    return results


def channels_last(device: torch.device, rank: int, world_size: int, on: On) -> Results:
    """Average gradients of channels-last weights, which keep the weights' strides."""
    results = Results(world_size)
    for options in BOTH:
        both = BesideTwin(on, made(ConvNet, device), device, **options)
        for step in range(4):
            where = f"{_named(options)}, step {step}"
            both.zero_grad(set_to_none=step % 2 == 0)
            both.backward((numbers(device, rank, step, (4, 3 * 8 * 8)),))
            both.expect_means(results, where)
            for name, param, _ in both.named():
                results.fact(f"{where}, {name} strides", param.grad.stride() == param.stride())
    return results


def accumulation(device: torch.device, rank: int, world_size: int, on: On) -> Results:
    """Accumulate three backwards, from None and from zeros. The last one averages."""
    results = Results(world_size)
    for options in BOTH:
        both = BesideTwin(on, made(MLP, device), device, **options)
        for step in range(4):
            both.zero_grad(set_to_none=step % 2 == 0)
            batches = [(numbers(device, rank, 10 * step + index, (6, 20)),) for index in range(3)]
            both.backward(*batches)
            both.expect_means(results, f"{_named(options)}, step {step}")
    return results


def mixed_dtypes(device: torch.device, rank: int, world_size: int, on: On) -> Results:
    """Average float32 and bfloat16 gradients, each in buckets of their own."""
    results = Results(world_size)
    for options in BOTH:
        both = BesideTwin(on, made(MixedDtypes, device), device, **options)
        for step in range(3):
            both.zero_grad()
            both.backward((numbers(device, rank, step, (6, 20)),))
            both.expect_means(results, f"{_named(options)}, step {step}")
        buckets = both.averaged.reducer.communicator.buckets
        dtypes = [{param.dtype for param in bucket.parameters} for bucket in buckets]
        results.fact(f"{_named(options)}, a dtype per bucket", all(len(each) == 1 for each in dtypes))
        results.fact(f"{_named(options)}, buckets of both dtypes", len(set.union(*dtypes)) == 2)
    return results


def complex_parameters(device: torch.device, rank: int, world_size: int, on: On) -> Results:
    """Average complex gradients without a hook, and through hooks that see them as real gradients."""
    results = Results(world_size)
    hooks = {"none": torch.float32, "allreduce_hook": torch.float32, "bf16_compress_hook": torch.bfloat16}
    for name, dtype in hooks.items():
        for options in BOTH:
            both = BesideTwin(on, made(Complex, device), device, **options)
            hook = checked_hooks.find(name).make()
            if hook is not None:
                both.averaged.register(None, hook)
            for step in range(3):
                both.zero_grad()
                both.backward((numbers(device, rank, step, (6, 20)),))
                where = f"{name}, {_named(options)}, step {step}"
                both.expect_means(results, where, rounding(dtype, world_size))
    return results


def bucket_views(device: torch.device, rank: int, world_size: int, on: On) -> Results:
    """Keep gradients in the buckets' memory: zeroed, newly made, and while buckets are rebuilt."""
    results = Results(world_size)
    both = BesideTwin(on, made(MLP, device), device, **VIEW)
    for step in range(5):
        both.zero_grad(set_to_none=step == 3)
        both.backward((numbers(device, rank, step, (6, 20)),))
        both.expect_means(results, f"step {step}")
        buckets = both.averaged.reducer.communicator.buckets
        storages = {bucket.buffer.untyped_storage().data_ptr() for bucket in buckets}
        where = [param.grad.untyped_storage().data_ptr() for _, param, _ in both.named()]
        results.fact(f"step {step}, gradients are in the buckets", storages.issuperset(where))
        results.fact(f"step {step}, several buckets", len(buckets) > 1)
    return results


def late_gradients(device: torch.device, rank: int, world_size: int, on: On) -> Results:
    """Average on a stream of our own, behind a sleeping kernel; read and overwrite gradients at once."""
    results = Results(world_size)
    with current_stream_of_its_own(device):
        for hook_name in ("none", "allreduce_hook", "bf16_compress_hook"):
            for options in BOTH:
                both = BesideTwin(on, made(MLP, device), device, **options)
                hook_check = checked_hooks.find(hook_name)
                hook = hook_check.make()
                if hook is not None:
                    both.averaged.register(None, hook)
                for step in range(3):
                    both.zero_grad(set_to_none=step % 2 == 0)
                    inputs = numbers(device, rank, step, (6, 20))
                    if device.type == "cuda":
                        torch.cuda._sleep(SLEEP_CYCLES)
                    both.backward((inputs,))
                    read = [(name, own.grad, param.grad.clone()) for name, param, own in both.named()]
                    for _, param, _ in both.named():
                        param.grad.fill_(float("nan"))
                    max_error = rounding(hook_check.dtype, world_size)
                    for name, own, result in read:
                        where = f"{hook_name}, {_named(options)}, step {step}, {name}"
                        results.mean(where, own, result, max_error)
    return results


def join(device: torch.device, rank: int, world_size: int) -> Results:
    """Train on fewer inputs on some ranks than on others, beside torch's DistributedDataParallel."""
    results = Results(world_size)
    for divide_by_all in (True, False):
        for make in (MLP, ConvNet):
            width = 20 if make is MLP else 3 * 8 * 8
            model = made(make, device)
            ends = {}
            for name, cls in (("torch", TorchDDP), ("gradcomp", gradcomp.DistributedDataParallel)):
                ends[name] = _joined(cls, copy.deepcopy(model), device, rank, width, divide_by_all)
            where = f"{'divided by all' if divide_by_all else 'by those left'}, {make.__name__}"
            # Rounding errors grow with the steps.
            max_error = 8 * rounding(torch.float32, world_size)
            for (name, theirs), (_, ours) in zip(ends["torch"], ends["gradcomp"], strict=True):
                is_state = name.startswith("end")
                results.like(f"{where}, {name}", theirs, ours, max_error, is_common=is_state)
    return results


def _joined(
    cls: type, model: nn.Module, device: torch.device, rank: int, width: int, divide_by_all: bool
) -> list[tuple[str, torch.Tensor]]:
    """Train on one input more on each rank.

    Return each step's gradients, and the parameters and buffers at the end, with their names.
    """
    seen = []
    ddp = wrapped(cls, model, device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with ddp.join(divide_by_initial_world_size=divide_by_all):
        for step in range(2 + rank):
            optimizer.zero_grad()
            loss_of(ddp(numbers(device, rank, step, (6, width)))).backward()
            seen += [(f"step {step}, {name}", p.grad.clone()) for name, p in model.named_parameters()]
            optimizer.step()
    return seen + [(f"end, {name}", each.clone()) for name, each in model.state_dict().items()]


def disagreement(device: torch.device, rank: int, world_size: int, on: On) -> Results:
    """Give ranks different options, and options too long for one message: every rank must raise."""
    results = Results(world_size)
    for where, make, options in (
        ("options", MLP, {"static_graph": rank == 0}),
        ("models", lambda: nn.Sequential(*(nn.Linear(4, 4 + (rank == 0)) for _ in range(60))), {}),
    ):
        message = ""
        try:
            BesideTwin(on, made(make, device), device, **options)
        except RuntimeError as error:
            message = str(error)
        results.fact(f"{where}, raised", ("rank 0" in message) == (world_size > 1))
    # The group still works afterwards.
    total = torch.full((3,), float(rank), device=device)
    dist.all_reduce(total)
    results.same("the group", torch.full((3,), sum(range(world_size)) * 1.0), total)
    return results


def _named(options: dict[str, Any]) -> str:
    return ", ".join(options) or "plain"
