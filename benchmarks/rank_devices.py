"""The number of ranks of a check, and each rank's device.

On NCCL every rank has a GPU of its own, and by default there are as many ranks as GPUs. On gloo all ranks
share the first GPU, or the CPU.
"""

from __future__ import annotations

import argparse

import torch

GLOO_RANKS = 2


def add_rank_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --backend, --world-size and --device, as chosen_world_size reads them."""
    parser.add_argument("--backend", choices=("nccl", "gloo"), default="gloo")
    parser.add_argument(
        "--world-size", type=int, help=f"default: {GLOO_RANKS} on gloo, the number of GPUs on nccl"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")


def chosen_world_size(args: argparse.Namespace) -> int:
    """Return the number of ranks. Raises ValueError if the machine has too few GPUs for it."""
    num_gpus = torch.cuda.device_count()
    if args.device == "cuda" and not num_gpus:
        raise ValueError("no CUDA GPU is available; --device cpu tries the check out")
    if args.backend == "nccl" and args.device == "cpu":
        raise ValueError("nccl has no collectives of CPU tensors: --device cpu takes --backend gloo")
    default = num_gpus if args.backend == "nccl" else GLOO_RANKS
    world_size: int = default if args.world_size is None else args.world_size
    if world_size < 1:
        raise ValueError(f"--world-size is {world_size}, but must be 1 or more")
    if args.backend == "nccl" and world_size > num_gpus:
        raise ValueError(
            f"--world-size is {world_size}, but nccl takes a GPU per rank, and this machine has {num_gpus}"
        )
    return world_size


def take_device(rank: int, backend: str, device_type: str) -> torch.device:
    """Return the rank's device, and make it the process's current one.

    On a CPU the process computes in one thread, as the ranks share the cores.
    """
    if device_type == "cpu":
        torch.set_num_threads(1)
        return torch.device("cpu")
    device = torch.device("cuda", rank if backend == "nccl" else 0)
    torch.cuda.set_device(device)
    return device
