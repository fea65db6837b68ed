"""Train with each hook on real processes, on torch's DDP and on gradcomp's Reducer, and check the gradients.

With python -m benchmarks.ddp_check --backend gloo --world-size 2 --device cuda all ranks share one GPU
(or the CPU); with --backend nccl every rank has a GPU of its own. For every hook and without one, on either
reducer, for every step and parameter:

1. backward under no_sync computes each rank's own gradient;
2. a synchronized backward on these inputs computes the averaged gradient;
3. the averaged gradient must agree with the float64 mean of the ranks' own gradients, and have equal bits on
   every rank.

A hook with error feedback (PowerSGD, quantization_hook) must agree over all steps: the sum of its results
plus the mean of the ranks' errors at the end is the sum of the means.

The model has several buckets, so several are in flight. Exit status: 0 if all is right, 1 otherwise.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial, wraps
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

from benchmarks.checked_hooks import HOOKS, NO_HOOK, NUM_STEPS_WITH_ERROR, HookCheck, find
from benchmarks.rank_devices import add_rank_arguments, chosen_world_size, take_device
from gradcomp import Reducer

NUM_STEPS = 4
BUCKET_CAP_MB = 1.0


def check_hook(name: str, device: torch.device) -> list[str]:
    """Train a few steps with the hook on every reducer, and list the failures on this rank. A collective."""
    hook_check = find(name)
    all_failures = []
    for reducer, make in REDUCERS.items():
        run = _Run(*make(_model(device)), hook_check)
        where = f"{name} on {reducer}"
        check = _check_sums if hook_check.make_state else _check_steps
        largest, failures = check(where, run, hook_check, device)
        if dist.get_rank() == 0:
            verdict = "FAILED" if failures else "ok"
            bound = f"error {largest:.1e} of {hook_check.max_error:.1e}"
            print(f"{name:<24} {verdict:<8} {bound}  on {reducer}", flush=True)
        all_failures += failures
    return all_failures


@dataclass
class _Run:
    """A model and the averager of its gradients, with a hook, wrapped to record each bucket's parameters."""

    model: torch.nn.Module
    reducer: DistributedDataParallel | Reducer
    hook_check: HookCheck
    state: Any = None
    buckets: dict[int, list[torch.Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        hook = self.hook_check.make()
        self.state = self.hook_check.make_state() if self.hook_check.make_state else None
        if hook is None:
            return

        @wraps(hook)  # DDP checks the annotations
        def recording(state, bucket):
            self.buckets[bucket.index()] = bucket.parameters()
            return hook(state, bucket)

        self.reducer.register_comm_hook(self.state, recording)

    def step(self, step: int, device: torch.device) -> list[tuple[list[torch.Tensor], list[torch.Tensor]]]:
        """Collect for every parameter the ranks' own gradients and their averages."""
        torch.manual_seed(100 * step + dist.get_rank() + 1)
        inputs = torch.randn(32, 256).to(device)
        with self.reducer.no_sync():
            own = _gradients(self.model, inputs)
        result = _gradients(self.model, inputs)
        return [(gather(a), gather(b)) for a, b in zip(own, result, strict=True)]

    def mean_errors(self) -> list[torch.Tensor]:
        """Compute for every parameter the mean of the ranks' errors."""
        errors = {}
        for index, memory in self.state.state_dict()["buckets"].items():
            parameters = self.buckets[index]
            parts = memory["error"].split([parameter.numel() for parameter in parameters])
            errors |= {id(parameter): part for parameter, part in zip(parameters, parts, strict=True)}
        return [_mean(gather(errors[id(p)].view_as(p))) for p in self.model.parameters()]


def _check_steps(
    name: str, run: _Run, hook_check: HookCheck, device: torch.device
) -> tuple[float, list[str]]:
    """Check every step: return the largest error and the failures."""
    failures = []
    largest = 0.0
    for step in range(NUM_STEPS):
        for index, (own, replicas) in enumerate(run.step(step, device)):
            where = f"{name}, step {step}, parameter {index}"
            error = _error(own, replicas, hook_check.averages)
            largest = max(largest, error)
            if not error <= hook_check.max_error:
                failures.append(f"{where}: off by {error:.3g}, allowed {hook_check.max_error:.3g}")
            if hook_check.averages and _differ(replicas):
                failures.append(f"{where}: the replicas differ")
    return largest, failures


def _check_sums(name: str, run: _Run, hook_check: HookCheck, device: torch.device) -> tuple[float, list[str]]:
    """Check the sums over the steps plus the errors at the end: return the largest error and the failures."""
    failures = []
    largest = 0.0
    sums: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for step in range(NUM_STEPS_WITH_ERROR):
        for index, (own, replicas) in enumerate(run.step(step, device)):
            means, results = sums.get(index, (0.0, 0.0))
            sums[index] = means + _mean(own), results + replicas[0].double()
            if _differ(replicas):
                failures.append(f"{name}, step {step}, parameter {index}: the replicas differ")
    total = total_held_back = torch.zeros((), dtype=torch.float64)
    for index, held_back in enumerate(run.mean_errors()):
        means, results = sums[index]
        error = ((results + held_back - means).abs().max() / means.abs().max()).item()  # NaN if there is one
        largest = max(largest, error)
        where = f"{name}, parameter {index}"
        if not error <= hook_check.max_error:
            failures.append(
                f"{where}: results and errors are off by {error:.3g}, allowed {hook_check.max_error:.3g}"
            )
        total = total + means.square().sum()
        total_held_back = total_held_back + held_back.square().sum()
    # A hook that sends nothing and keeps everything as its error would satisfy that too. Steps are
    # independent here, so such a hook holds back 0.89 of the sum, all but the plain steps;
    # batched_powerSGD_hook 0.36, powerSGD_hook 0.03.
    fraction = (total_held_back / total).sqrt().item()
    if not fraction < 0.75:
        failures.append(f"{name}: holds back {fraction:.2f} of the gradients at the end")
    return largest, failures


def _mean(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([tensor.double() for tensor in tensors]).mean(0)


def _differ(replicas: list[torch.Tensor]) -> bool:
    return not all(torch.equal(replica, replicas[0]) for replica in replicas)


def gather(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return every rank's tensor on the CPU."""
    # gloo takes CUDA tensors, too, but NCCL takes nothing else.
    wire = tensor.cuda() if dist.get_backend() == "nccl" else tensor.cpu()
    if dist.get_world_size() == 1:
        return [wire.cpu()]
    gathered = [torch.empty_like(wire) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, wire)
    return [each.cpu() for each in gathered]


def _model(device: torch.device) -> torch.nn.Module:
    torch.manual_seed(0)
    layers: list[torch.nn.Module] = [torch.nn.Linear(256, 512)]
    for _ in range(4):
        layers += [torch.nn.ReLU(), torch.nn.Linear(512, 512)]
    return torch.nn.Sequential(*layers).to(device)


def _with_ddp(model: torch.nn.Module) -> tuple[torch.nn.Module, DistributedDataParallel]:
    device = next(model.parameters()).device
    device_ids = [device.index] if device.type == "cuda" else None
    ddp = DistributedDataParallel(model, device_ids=device_ids, bucket_cap_mb=BUCKET_CAP_MB)
    return ddp, ddp


def _with_reducer(model: torch.nn.Module, **options: bool) -> tuple[torch.nn.Module, Reducer]:
    return model, Reducer(model.named_parameters(), bucket_cap_mb=BUCKET_CAP_MB, **options)


# By name, the function from a model to (the module to call, the averager of its gradients).
REDUCERS: dict[str, Callable[[torch.nn.Module], tuple[torch.nn.Module, Any]]] = {
    "DistributedDataParallel": _with_ddp,
    "Reducer": _with_reducer,
    "Reducer, as views": partial(_with_reducer, gradient_as_bucket_view=True),
}


def _gradients(model: torch.nn.Module, inputs: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad(set_to_none=True)
    model(inputs).square().sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def _error(own: list[torch.Tensor], replicas: list[torch.Tensor], averages: bool) -> float:
    """Compute the largest deviation on any rank, relative to the largest gradient.

    own: each rank's own gradient. replicas: each rank's result.
    """
    scale = torch.stack(own).abs().max().item()
    mean = _mean(own)
    expected = [mean] * len(own) if averages else own
    errors = [
        (replica.double() - right.double()).abs().max()
        for replica, right in zip(replicas, expected, strict=True)
    ]
    return torch.stack(errors).max().item() / scale  # NaN if there is one


def _run_rank(
    rank: int, world_size: int, backend: str, device_type: str, store: str, hooks: Sequence[str]
) -> None:
    device = take_device(rank, backend, device_type)
    dist.init_process_group(
        backend,
        store=dist.FileStore(store, world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=60),
    )
    try:
        failures = [failure for name in hooks for failure in check_hook(name, device)]
    finally:
        dist.destroy_process_group()
    if failures:
        shown = "\n".join(failures[:10])
        raise RuntimeError(f"rank {rank}: {len(failures)} failures, the first of them:\n{shown}")


def run(backend: str, world_size: int, device: str, hooks: Sequence[str], timeout_s: float) -> str | None:
    """Spawn the ranks and wait for them. Return None if all is right, else a description of the failure."""
    # All ranks are on this machine, which need not have any network.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    deadline = time.monotonic() + timeout_s
    with tempfile.TemporaryDirectory(prefix="gradcomp-") as folder:
        arguments = (world_size, backend, device, str(Path(folder, "store")), tuple(hooks))
        context = mp.spawn(_run_rank, arguments, nprocs=world_size, join=False)
        try:
            while not context.join(timeout=1):
                if time.monotonic() > deadline:
                    return f"timed out after {timeout_s:g} s"
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
            return str(error)
        finally:
            for process in context.processes:
                if process.is_alive():
                    process.kill()
                process.join()
    return None


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ddp_check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_rank_arguments(parser)
    parser.add_argument("--hook", action="append", help="only this one; may be module:attribute")
    parser.add_argument("--timeout-s", type=float, default=120)
    args = parser.parse_args(argv)
    try:
        world_size = chosen_world_size(args)
    except ValueError as error:
        print(f"ddp_check: {error}")
        return 1
    hooks = args.hook or [*HOOKS, NO_HOOK]
    problem = run(args.backend, world_size, args.device, hooks, args.timeout_s)
    if problem:
        print(f"ddp_check: {problem}")
    return 1 if problem else 0


if __name__ == "__main__":
    sys.exit(main())
