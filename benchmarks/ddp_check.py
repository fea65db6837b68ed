"""Train with torch's DDP and each hook on real processes, and check the gradients.

python -m benchmarks.ddp_check --backend gloo --world-size 2 --device cuda: all ranks share one GPU
(or the CPU). For every hook, step and parameter:

1. backward under no_sync gives each rank its own gradient;
2. a synchronised backward on the same inputs gives the averaged one;
3. it must agree with the float64 mean of the ranks' own, and be the same bits on every rank.

The model has several buckets, so several are in flight. Exit status: 0 when all is right, 1 otherwise.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as torch_hooks
from torch.nn.parallel import DistributedDataParallel

from gradcomp.hooks import debugging_hooks, default_hooks

NUM_STEPS = 4
BUCKET_CAP_MB = 1.0


@dataclass(frozen=True)
class HookCheck:
    """A hook, the narrowest dtype on its way, and whether it averages at all."""

    make: Callable[[], Callable]
    dtype: torch.dtype = torch.float32
    averages: bool = True

    @property
    def max_error(self) -> float:
        # Relative to the parameter's largest gradient. Each rank rounds its own (half an eps), the
        # sum is rounded and so is the division: eps and a half; doubled for backward's own noise.
        return 3 * torch.finfo(self.dtype).eps


HOOKS = {
    "allreduce_hook": HookCheck(lambda: default_hooks.allreduce_hook),
    "fp16_compress_hook": HookCheck(lambda: default_hooks.fp16_compress_hook, torch.float16),
    "bf16_compress_hook": HookCheck(lambda: default_hooks.bf16_compress_hook, torch.bfloat16),
    # Around a hook of torch's: around ours the wrappers are the two hooks above.
    "fp16_compress_wrapper": HookCheck(
        lambda: default_hooks.fp16_compress_wrapper(torch_hooks.allreduce_hook), torch.float16
    ),
    "bf16_compress_wrapper": HookCheck(
        lambda: default_hooks.bf16_compress_wrapper(torch_hooks.allreduce_hook), torch.bfloat16
    ),
    "noop_hook": HookCheck(lambda: debugging_hooks.noop_hook, averages=False),
}


def find(name: str) -> HookCheck:
    """A hook of HOOKS, or anybody's fp32 averaging hook as "module:attribute"."""
    if name in HOOKS:
        return HOOKS[name]
    module, colon, attribute = name.partition(":")
    if not colon:
        raise KeyError(f"no hook {name!r}: one of {', '.join(HOOKS)}, or module:attribute")
    return HookCheck(lambda: getattr(importlib.import_module(module), attribute))


def check_hook(name: str, device: torch.device) -> list[str]:
    """Train a few steps with the hook; what was wrong on this rank. Collective."""
    hook_check = find(name)
    torch.manual_seed(0)
    ddp = _model(device)
    ddp.register_comm_hook(None, hook_check.make())
    failures = []
    largest = 0.0
    for step in range(NUM_STEPS):
        torch.manual_seed(100 * step + dist.get_rank() + 1)
        inputs = torch.randn(32, 256).to(device)
        with ddp.no_sync():
            own = _gradients(ddp, inputs)
        result = _gradients(ddp, inputs)
        owns = [gather(gradient) for gradient in own]
        results = [gather(gradient) for gradient in result]
        for index, (parts, replicas) in enumerate(zip(owns, results, strict=True)):
            where = f"{name}, step {step}, parameter {index}"
            error = _error(parts, replicas, hook_check.averages)
            largest = max(largest, error)
            if not error <= hook_check.max_error:
                failures.append(f"{where}: off by {error:.3g}, allowed {hook_check.max_error:.3g}")
            same = all(torch.equal(replica, replicas[0]) for replica in replicas)
            if hook_check.averages and not same:
                failures.append(f"{where}: the replicas differ")
    if dist.get_rank() == 0:
        verdict = "FAILED" if failures else "ok"
        print(f"{name:<24} {verdict:<8} error {largest:.1e} of {hook_check.max_error:.1e}", flush=True)
    return failures


def gather(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Every rank's tensor, on the CPU."""
    host = tensor.cpu()
    if dist.get_world_size() == 1:
        return [host]
    gathered = [torch.empty_like(host) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, host)
    return gathered


def _model(device: torch.device) -> DistributedDataParallel:
    layers: list[torch.nn.Module] = [torch.nn.Linear(256, 512)]
    for _ in range(4):
        layers += [torch.nn.ReLU(), torch.nn.Linear(512, 512)]
    model = torch.nn.Sequential(*layers).to(device)
    device_ids = [device.index] if device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=device_ids, bucket_cap_mb=BUCKET_CAP_MB)


def _gradients(ddp: DistributedDataParallel, inputs: torch.Tensor) -> list[torch.Tensor]:
    ddp.zero_grad(set_to_none=True)
    ddp(inputs).square().sum().backward()
    return [parameter.grad.clone() for parameter in ddp.parameters()]


def _error(parts: list[torch.Tensor], replicas: list[torch.Tensor], averages: bool) -> float:
    """The largest deviation on any rank, relative to the largest gradient."""
    scale = torch.stack(parts).abs().max().item()
    mean = torch.stack([part.double() for part in parts]).mean(0)
    expected = [mean] * len(parts) if averages else parts
    errors = [
        (replica.double() - right.double()).abs().max()
        for replica, right in zip(replicas, expected, strict=True)
    ]
    return torch.stack(errors).max().item() / scale  # NaN if there is one


def _run_rank(
    rank: int, world_size: int, backend: str, device_type: str, store: str, hooks: Sequence[str]
) -> None:
    device = torch.device(device_type)
    if device.type == "cuda":
        device = torch.device("cuda", 0)
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
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
    """Spawn the ranks and wait for them. None when all is right, else what went wrong."""
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
    parser.add_argument("--backend", choices=("nccl", "gloo"), default="gloo")
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--hook", action="append", help="only this one; may be module:attribute")
    parser.add_argument("--timeout-s", type=float, default=120)
    args = parser.parse_args(argv)
    problem = run(args.backend, args.world_size, args.device, args.hook or list(HOOKS), args.timeout_s)
    if problem:
        print(f"ddp_check: {problem}")
    return 1 if problem else 0


if __name__ == "__main__":
    sys.exit(main())
