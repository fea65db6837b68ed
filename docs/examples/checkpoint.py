"""Train with PowerSGD on two ranks, save one file for all, and continue from it on one.

Runs on CPU processes with gloo: python docs/examples/checkpoint.py
"""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradcomp.hooks import powerSGD_hook as powerSGD


def train(rank, world_size, folder, resume):
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store-{world_size}", rank=rank, world_size=world_size
    )
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = powerSGD.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=10)
    state.number_parameters(model.named_parameters())
    model.register_comm_hook(state, powerSGD.powerSGD_hook)

    if resume:
        # Before the model's first step. The file is the same on all ranks, whatever their number.
        checkpoint = torch.load(f"{folder}/checkpoint.pt", map_location="cpu")
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        state.load_state_dict(checkpoint["powersgd"])

    data = torch.randn(512, 64, generator=torch.Generator().manual_seed(1))
    target = data.roll(1, dims=1)
    for step in range(state.iter, state.iter + 100):
        batch = torch.randperm(512, generator=torch.Generator().manual_seed(step))[rank::world_size]
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(data[batch]), target[batch])
        loss.backward()
        optimizer.step()

    # On every rank: PowerSGD's errors differ between ranks, and the file has their mean.
    powersgd = powerSGD.consolidated_state_dict(state)
    if rank == 0:
        rate = state.compression_stats()[0]
        print(
            f"world size {world_size}, step {state.iter}: loss {loss.item():.4f}, compression {rate:.1f}",
            flush=True,
        )
        checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "powersgd": powersgd}
        torch.save(checkpoint, f"{folder}/checkpoint.pt")
    dist.barrier()
    del model  # torch's DDP may hang if it is freed after its group
    dist.destroy_process_group()


def run(rank, folder):
    train(rank, 2, folder, resume=False)
    if rank == 0:
        train(rank, 1, folder, resume=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, args=(folder,), nprocs=2)
