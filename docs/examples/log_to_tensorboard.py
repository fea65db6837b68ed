"""Two CPU processes train with PowerSGD, and TensorBoard shows what compression does. Needs tensorboard.

python docs/examples/log_to_tensorboard.py [FOLDER]
tensorboard --logdir FOLDER
"""

import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.utils.tensorboard import SummaryWriter

from gradcomp import DistributedDataParallel
from gradcomp.compress import Recorder
from gradcomp.hooks.powerSGD_hook import PowerSGDState, powerSGD_hook


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
    state = PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=10)
    ddp.register_comm_hook(state, powerSGD_hook)
    recorder = Recorder(state)
    if rank == 0:
        with SummaryWriter(folder) as writer:

            def log(step, values):
                for name, value in values.items():
                    writer.add_scalar(name, value, step)

            train(rank, recorder, ddp, log)
    else:
        train(rank, recorder, ddp, None)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as store:
        mp.spawn(run, args=(store, sys.argv[1] if len(sys.argv) > 1 else "runs"), nprocs=2)
