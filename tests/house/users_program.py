"""Use gradcomp with types, as users do. Nothing runs this: `make lint` has mypy and pyright check it."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchsDDP

import gradcomp
from gradcomp import DistributedDataParallel, Reducer, average_
from gradcomp.hooks import (
    AutoState,
    DDPCommHookType,
    auto_hook,
    debugging_hooks,
    default_hooks,
    powerSGD_hook,
    quantization_hooks,
    register_ddp_comm_hook,
)
from gradcomp.testing import check_hook


def users_hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return default_hooks.allreduce_hook(dist.group.WORLD, bucket)


def compress_with_torchs_ddp(model: nn.Module) -> tuple[float, float, float]:
    ddp = TorchsDDP(model)
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=10)
    ddp.register_comm_hook(None, default_hooks.bf16_compress_hook)
    ddp.register_comm_hook(None, debugging_hooks.noop_hook)
    ddp.register_comm_hook(None, quantization_hooks.quantization_perchannel_hook)
    ddp.register_comm_hook(quantization_hooks.QuantizationState(bits=8), quantization_hooks.quantization_hook)
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    ddp.register_comm_hook(state, default_hooks.fp16_compress_wrapper(powerSGD_hook.batched_powerSGD_hook))
    ddp.register_comm_hook(AutoState(), auto_hook)
    register_ddp_comm_hook(DDPCommHookType.POWER_SGD, ddp)
    return state.compression_stats()


def train(model: nn.Module, data: torch.Tensor) -> None:
    ddp = DistributedDataParallel(model, bucket_cap_mb=25, find_unused_parameters=True)
    ddp.register_comm_hook(None, users_hook)
    ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    with ddp.join(), ddp.no_sync():
        ddp(data).sum().backward()


def train_without_a_wrapper(model: nn.Module, data: torch.Tensor) -> None:
    reducer = Reducer(model.parameters())
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4)
    reducer.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    reducer.register_comm_hook(None, users_hook)
    model(data).sum().backward()
    average_([parameter.detach() for parameter in model.parameters()])


def check() -> str:
    check_hook(users_hook).raise_if_failed()
    return gradcomp.__version__
