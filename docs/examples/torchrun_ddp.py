"""Train with DistributedDataParallel, gradients in 4 bits; a second call continues from the first one's file.

torchrun --nproc-per-node 2 docs/examples/torchrun_ddp.py checkpoint.pt
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradcomp.compress import consolidated_state_dict
from gradcomp.hooks.quantization_hooks import QuantizationState, quantization_hook


def main(path):
    dist.init_process_group("gloo")  # "nccl" on GPUs
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = QuantizationState(bits=4)
    state.number_parameters(model.named_parameters())
    model.register_comm_hook(state, quantization_hook)

    if path.exists():  # before the first step; the same file on every rank
        checkpoint = torch.load(path, map_location="cpu")
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        state.load_state_dict(checkpoint["compression"])

    losses = []
    for step in range(state.iter, state.iter + 50):
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))
        loss = nn.functional.mse_loss(model(x), x.roll(1, dims=1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    compression = consolidated_state_dict(state)  # on every rank: the file has the mean of their errors
    if dist.get_rank() == 0:
        rate = state.compression_stats()[0]
        print(f"step {state.iter}: loss {losses[0]:.3f} to {losses[-1]:.3f}, {rate:.1f} times fewer bytes")
        contents = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "compression": compression,
        }
        torch.save(contents, path)
    dist.barrier()
    del model  # torch's DDP may hang if it is freed after its group
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
