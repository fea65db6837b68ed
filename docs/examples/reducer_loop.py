"""A training loop of your own with gradcomp's Reducer.

torchrun --nproc-per-node 2 docs/examples/reducer_loop.py
"""

import gc

import torch
import torch.distributed as dist

from gradcomp import Reducer
from gradcomp.hooks import powerSGD_hook as powerSGD


def train(rank):
    torch.manual_seed(0)  # the same weights on every rank: the Reducer averages gradients, nothing else
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64))
    reducer = Reducer(model.named_parameters(), gradient_as_bucket_view=True)
    state = powerSGD.PowerSGDState(process_group=None, matrix_approximation_rank=4, start_powerSGD_iter=10)
    reducer.register_comm_hook(state, powerSGD.powerSGD_hook)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(rank)
    for _ in range(50):
        optimizer.zero_grad(set_to_none=False)  # the gradients stay views of the buckets
        with reducer.no_sync():  # half of the step's inputs: gradients accumulate
            x = torch.randn(16, 64, generator=data)
            (model(x) - x).square().mean().backward()
        x = torch.randn(16, 64, generator=data)
        loss = (model(x) - x).square().mean()
        loss.backward()  # averaged when this returns
        optimizer.step()
    if rank == 0:
        print(f"loss {loss.item():.3f}, compression rate {state.compression_stats()[0]:.1f}")


def main():
    dist.init_process_group("gloo")
    train(dist.get_rank())
    dist.barrier()  # no rank leaves while another may still talk to it
    gc.collect()  # torch's first optimizer may leave train()'s reducer, which holds the group, in a cycle
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
