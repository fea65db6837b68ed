"""Two CPU processes train with 4-bit gradients; Weights & Biases records what compression does.

Needs wandb. Nothing leaves this machine, unless WANDB_MODE=online is set; `wandb sync` uploads it later.

python docs/examples/wandb_offline.py [FOLDER]
"""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import wandb
from torch import nn

from gradcomp import DistributedDataParallel
from gradcomp.compress import Recorder
from gradcomp.hooks.quantization_hooks import QuantizationState, quantization_hook


def train(rank, recorder, ddp, log):
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(rank)
    for step in range(60):
        x = torch.randn(16, 64, generator=data)
        optimizer.zero_grad()
        (ddp(x) - x).square().mean().backward()
        optimizer.step()
        if step % 20 == 19:
            recorder.complete()  # on every rank: the relative errors are those of all ranks' average
            if rank == 0:
                recorder.flush(log)


def run(rank, store, folder):
    dist.init_process_group("gloo", init_method=f"file://{store}/store", rank=rank, world_size=2)
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)))
    state = QuantizationState(bits=4)
    ddp.register_comm_hook(state, quantization_hook)
    recorder = Recorder(state)
    if rank == 0:
        os.environ.setdefault("WANDB_MODE", "offline")
        with wandb.init(project="gradcomp", dir=folder) as logged:
            train(rank, recorder, ddp, lambda step, values: logged.log(values, step=step))
    else:
        train(rank, recorder, ddp, None)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as store:
        mp.spawn(run, args=(store, sys.argv[1] if len(sys.argv) > 1 else "."), nprocs=2)
