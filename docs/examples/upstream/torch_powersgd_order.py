"""torch's powerSGD_hook, torchrun --nproc-per-node 2: ranks issue collectives in different orders."""

import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook


def all_reduce(tensor, original=dist.all_reduce, **options):
    print(f"rank {dist.get_rank()}: all-reduce of {tensor.numel()} elements\n", end="", flush=True)
    return original(tensor, **options)


dist.init_process_group("gloo", timeout=timedelta(seconds=5))
layers = [torch.nn.Linear(16, 16) for _ in range(2)]
for layer in layers:  # backward takes longer on rank 1
    layer.register_full_backward_pre_hook(lambda *_: time.sleep(dist.get_rank()))
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.001)
model.register_comm_hook(PowerSGDState(None, 2, start_powerSGD_iter=2), powerSGD_hook)
for step in range(3):
    if step == 2:  # the first compressed one: 16 elements are a bucket's biases, 32 its P or Q
        dist.all_reduce = all_reduce
    model(torch.ones(1, 16, requires_grad=True)).sum().backward()
