"""The defects of torch's PowerSGD and fp16 hooks: each shown to fail in torch, and not here."""

import io
import math
import pickle
import re
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as torch_default
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_powersgd
from torch.nn.parallel import DistributedDataParallel

from gradcomp.hooks import default_hooks, powerSGD_hook
from tests.distributed.powersgd_oracle import (
    Bucket,
    compressed,
    positions,
    powersgd_step,
    random_gradient,
    relative,
)
from tests.distributed.ranks import RankError, run_ranks
from tests.tolerances import ONE_STEP, WANDERED, average

ROOT = Path(__file__).parents[2]
MODULES = {"gradcomp": powerSGD_hook, "torch": torch_powersgd}
START = 2
SHAPES = ((64, 48), (7,), (40, 90), (64, 48), (3, 3))
MATRICES = compressed(SHAPES, 2)


def new_state(module, rank=2, **options):
    options = {
        "process_group": None,
        "matrix_approximation_rank": rank,
        "start_powerSGD_iter": START,
    } | options
    return module.PowerSGDState(**options)


def run_step(module, state, gradient, shapes, hook="powerSGD_hook"):
    return getattr(module, hook)(state, Bucket(gradient.clone(), shapes)).wait()


# Two and more buckets in flight.


def train_mlp(rank, name):
    torch.manual_seed(0)
    layers = [nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)]
    model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=1)
    indices = []

    def recorded(state, bucket):
        indices.append(bucket.index())
        return MODULES[name].powerSGD_hook(state, bucket)

    model.register_comm_hook(new_state(MODULES[name], 1), recorded)
    for step in range(40):
        model.zero_grad()
        x = torch.randn(4, 784, generator=torch.Generator().manual_seed(100 * rank + step))
        model(x).square().mean().backward()
    gradients = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    return max(indices) + 1, gradients.double().norm().item(), gradients[::1000].tolist()


def test_buckets_in_flight():
    """Torch issues collectives from callbacks, whose order differs between ranks: gloo aborts the process as a
    rule, and hangs now and then.
    """
    first, second = run_ranks(train_mlp, 2, "gradcomp")
    assert first == second
    assert first[0] >= 2
    assert math.isfinite(first[1])
    with pytest.raises(RankError, match=r"the process died|did not finish in time"):
        run_ranks(train_mlp, 2, "torch", timeout_s=20)


# Zero gradients.


def zeros_then_random(rank, name, factor_rank):
    module = MODULES[name]
    state = new_state(module, factor_rank)
    outputs = [
        run_step(module, state, torch.zeros(64 * 64), [(64, 64)]),
        *(run_step(module, state, torch.zeros(64 * 64), [(64, 64)]) for _ in range(START + 3)),
    ]
    later = [
        run_step(module, state, random_gradient([(64, 64)], rank, step), [(64, 64)]) for step in range(4)
    ]
    return outputs, later


@pytest.mark.parametrize("factor_rank", [1, 2])
def test_zero_gradients(factor_rank):
    """Torch divides by a column's length of zero. Here zero gradients stay zero, and later ones come through."""
    for outputs, later in run_ranks(zeros_then_random, 2, "gradcomp", factor_rank):
        assert not any(output.any() for output in outputs)
        assert all(output.isfinite().all() for output in later)
        assert all(output.any() for output in later), "gradients after zeros are lost"
    for outputs, later in run_ranks(zeros_then_random, 2, "torch", factor_rank):
        assert outputs[-1].isnan().all()
        assert later[-1].isnan().all()


# One step that is not finite.


def one_bad_step(rank, name, options, value, tensor, bad_ranks):
    """Steps, of which one has this value in this tensor on the bad ranks: (gradient, output, error, Q after)."""
    module = MODULES[name]
    state = new_state(module, **options)
    offset = sum(math.prod(shape) for shape in SHAPES[:tensor])
    results = []
    for step in range(START + 6):
        gradient = random_gradient(SHAPES, rank, step)
        if step == START + 3 and rank in bad_ranks:
            gradient[offset + 1] = value
        output = run_step(module, state, gradient, SHAPES)
        memory = None
        if name == "gradcomp" and step >= START:
            saved = state.state_dict()["buckets"][0]
            memory = (saved["error"], saved["directions"])
        results.append((gradient, output, memory))
    return results[START:]


