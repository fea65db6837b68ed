"""Two CPU processes train with PowerSGD, and record what compression does in every step.

python docs/examples/record.py recording.json
"""

import json
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from gradcomp import DistributedDataParallel
from gradcomp.compress import Recorder
from gradcomp.hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

WIDTH = 128


def run(rank, store, path):
    dist.init_process_group("gloo", init_method=f"file://{store}/store", rank=rank, world_size=2)
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    ddp = DistributedDataParallel(nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH)), bucket_cap_mb=0.1)
    state = PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=50)
    ddp.register_comm_hook(state, powerSGD_hook)
    recorder = Recorder(state)

    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.5, momentum=0.9)
    data = torch.Generator().manual_seed(rank)
    mix = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(7)) / WIDTH**0.5
    for _ in range(300):
        x = torch.randn(64, WIDTH, generator=data)
        optimizer.zero_grad()
        (ddp(x) - torch.tanh(x @ mix)).square().mean().backward()
        optimizer.step()
    recorder.complete()  # on every rank: computes the relative errors of the ranks' average
    if rank == 0:
        with open(path, "w") as file:
            json.dump(recorder.rows(), file)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as store:
        mp.spawn(run, args=(store, sys.argv[1] if len(sys.argv) > 1 else "recording.json"), nprocs=2)
