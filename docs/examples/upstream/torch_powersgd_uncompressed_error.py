"""torch's powerSGD_hook: the error of a tensor that isn't compressed grows in every step, without bound.

Run with torchrun --nproc-per-node 2
"""

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))  # one element is never compressed
state = PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
model.register_comm_hook(state, powerSGD_hook)
gradient = 1.0 if dist.get_rank() == 0 else -1.0  # the mean is 0 in every step, and sent exactly
for _ in range(102):  # two steps before PowerSGD starts, and 100 after
    model(torch.tensor([[gradient]])).backward()
    model.zero_grad()
if dist.get_rank() == 0:
    print(f"expected an error of 0.0, observed {state.error_dict[0].item()}")
dist.destroy_process_group()
