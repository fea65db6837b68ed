"""torch's powerSGD_hook: a gradient of zeros becomes NaN at ranks 1 and 2."""

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for rank in (1, 2):
    model = DistributedDataParallel(torch.nn.Linear(16, 16, bias=False))
    state = PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook)
    for _ in range(3):  # two plain steps, and a compressed one
        model.zero_grad()
        model(torch.zeros(1, 16)).sum().backward()
    num_nan = model.module.weight.grad.isnan().sum()
    print(f"rank {rank}: expected 0 of 256 elements to be NaN, observed {num_nan}")
dist.destroy_process_group()
