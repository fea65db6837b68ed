"""torch's quantization hooks don't run on gloo: they expect a list of lists from all_gather's future."""

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import quantization_hooks
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for name in ("quantization_pertensor_hook", "quantization_perchannel_hook"):
    model = DistributedDataParallel(torch.nn.Linear(16, 16))
    model.register_comm_hook(None, getattr(quantization_hooks, name))
    try:
        model(torch.ones(1, 16)).sum().backward()
        print(f"{name}: no exception")
    except Exception as error:
        cause = str(error).splitlines()[0].split(": ")[-2:]
        print(f"{name}: expected no exception, observed {': '.join(cause).partition('. Use')[0]}")
dist.destroy_process_group()
