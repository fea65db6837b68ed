"""Compare compress_replicas with torch's own averaging over replicas, HSDP, where nothing is lost."""

from functools import partial
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from gradcomp.comm.exchange import has_delay
from gradcomp.compress import CompressorState
from gradcomp.fsdp import compress_replicas, replicas
from gradcomp.fsdp.replicas import AllReduceHook
from gradcomp.hooks.powerSGD_hook import PowerSGDState
from tests.depth import mixed
from tests.fsdp.models import RANKS, Exact, local, new_grid, sharded
from tests.fsdp.scenarios import SCENARIOS, STEPS, differences, step
from tests.reducer.models import run_cases
from tests.tolerances import UNIT_ROUNDOFF

STATES = {
    "no state": lambda group: None,
    "exact compressor": lambda group: CompressorState(Exact),
    "plain steps": lambda group: PowerSGDState(group, start_powerSGD_iter=100),
}


# In fp16, torch divides by the number of ranks partly before the sums and partly after them. gradcomp
# divides by the number of replicas in between.
HSDP = {"reduced in fp16": UNIT_ROUNDOFF[torch.float16]}


def compare(rank, name, state_name):
    """Train with HSDP and with compress_replicas; return the largest difference and the state's steps."""
    grid = new_grid()
    make, run_step = SCENARIOS[name]
    models = []
    for mesh in (grid.mesh, grid.shards):
        torch.manual_seed(0)
        models.append(make(mesh))
    state = STATES[state_name](grid.replicas)
    compress_replicas(models[1], grid.replicas, state)
    return max(differences(models, partial(run_step, rank=rank))), state and state.iter


def test_it_equals_hsdp(run_ranks):
    cases = mixed(list(SCENARIOS), list(STATES))
    for results in run_ranks(run_cases, RANKS, compare, cases, timeout_s=240):
        for case, (worst, num_steps) in zip(cases, results, strict=True):
            assert worst <= HSDP.get(case[0], 1e-6), case
            assert num_steps in (None, STEPS), case


class WithBuffers(nn.Module):
    """Parameters and buffers in many dtypes, some with strides."""

    def __init__(self, value):
        super().__init__()
        self.weight = nn.Parameter(torch.full((5, 3), float(value)))
        self.ignored = nn.Parameter(torch.full((2,), float(value)))
        self.register_buffer("flag", torch.tensor(value > 0))
        self.register_buffer("count", torch.tensor([value]))
        self.register_buffer("strided", torch.full((4, 6), float(value), dtype=torch.complex64).t()[::2])
        self.register_buffer("narrow", torch.full((3,), float(value), dtype=torch.bfloat16))
        self.register_buffer("empty", torch.empty(0))


def first_weights(rank):
    grid = new_grid()
    model = WithBuffers(rank)
    fully_shard(model, mesh=grid.shards, ignored_params={model.ignored})
    compress_replicas(model, grid.replicas)
    return [local(model.weight), *(each.detach() for each in (model.ignored, *model.buffers()))]


def test_the_replicas_begin_with_the_first_ones_weights(run_ranks):
    for rank, values in enumerate(run_ranks(first_weights, RANKS)):
        of_rank = rank % 2  # the rank of the first replica with the same shard
        for value in values:
            assert torch.equal(value, torch.full_like(value, of_rank))


def weights_after_a_forward(rank):
    grid = new_grid()
    model = WithBuffers(rank)
    model.forward = lambda x: x @ model.weight.t()
    fully_shard(model, mesh=grid.shards, reshard_after_forward=False)
    with torch.no_grad():
        model(torch.ones(1, 3))  # leaves the whole weight in place
    compress_replicas(model, grid.replicas)
    model.reshard()  # frees the whole weight
    with torch.no_grad():
        return model(torch.ones(1, 3)).flatten().tolist()


def test_the_weights_are_exchanged_after_a_forward_too(run_ranks):
    for values in run_ranks(weights_after_a_forward, RANKS):
        assert values == [0.0] * 3 + [3.0] * 2


def elements_between_replicas(rank):
    """Return the numel of each all-reduce between replicas in one step, and of each padded shard."""
    grid = new_grid()
    has_delay(torch.zeros(1), grid.replicas)  # the first average agrees on it
    model, sizes = sharded(grid.shards), []
    compress_replicas(model, grid.replicas)
    all_reduce = dist.ProcessGroup.allreduce

    def counting(group, tensors, *arguments):
        if group is grid.replicas:
            sizes.append(tensors[0].numel())
        return all_reduce(group, tensors, *arguments)

    dist.ProcessGroup.allreduce = counting
    step(model, rank, 0)
    used = [each for each in model.parameters() if each.grad is not None]
    return sizes, [-(-each.shape[0] // 2) * each.shape[1:].numel() for each in used]


def test_only_shards_cross_between_replicas(run_ranks):
    for sizes, padded in run_ranks(elements_between_replicas, RANKS):
        assert len(sizes) == 5  # one per FSDP module
        assert sum(sizes) == sum(padded)


def test_a_reduced_tensor_is_not_freed_before_it_is_averaged(monkeypatch):
    """The tensor belongs to the reduce-scatter's stream, but the hook uses it on the all-reduce stream."""
    monkeypatch.setattr(replicas, "has_streams", lambda device: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "the all-reduce stream")
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: log.append((tensor, stream)))
    log, output, parameter = [], torch.ones(3), torch.empty(3, device="meta")
    group = SimpleNamespace(
        reduced=lambda output: [parameter],
        units=lambda dtype: (1.0, 1.0),
        shard_group=object(),
        averages_now=True,
        divide_factor=None,
        shards=[parameter],
    )
    averaging = SimpleNamespace(average=lambda bucket, shard_group: log.append("averaged"))
    AllReduceHook(0, group, averaging)(output)
    first, (recorded, stream) = log
    assert (first, stream) == ("averaged", "the all-reduce stream")
    assert recorded is output
