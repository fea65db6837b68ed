"""Train a model that FSDP2 shards over 2 ranks, in 2 replicas that compress what they exchange; resume it.

Runs on 4 CPU processes with gloo: python docs/examples/fsdp.py
"""

import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from gradcomp.compress import load_from_dcp, per_rank_state_dict
from gradcomp.fsdp import compress_replicas
from gradcomp.hooks.powerSGD_hook import PowerSGDState

WIDTH = 64


def train(rank, mesh, load_from, save_to):
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(2)]
    model = nn.Sequential(*blocks, nn.Linear(WIDTH, WIDTH))
    for block in blocks:
        fully_shard(block, mesh=mesh["shard"])
    sharded = fully_shard(model, mesh=mesh["shard"])  # a 1-D mesh: FSDP2 knows nothing of the replicas

    replicate_group = mesh["replicate"].get_group()
    state = PowerSGDState(replicate_group, matrix_approximation_rank=4, start_powerSGD_iter=10)
    compress_replicas(model, replicate_group, state)  # the replicas begin with the first one's weights
    optimizer = torch.optim.SGD(model.parameters(), lr=0.4, momentum=0.9)

    # Ranks with other shards have other states: their entry has another name.
    name = f"powersgd of shard {mesh['shard'].get_local_rank()}"
    if load_from:
        of_model, of_optimizer = get_state_dict(model, optimizer)
        dcp.load({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=load_from)
        set_state_dict(model, optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer)
        load_from_dcp(state, load_from, name)

    data = torch.randn(512, WIDTH, generator=torch.Generator().manual_seed(1))
    loss = torch.tensor(0.0)
    for step in range(state.iter, state.iter + 40):
        batch = torch.randperm(512, generator=torch.Generator().manual_seed(step))[rank::4]
        optimizer.zero_grad()
        for part, x in enumerate(data[batch].chunk(2)):
            sharded.set_requires_gradient_sync(part == 1)  # gradients accumulate: the last backward averages
            loss = nn.functional.mse_loss(model(x), x.roll(1, dims=1)) / 2
            loss.backward()
        optimizer.step()
    if rank == 0:
        rate = state.compression_stats()[0]
        print(f"step {state.iter}: loss {2 * loss.item():.4f}, compression {rate:.1f}", flush=True)

    of_model, of_optimizer = get_state_dict(model, optimizer)
    contents = {"model": of_model, "optimizer": of_optimizer, name: per_rank_state_dict(state)}
    dcp.save(contents, checkpoint_id=save_to)


def run(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=4)
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    train(rank, mesh, None, f"{folder}/first")
    train(rank, mesh, f"{folder}/first", f"{folder}/second")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, args=(folder,), nprocs=4)