def assert_one_bad_step(ranks, tensor):
    bad = positions(SHAPES, [tensor])
    order = compressed(SHAPES, 2)
    for step in range(6):
        outputs = [results[step][1] for results in ranks]
        assert all(torch.equal(outputs[0].nan_to_num(7), output.nan_to_num(7)) for output in outputs)
        if step == 3:
            # Visible on every rank, so that a GradScaler skips the step on every rank.
            assert not outputs[0][bad].isfinite().all()
            assert outputs[0][~bad].isfinite().all()
            if tensor in order:
                assert not outputs[0][bad].isfinite().any()
        else:
            assert all(output.isfinite().all() for output in outputs)
        if step == 0:
            continue
        gradients = [results[step][0] for results in ranks]
        errors = [results[step - 1][2][0] for results in ranks]
        assert all(error.isfinite().all() for error in errors)
        if step == 4 and tensor in order:
            assert not any(error[bad].any() for error in errors), "starts afresh: no error"
        expected = powersgd_step(
            SHAPES,
            [gradient.nan_to_num(0, 0, 0) for gradient in gradients],
            errors,
            ranks[0][step - 1][2][1],
            order,
        )
        good = ~bad if step == 3 else torch.ones_like(bad)
        assert relative(outputs[0][good], expected.output[good]) <= ONE_STEP


