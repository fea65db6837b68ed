"""ColossalAI's fp8_compress_ddp_grad_comm_hook_sync returns the sum of the ranks' gradients, not the mean.

Run with torchrun --nproc-per-node 2
"""

import torch
import torch.distributed as dist
from colossalai.quantization.fp8 import fp8_compress_ddp_grad_comm_hook_sync
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
model.register_comm_hook(None, fp8_compress_ddp_grad_comm_hook_sync)
model(torch.tensor([[1.0]])).backward()  # the gradient is 1 on both ranks
if dist.get_rank() == 0:
    print(f"expected a mean of 1.0, observed {model.module.weight.grad.item()}")
dist.destroy_process_group()
