"""torch's fp16_compress_hook: above 65,504 on one rank, the mean is inf, though it fits in fp16.

Run with torchrun --nproc-per-node 2
"""

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
model.register_comm_hook(None, fp16_compress_hook)
gradient = 66000.0 if dist.get_rank() == 0 else 0.0
model(torch.tensor([[gradient]])).backward()
if dist.get_rank() == 0:
    print(f"expected a mean of 33000.0, observed {model.module.weight.grad.item()}")
dist.destroy_process_group()
