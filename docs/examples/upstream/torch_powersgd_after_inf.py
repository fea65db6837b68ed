"""torch's powerSGD_hook: after one gradient of inf, as AMP makes them at times, all are NaN."""

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = DistributedDataParallel(torch.nn.Linear(16, 16, bias=False))
state = PowerSGDState(None, 1, start_powerSGD_iter=2, orthogonalization_epsilon=1e-8)
model.register_comm_hook(state, powerSGD_hook)
finite = []
for step in range(8):
    model.zero_grad()
    value = float("inf") if step == 3 else 1.0
    model(torch.full((1, 16), value)).sum().backward()
    finite.append(bool(model.module.weight.grad.isfinite().all()))
print(f"gradients of steps 5 to 8: expected finite, observed {finite[4:]}; before: {finite[:3]}")
dist.destroy_process_group()
