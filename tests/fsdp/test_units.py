"""Test that errors have the gradients' own unit, whatever FSDP2 divides gradients by, and when."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from gradcomp.compress import consolidated_state_dict
from gradcomp.fsdp import compress_reduce_scatter, compress_replicas
from gradcomp.fsdp.param_groups import param_groups_of
from gradcomp.hooks.quantization_hooks import QuantizationState, quantization_hook
from tests.fsdp.models import RANKS, Terms, by_parameter, new_grid
from tests.reducer.models import run_cases
from tests.training import power_sgd

SHAPES = ((48, 32), (48,))
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# In the averages of ten steps, elements of about 0.5: ten roundings, in fp16 and bf16 of sums over ranks.
TOLERANCES = {"fp32": 1e-5, "bf16": 0.03, "fp16": 0.006}
# In fp16, torch divides by 4, 1 and 8 of these before the reduction.
FACTORS = (6.0, 1.0, 64.0)


def whole(number):
    """Return the gradients of all ranks in a step."""
    generator = torch.Generator().manual_seed(number)
    return [[torch.randn(shape, generator=generator) for shape in SHAPES] for _ in range(RANKS)]


def int4(group=None):
    return QuantizationState(group, bits=4, block_size=16)


def sharded(mesh, dtype):
    policy = MixedPrecisionPolicy(reduce_dtype=DTYPES[dtype])
    return fully_shard(Terms(*SHAPES), mesh=mesh, mp_policy=policy)


def backward(model, gradients):
    model.zero_grad()
    model(torch.zeros((), requires_grad=True), gradients).backward()


def mean_over(group, tensor):
    tensor = tensor.double()
    dist.all_reduce(tensor, group=group)
    return tensor / dist.get_world_size(group)


def add_up(rank, form, dtype, factors, make_state):
    """Take steps, each with a divide factor. Returns the largest |Σ averages + mean error − Σ means| of a
    matrix, and the largest mean error.
    """
    grid = new_grid(1, RANKS) if form == "shards" else new_grid()
    model = sharded(grid.mesh if form == "shards of HSDP" else grid.shards, dtype)
    weight = model.terms[0]
    states = []
    if "shards" in form:
        states.append((int4(), grid.shards.get_group()))
        compress_reduce_scatter(model, states[0][0])
    if "replicas" in form:
        states.append((make_state(grid.replicas), grid.replicas))
        compress_replicas(model, grid.replicas, states[-1][0])
    left = torch.zeros(SHAPES[0], dtype=torch.float64)
    for number in range(10):
        factor = factors[number % len(factors)]
        if factor is not None:
            model.set_force_sum_reduction_for_comms(True)  # else gloo lacks the reduction
            model.set_gradient_divide_factor(factor)
        gradients = whole(number)
        backward(model, gradients[rank])
        left += sum(each[0].double() for each in gradients) / RANKS
        left -= weight.grad.full_tensor().double() * ((factor or RANKS) / RANKS)
    error = torch.zeros_like(left)
    for state, group in states:
        own = by_parameter(state)["terms.0"]
        if own.shape == left.shape:
            error += mean_over(None, own)
        else:  # this rank's rows
            rows = own.shape[0] * grid.shard_rank
            error[rows : rows + len(own)] += mean_over(group, own)
            only = torch.zeros_like(error)
            only[rows : rows + len(own)] = 1.0
            left, error = left * only, error * only
    return (left - error).abs().max().item(), error.abs().max().item()


POWER_SGD = partial(power_sgd, min_compression_rate=1)
CASES = [
    *(("shards", dtype, (None,), int4) for dtype in DTYPES),
    ("shards", "fp16", FACTORS, int4),
    ("shards", "fp32", FACTORS, int4),
    ("shards of HSDP", "fp16", (6.0,), int4),
    *(("replicas", dtype, (None,), int4) for dtype in DTYPES),
    ("replicas", "fp16", FACTORS, POWER_SGD),
    ("replicas", "fp32", FACTORS, int4),
    ("shards and replicas", "fp32", (None,), POWER_SGD),
    ("shards and replicas", "fp16", FACTORS, int4),
]


def test_averages_and_mean_errors_add_up_to_mean_gradients(run_ranks):
    for results in run_ranks(run_cases, RANKS, add_up, CASES, timeout_s=240):
        for case, (lost, error) in zip(CASES, results, strict=True):
            assert error > 0.05, case
            assert lost < TOLERANCES[case[1]], (case, lost, error)


def resume(rank):
    """Go on with DDP's errors on 2 shards in fp16, then on 4 with other divisors; all gradients are zero.

    Returns what is lost of the mean error and of what came out, after every run.
    """
    torch.manual_seed(0)
    model = Terms(*SHAPES)
    state = int4()
    state.number_parameters(model.named_parameters())
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(state, quantization_hook)
    backward(ddp, whole(0)[rank])
    left = [mean_over(None, by_parameter(state)["terms.0"])]
    saved = consolidated_state_dict(state)
    for ranks, dtype, factor in ((2, "fp16", None), (4, "fp16", 6.0), (4, "fp32", None), (4, "fp16", 1.0)):
        mesh = DeviceMesh("cpu", list(range(ranks)))
        contents = [None, None]
        if rank < ranks:
            model, state = sharded(mesh, dtype), int4()
            compress_reduce_scatter(model, state)
            state.load_state_dict(saved)
            if factor is not None:
                model.set_gradient_divide_factor(factor)
            backward(model, [0 * each for each in whole(0)[0]])
            out = model.terms[0].grad.full_tensor().double() * ((factor or ranks) / ranks)
            error = mean_over(mesh.get_group(), by_parameter(state)["terms.0"])
            contents = [consolidated_state_dict(state), (out, error)]
        dist.broadcast_object_list(contents, src=0)
        saved, (out, error) = contents
        left.append(out + error)
        left.append(error)
    return [
        (one - other).abs().max().item() for one, other in zip(left[::2], left[1::2], strict=False)
    ], left[0]


def units(rank):
    """Return a model's units in every dtype; and with a factor, which gloo lacks, in fp32 and in fp16."""
    model = sharded(new_grid().shards, "fp32")
    (group,) = param_groups_of(model)
    found = [group.units(dtype) for dtype in DTYPES.values()]
    model.set_gradient_divide_factor(3.0)
    grid = init_device_mesh("cpu", (RANKS, 1), mesh_dim_names=("replicas", "shards"))
    alone = sharded(grid["shards"], "fp32")
    compress_reduce_scatter(alone, int4())
    alone.set_gradient_divide_factor(4.0)
    backward(alone, whole(0)[rank])
    assert torch.equal(4 * alone.terms[0].grad.full_tensor(), whole(0)[rank][0])
    return [*found, group.units(torch.float32), group.units(torch.float16)]


def resume_and_ask(rank):
    return *resume(rank), units(rank)


def test_errors_go_on_from_ddp_and_between_numbers_of_ranks(run_ranks):
    for lost, first, found in run_ranks(resume_and_ask, RANKS):
        assert first.abs().max() > 0.05
        assert len(lost) == 4
        assert max(lost) < 0.001, lost
        assert found == [(1, 1), (1, 1), (0.5, 1), (1, pytest.approx(2 / 3)), (0.5, 1)]
