"""ColossalAI's fp8_compress_ddp_grad_comm_hook_async doesn't run on gloo.

Run with torchrun --nproc-per-node 2
"""

import torch
import torch.distributed as dist
from colossalai.quantization.fp8 import fp8_compress_ddp_grad_comm_hook_async
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(16, 16))
model.register_comm_hook(None, fp8_compress_ddp_grad_comm_hook_async)
try:
    model(torch.ones(1, 16)).sum().backward()
except Exception as error:
    cause = str(error).splitlines()[0].split(": ")[-2:]
    if dist.get_rank() == 0:
        print(f"expected no exception, observed {': '.join(cause)}")
dist.destroy_process_group()
