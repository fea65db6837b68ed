"""torch's batched_powerSGD_hook: the first compressed step raises AssertionError, whatever the model."""

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, batched_powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = DistributedDataParallel(torch.nn.Linear(16, 16))
state = PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
model.register_comm_hook(state, batched_powerSGD_hook)
for step in range(1, 4):
    try:
        model(torch.ones(1, 16)).sum().backward()
    except AssertionError:
        print(f"expected no exception, observed AssertionError in step {step}, the first compressed one")
dist.destroy_process_group()
