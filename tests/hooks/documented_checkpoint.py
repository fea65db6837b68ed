"""Save and load a model with its PowerSGD hook.

The example is from PyTorch's documentation. It runs on CPU here, with gradcomp's import.
test_powersgd_checkpoint.py runs it as a script.
"""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
import torch.optim as optim
from torch.nn.parallel import DistributedDataParallel

from gradcomp.hooks import powerSGD_hook as powerSGD


class SimpleModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(24, 24)
        self.relu = nn.ReLU()
        self.fc2 = nn.Linear(24, 12)

    def forward(self, x):
        return self.fc2(self.relu(self.fc1(x)))


def setup(rank, world_size, folder):
    # initialize the process group
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)


def cleanup():
    dist.destroy_process_group()


def run_demo(demo_fn, world_size):
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(demo_fn, args=(world_size, folder), nprocs=world_size, join=True)


def demo_serialization(rank, world_size, folder):
    setup(rank, world_size, folder)

    CHECKPOINT = folder + "/checkpoint.pt"  # noqa: N806

    model = SimpleModel()
    ddp_model = DistributedDataParallel(model)

    powersgd_hook = powerSGD.powerSGD_hook
    powersgd_state = powerSGD.PowerSGDState(process_group=None)

    optimizer = optim.SGD(ddp_model.parameters(), lr=0.001)  # noqa: F841
    ddp_model.register_comm_hook(powersgd_state, powersgd_hook)

    state = {
        "state_dict": ddp_model.state_dict(),
        "comm_hook": powersgd_hook,
        "comm_hook_state": powersgd_state,
    }

    if rank == 0:
        torch.save(state, CHECKPOINT)

    dist.barrier()
    checkpoint = torch.load(CHECKPOINT)

    new_ddp_model = DistributedDataParallel(SimpleModel())
    new_ddp_model.load_state_dict(checkpoint["state_dict"])
    powersgd_hook = checkpoint["comm_hook"]
    powersgd_state = checkpoint["comm_hook_state"]

    new_ddp_model.register_comm_hook(powersgd_state, powersgd_hook)

    if rank == 0:
        os.remove(CHECKPOINT)

    cleanup()


if __name__ == "__main__":
    world_size = 2
    run_demo(demo_serialization, world_size)
