"""Train with PowerSGD and ZeroRedundancyOptimizer, whose state is divided among the ranks; then resume.

torchrun --nproc-per-node 2 docs/examples/zero_redundancy.py folder
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from gradcomp.compress import consolidated_state_dict
from gradcomp.hooks.powerSGD_hook import PowerSGDState, powerSGD_hook


def train(path, resume):
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
    state = PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=4)
    state.number_parameters(model.named_parameters())
    model.register_comm_hook(state, powerSGD_hook)
    if resume:
        checkpoint = torch.load(path, map_location="cpu")
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        state.load_state_dict(checkpoint["powersgd"])

    losses = []
    for step in range(state.iter, state.iter + 50):
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))
        loss = nn.functional.mse_loss(model(x), x.roll(1, dims=1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    powersgd = consolidated_state_dict(state)  # on every rank
    optimizer.consolidate_state_dict()  # on every rank, to rank 0
    if dist.get_rank() == 0:
        rate = state.compression_stats()[0]
        print(f"step {state.iter}: loss {losses[0]:.3f} to {losses[-1]:.3f}, {rate:.1f} times fewer bytes")
        contents = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "powersgd": powersgd}
        torch.save(contents, path)
    dist.barrier()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train(f"{sys.argv[1]}/run.pt", resume=False)
    train(f"{sys.argv[1]}/run.pt", resume=True)
    dist.destroy_process_group()