OPTIONS = [{}, {"use_error_feedback": False}, {"warm_start": False}, {"orthogonalization_epsilon": 1e-8}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_bad_step_is_forgotten(options):
    """Not finite on every rank in that step, whoever had it; right in the next. In a matrix, in a vector."""
    for value, bad_ranks in [(math.inf, [0, 1]), (-math.inf, [1]), (math.nan, [0])]:
        for tensor in (0, 1, 3):
            ranks = run_ranks(one_bad_step, 2, "gradcomp", options, value, tensor, bad_ranks)
            assert_one_bad_step(ranks, tensor)


@pytest.mark.parametrize("rank", [1, 2, 4])
@pytest.mark.parametrize("error_feedback", [True, False])
def test_a_bad_step_poisons_torchs_state(rank, error_feedback):
    options = {"rank": rank, "use_error_feedback": error_feedback}
    for results in run_ranks(one_bad_step, 2, "torch", options, math.inf, 0, [0, 1]):
        bad = positions(SHAPES, [0])
        finite = [bool(output[bad].isfinite().all()) for _, output, _ in results]
        assert finite == [True, True, True, False, False, False]


# The batched hook.


def batched_steps(rank, name):
    state = new_state(MODULES[name])
    for step in range(START):
        run_step(MODULES[name], state, random_gradient(SHAPES, rank, step), SHAPES, "batched_powerSGD_hook")
    gradient = random_gradient(SHAPES, rank, START)
    if name == "torch":
        with pytest.raises(AssertionError):
            run_step(torch_powersgd, state, gradient, SHAPES, "batched_powerSGD_hook")
        return None
    output = run_step(powerSGD_hook, state, gradient, SHAPES, "batched_powerSGD_hook")
    return gradient, output, state.state_dict()["buckets"][0]["error"]


def test_the_batched_hook():
    """Torch's raises AssertionError on its first compressed step."""
    assert run_ranks(batched_steps, 1, "torch") == [None]
    ranks = run_ranks(batched_steps, 2, "gradcomp")
    mean = torch.stack([gradient.double() for gradient, _, _ in ranks]).mean(0)
    errors = torch.stack([error.double() for _, _, error in ranks]).mean(0)
    assert torch.equal(ranks[0][1], ranks[1][1])
    assert ranks[0][1].any()
    assert relative(ranks[0][1].double() + errors, mean) <= ONE_STEP


# Checkpoints.


def save_and_load(rank, name):
    module = MODULES[name]
    state = new_state(module)
    for step in range(START + 2):
        run_step(module, state, random_gradient(SHAPES, rank, step), SHAPES)
    file = io.BytesIO()
    torch.save({"comm_hook": module.powerSGD_hook, "comm_hook_state": state}, file)
    file.seek(0)
    if name == "torch":
        with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
            torch.load(file)
        return None
    loaded = torch.load(file)
    assert loaded["comm_hook"] is powerSGD_hook.powerSGD_hook
    return [
        run_step(powerSGD_hook, each, random_gradient(SHAPES, rank, 99), SHAPES)
        for each in (state, loaded["comm_hook_state"])
    ]


def test_checkpoints_load_under_the_safe_default():
    """Torch's own state is refused by torch.load, as its documentation uses it."""
    assert run_ranks(save_and_load, 1, "torch") == [None]
    for original, loaded in run_ranks(save_and_load, 2, "gradcomp"):
        assert torch.equal(original, loaded)


# Collectives.


@contextmanager
def counted_all_reduces():
    original, counted = dist.all_reduce, []

    def counting(tensor, *arguments, **options):
        counted.append(tensor.numel())
        return original(tensor, *arguments, **options)

    dist.all_reduce = counting
    try:
        yield counted
    finally:
        dist.all_reduce = original


def count_collectives(rank, name, hook, shapes, factor_rank):
    """How many elements each all-reduce of one compressed step carries."""
    module = MODULES[name]
    state = new_state(module, factor_rank)
    for step in range(START + 1):
        run_step(module, state, random_gradient(shapes, rank, step), shapes, hook)
    with counted_all_reduces() as counted:
        run_step(module, state, random_gradient(shapes, rank, 99), shapes, hook)
    return counted


def test_two_collectives_per_bucket():
    """Torch has three: P, Q and the tensors that are not compressed. Those ride with P here."""
    rest, p, q = 7 + 9, 2 * (64 + 40 + 64), 2 * (48 + 90 + 48)
    assert len(MATRICES) == 3
    for counted in run_ranks(count_collectives, 2, "gradcomp", "powerSGD_hook", SHAPES, 2):
        assert counted == [p + rest, q]
    for counted in run_ranks(count_collectives, 2, "torch", "powerSGD_hook", SHAPES, 2):
        assert counted == [rest, p, q]


@pytest.mark.parametrize("factor_rank", [1, 4, 32])
@pytest.mark.parametrize("num_matrices", [1, 8, 60])
def test_two_collectives_whatever_the_bucket(num_matrices, factor_rank):
    shapes = [(160, 150)] * num_matrices + [(11,)]
    for hook in ("powerSGD_hook", "batched_powerSGD_hook"):
        (counted,) = run_ranks(count_collectives, 1, "gradcomp", hook, shapes, factor_rank)
        assert len(counted) == 2
    (alone,) = run_ranks(count_collectives, 1, "gradcomp", "powerSGD_hook", [(11,), (3, 3)], factor_rank)
    assert alone == [20]


# Error feedback for tensors that are not compressed.


def errors_of_a_vector(rank, name):
    """After 200 steps: the rms of the error of a vector, and the largest deviation of its outputs."""
    module = MODULES[name]
    state, shapes = new_state(module), [(500,), (64, 48)]
    outputs = []
    for step in range(START + 200):
        gradient = random_gradient(shapes, rank, step)
        outputs.append((gradient[:500].clone(), run_step(module, state, gradient, shapes)[:500].clone()))
    error = state.error_dict[0] if name == "torch" else state.state_dict()["buckets"][0]["error"]
    return error[:500].square().mean().sqrt().item(), outputs


def test_tensors_not_compressed_have_no_error():
    """Torch remembers local − mean for them, which walks at random. Here they are averaged, every time."""
    for wandered, _ in run_ranks(errors_of_a_vector, 2, "torch"):
        assert wandered > WANDERED
    ranks = run_ranks(errors_of_a_vector, 2, "gradcomp")
    for wandered, outputs in ranks:
        assert wandered == 0
        for step in range(START + 200):
            locals_ = torch.stack([ours[step][0].double() for _, ours in ranks])
            bound = average(torch.float32, 2, locals_.abs().amax(0))
            assert ((outputs[step][1] - locals_.mean(0)).abs() <= bound).all()


# fp16.


def large_gradients(rank, name):
    """Gradients of 40,000 on two ranks: their sum overflows float16, their mean does not."""
    module = MODULES[name]
    wrapper = {"gradcomp": default_hooks, "torch": torch_default}[name].fp16_compress_wrapper
    state, shapes = new_state(module, 1), [(48, 48), (5,)]
    gradient = torch.cat([torch.outer(torch.ones(48), torch.ones(48)).flatten() * 2.0, torch.full((5,), 4e4)])
    for _ in range(START):
        run_step(module, state, torch.zeros_like(gradient), shapes)
    return wrapper(module.powerSGD_hook)(state, Bucket(gradient.clone(), shapes)).wait()


def test_fp16_divides_before_it_rounds():
    for output in run_ranks(large_gradients, 2, "torch"):
        assert output[-5:].isinf().all()
    for output in run_ranks(large_gradients, 2, "gradcomp"):
        assert output[-5:].tolist() == [40_000.0] * 5
        assert output.isfinite().all()


def overflow_once(rank, name):
    """A step whose gradient overflows float16 on rank 1, and steps after it."""
    wrapper = {"gradcomp": default_hooks, "torch": torch_default}[name].fp16_compress_wrapper
    hook, state, outputs = wrapper(MODULES[name].powerSGD_hook), new_state(MODULES[name]), []
    for step in range(START + 6):
        gradient = random_gradient(SHAPES, rank, step)
        if step == START + 3 and rank == 1:
            gradient *= 1e6
        outputs.append(hook(state, Bucket(gradient, SHAPES)).wait())
    return outputs[START:]


def test_a_step_that_overflows_fp16_is_forgotten():
    """As when a GradScaler looks for its scale: not finite on every rank, then as if it had not been."""
    first, second = run_ranks(overflow_once, 2, "gradcomp")
    for mine, theirs in zip(first, second, strict=True):
        assert torch.equal(mine.nan_to_num(7), theirs.nan_to_num(7))
    assert [bool(output.isfinite().all()) for output in first] == [True, True, True, False, True, True]
    for outputs in run_ranks(overflow_once, 2, "torch"):
        assert not outputs[-1].isfinite().all()


# Host synchronisation.


def sources():
    """All that runs in a training step."""
    testing = ROOT / "gradcomp" / "testing"
    package = [path for path in (ROOT / "gradcomp").rglob("*.py") if testing not in path.parents]
    return [*package, *(ROOT / "kernels").rglob("*.py")]


def test_no_host_synchronisation():
    """Torch waits for the whole device in every bucket. Here nothing in the library may. Plain torch for CPU tensors
    may ask a tensor for its value; so may the Reducer and the wrapper, where the host has to know what other ranks did, and
    the comparison of options in a state's first step.
    """
    device_wide = re.compile(r"cuda\.synchronize|[eE]vent\w*\.synchronize|stream\w*\.synchronize")
    waits = re.compile(r"\.item\(\)|\.tolist\(\)|\.nonzero\(\)")
    assert device_wide.search(Path(torch_powersgd.__file__).read_text())
    assert len(sources()) > 10
    for path in sources():
        text = path.read_text()
        assert not device_wide.search(text), f"{path} waits for the device"
        if path.name in ("consistency.py", "rules.py"):  # the latter asks numpy's scalars
            continue
        if path.parent.name in ("compress", "hooks", "kernels", "layout") or path.name == "ops.py":
            assert not waits.search(text), f"{path} waits for a value"
