"""torch's PowerSGDState: torch.load's safe default refuses the checkpoint of torch's documentation."""

import io
import pickle

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
file = io.BytesIO()
state = PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
torch.save({"comm_hook": powerSGD_hook, "comm_hook_state": state}, file)
file.seek(0)
try:
    torch.load(file)
    print("loaded")
except pickle.UnpicklingError as error:
    print(f"expected the checkpoint to load, observed {type(error).__name__}: {str(error)[:25]}")
dist.destroy_process_group()
