"""Two processes train a linear layer: the example of PyTorch's note on DDP, with gradcomp's import, on CPU.

python docs/examples/data_parallel.py
"""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
import torch.optim as optim

from gradcomp import DistributedDataParallel as DDP  # noqa: N817


def example(rank, world_size, folder):
    # create default process group
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    # create local model
    model = nn.Linear(10, 10)
    # construct DDP model
    ddp_model = DDP(model)
    # define loss function and optimizer
    loss_fn = nn.MSELoss()
    optimizer = optim.SGD(ddp_model.parameters(), lr=0.001)

    # forward pass
    outputs = ddp_model(torch.randn(20, 10))
    labels = torch.randn(20, 10)
    # backward pass
    loss_fn(outputs, labels).backward()
    # update parameters
    optimizer.step()

    # no rank leaves while another may still talk to it
    dist.barrier()
    dist.destroy_process_group()


def main():
    world_size = 2
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(example, args=(world_size, folder), nprocs=world_size, join=True)


if __name__ == "__main__":
    main()
