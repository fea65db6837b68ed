"""Models for tests of gradcomp.fsdp, on a grid of replicas × shards that are ranks on gloo."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from gradcomp.compress import Compressor

RANKS = 4  # 2 replicas × 2 shards
START = 2  # the first step in which given_gradients leaves some out


class Exact(Compressor):
    """A compressor that loses nothing."""

    def __init__(self, bucket, options):
        self.sent_numel = sum(bucket.numels)

    def average(self, flat, group, seed):
        flat /= group.size()
        dist.all_reduce(flat, group=group)

    def state(self):
        return {}

    def load(self, state):
        pass


class Net(nn.Module):
    """Layers of awkward sizes: some last shards are shorter or empty.

    checkpointing: None, "reentrant" or "non-reentrant", how the layers' activations are recomputed.
    """

    def __init__(self, checkpointing=None):
        super().__init__()
        self.embed = nn.Linear(12, 33)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(33, 7), nn.Tanh(), nn.Linear(7, 33)) for _ in range(3)
        )
        self.spare = nn.Parameter(torch.ones(33))
        self.head = nn.Linear(33, 1)
        self.checkpointing = checkpointing

    def forward(self, x, skip=(), use_spare=False):
        x = self.embed(x)
        for index, layer in enumerate(self.layers):
            if index in skip:
                continue
            if self.checkpointing is not None:
                x = x + checkpoint(layer, x, use_reentrant=self.checkpointing == "reentrant")
            else:
                x = x + layer(x)
        return self.head(x * self.spare if use_spare else x)


@dataclass
class Grid:
    """This rank's place among replicas × shards."""

    mesh: DeviceMesh

    @property
    def shards(self):
        return self.mesh["shard"]

    @property
    def replicas(self):
        return self.mesh["replicate"].get_group()

    @property
    def shard_rank(self):
        return self.mesh["shard"].get_local_rank()


def new_grid(num_replicas=2, num_shards=2, device_type="cpu"):
    names, options = ("replicate", "shard"), {}
    if device_type != "cpu":  # a mesh of GPUs may choose NCCL for a group on gloo
        options["backend_override"] = dict.fromkeys(names, dist.get_backend())
    return Grid(init_device_mesh(device_type, (num_replicas, num_shards), mesh_dim_names=names, **options))


def sharded(mesh, model=None, **options):
    """Shard a model (a new Net by default), each layer by itself. options: fully_shard's options."""
    model = Net() if model is None else model
    for layer in (model.embed, *model.layers):
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def over_two_meshes(grid):
    """Shard a module over other ranks than the rest, as experts are."""
    model = Net()
    fully_shard(model.embed, mesh=grid.mesh["replicate"])
    return fully_shard(model, mesh=grid.shards)


def batch_of(rank, step):
    return torch.randn(4, 12, generator=torch.Generator().manual_seed(100 * step + rank))


def local(tensor):
    """Return this rank's part of a DTensor, as a copy."""
    return tensor.detach().to_local().clone()


def gradients(model):
    """Return this rank's part of every gradient; None for parameters without a gradient."""
    return [None if each.grad is None else local(each.grad) for each in model.parameters()]


def weights(model):
    return [local(each) for each in model.parameters()]


class Terms(nn.Module):
    """A module whose gradients are its inputs: its output is a sum of products with them."""

    def __init__(self, *shapes):
        super().__init__()
        self.terms = nn.ParameterList(torch.zeros(shape) for shape in shapes)

    def forward(self, total, given):
        for term, gradient in zip(self.terms, given, strict=True):
            if gradient is not None:
                total = total + (term * gradient).sum()
        return total


class Sum(nn.Module):
    """Three layers of terms, then terms of its own."""

    SHAPES = ((33, 7), (33,), (16, 20))

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Terms(*self.SHAPES) for _ in range(3))
        self.own = Terms(*self.SHAPES)
        self.embed = nn.Identity()  # what sharded() expects

    def forward(self, given):
        # On the CPU, backward of the first layer would run beside the GPU's, in another thread.
        total = torch.zeros((), requires_grad=True, device=self.own.terms[0].device)
        for layer, gradients_of_layer in zip((*self.layers, self.own), given, strict=True):
            if any(each is not None for each in gradients_of_layer):
                total = layer(total, gradients_of_layer)
        return total


def given_gradients(rank, number):
    """Return gradients by layer and parameter. From step START on some are None, others in every step."""
    generator = torch.Generator().manual_seed(100 * number + rank)
    given = [[torch.randn(shape, generator=generator) for shape in Sum.SHAPES] for _ in range(4)]
    if number >= START:
        given[number % 4] = [None] * 3
        given[(number + 1) % 4][number % 3] = None
    return given


def by_parameter(state):
    """Return the state's errors by the name of the parameter."""
    return {name: entry["error"] for name, entry in state.state.items() if "error" in entry}
