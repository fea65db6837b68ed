"""Test steps that are refused after their backward: undo_step makes a run equal to one without them."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import gradcomp
from gradcomp.comm.bucket import GradBucket
from gradcomp.compress import Compressor, CompressorState, Recorder
from gradcomp.fsdp import compress_reduce_scatter
from gradcomp.hooks import AutoState, QuantizationState, auto_hook, quantization_hook
from gradcomp.hooks.default_hooks import bf16_compress_wrapper
from gradcomp.hooks.powerSGD_hook import batched_powerSGD_hook, powerSGD_hook
from gradcomp.testing import run_ranks as run_simulated
from tests.kept import entries_in
from tests.training import Averaged, power_sgd

SHAPES = [(12, 20), (9,), (21, 12), (12, 20)]
STEPS, REFUSED = 7, (1, 2, 4, 6)  # a plain step, the first compressed one, a usual one, one before a failure


def quantization(bits, **options):
    return lambda group=None: QuantizationState(group, bits, 32, **options)


class Halved(Compressor):
    """A user's compressor: sends half of gradient + error, and counts its steps."""

    def __init__(self, bucket, options):
        self.error, self.num_steps = torch.zeros(sum(bucket.numels), dtype=bucket.dtype), torch.zeros(1)

    def average(self, flat, group, seed):
        self.error += flat
        flat.copy_(self.error / 2)
        self.error -= flat
        self.num_steps += 1
        torch.distributed.all_reduce(flat, group=group)
        flat /= group.size()

    def state(self):
        return {"error": self.error.clone(), "num_steps": self.num_steps.clone()}

    def load(self, state):
        self.error.copy_(state["error"])
        self.num_steps.copy_(state.get("num_steps", torch.zeros(1)))


KINDS = {
    "int4": quantization(4),
    "int8": quantization(8),
    "int4 with nodes": quantization(4, ranks_per_node=2),
    "PowerSGD": power_sgd,
    "PowerSGD of rank 1": lambda group=None: power_sgd(group, rank=1),
    "cold start": lambda group=None: power_sgd(group, warm_start=False),
    "no error feedback": lambda group=None: power_sgd(group, use_error_feedback=False),
    "int8 factors after 4 bits": lambda group=None: power_sgd(group, factor_dtype=torch.int8, start_bits=4),
    "a user's": lambda group=None: CompressorState(Halved, None, group),
}


def given(rank, step, dtype, scale=1.0):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    numel = sum(torch.Size(shape).numel() for shape in SHAPES)
    return (scale * torch.randn(numel, generator=generator, dtype=torch.float64)).to(dtype)


def kept_in(state):
    """Return everything that a state keeps, and its number of steps."""
    return {"iter": state.iter, **{str(key): entry for key, entry in entries_in(state).items()}}


def assert_same(found, expected, **within):
    assert found.keys() == expected.keys()
    for key, entry in expected.items():
        torch.testing.assert_close(found[key], entry, equal_nan=True, **within)


def train(rank, group, make, dtype, num_steps, refuses, device="cpu"):
    """Return (the averages of the kept steps, what the state keeps). Refused steps are larger, and undone."""
    state, averages = make(group), []
    state.keep_undo = True
    parameters = [nn.Parameter(torch.empty(shape, dtype=dtype, device="meta")) for shape in SHAPES]
    # Two buckets, the second of which is left out in some of the refused steps.
    numel = sum(each.numel() for each in parameters[:2])

    def average(step, number, scale=1.0, num_buckets=2):
        flat = given(rank, number, dtype, scale).to(device)
        buffers = [each.clone() for each in flat.split([numel, 21 * 12 + 12 * 20])]
        for index, members in enumerate((parameters[:2], parameters[2:])[:num_buckets]):
            state.average("hook", GradBucket(index, buffers[index], members, index == 1)).wait()
        if num_buckets == 1 and step != 6:  # step 6 is broken off by an error: it never ends
            state.end_step()
        return torch.cat(buffers)

    for step in range(num_steps):
        if refuses and step in REFUSED:
            average(step, step + 500, 10.0, 1 if step % 4 == 2 else 2)
            state.undo_step()
        averages.append(average(step, step))
    return averages, kept_in(state)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *((kind, torch.float32) for kind in KINDS),
        *(
            (kind, dtype)
            for kind in ("int4", "PowerSGD")
            for dtype in (torch.bfloat16, torch.float16, torch.float64)
        ),
    ],
    ids=str,
)
def test_run_equals_one_without_the_refused_steps(plain_torch, kind, dtype):
    compare(kind, dtype)


@pytest.mark.parametrize("kind", ["PowerSGD", "int4"])
def test_kernels(kind):
    compare(kind, torch.float32, num_steps=3)


def compare(kind, dtype, num_steps=STEPS):
    world_size = 4 if "nodes" in kind else 2
    expected = run_simulated(train, world_size, KINDS[kind], dtype, num_steps, False)
    found = run_simulated(train, world_size, KINDS[kind], dtype, num_steps, True)
    for (averages, kept), (expected_averages, expected_kept) in zip(found, expected, strict=True):
        assert all(map(torch.equal, averages, expected_averages))
        assert_same(kept, expected_kept, rtol=0, atol=0)


def rescale_and_copy(rank, group, make):
    """Undo a step in a copy, and rescale before undoing one. Returns pairs of what is kept and expected."""
    state = make(group)
    state.keep_undo = True
    parameters = [nn.Parameter(torch.empty(shape, device="meta")) for shape in SHAPES]

    def average(state, number):
        state.average("hook", GradBucket(0, given(rank, number, torch.float32), parameters, True)).wait()

    for step in range(3):
        average(state, step)
    before, copied, twice = kept_in(state), copy.deepcopy(state), copy.deepcopy(state)
    copied.process_group, copied.keep_undo = group, True
    twice.rescale_errors(2.0)
    for each in (state, copied):
        average(each, 3)
    state.rescale_errors(2.0)
    for each in (state, copied):
        each.undo_step()
    pairs = [(kept_in(copied), before), (kept_in(state), kept_in(twice))]
    for each in (state, copied, make(group)):
        with pytest.raises(RuntimeError, match=f"no backward to take back.* keep_undo is {each.keep_undo}"):
            each.undo_step()
    average(state, 3)
    state.load_state_dict(state.state_dict())
    with pytest.raises(RuntimeError, match="a checkpoint was loaded"):
        state.undo_step()
    return pairs


@pytest.mark.parametrize("kind", ["int4", "PowerSGD", "int8 factors after 4 bits", "a user's"])
def test_rescaled_errors_copies_and_what_cant_be_undone(plain_torch, kind):
    for pairs in run_simulated(rescale_and_copy, 2, KINDS[kind]):
        for found, expected in pairs:
            assert_same(found, expected)


def record(rank, group):
    """Return the steps of the rows that a recorder has, of four steps of which two were refused once."""
    state = KINDS["int4"](group)
    state.keep_undo, recorder = True, Recorder(state)
    parameters = [nn.Parameter(torch.empty(shape, device="meta")) for shape in SHAPES]
    for step in range(4):
        for is_refused in (True, False)[step % 2 :]:
            state.average("hook", GradBucket(0, given(rank, step, torch.float32), parameters, True)).wait()
            if is_refused:
                state.undo_step()
    recorder.complete()
    return [row["step"] for row in recorder.rows()]


def test_recorders_forget_refused_steps(plain_torch):
    assert run_simulated(record, 2) == [[0, 1, 2, 3]] * 2


def break_off(rank, group, make):
    """Return pairs of what a state keeps: before a backward that breaks off, and once it is undone."""
    state, pairs = make(group), []
    state.keep_undo = True
    parameters = [nn.Parameter(torch.empty(12, 20)) for _ in range(2)]
    state.number_parameters(zip("ab", parameters, strict=True))

    def step(*buckets, is_complete=True):
        for index, members in enumerate(buckets):
            buffer = torch.randn(240 * len(members))
            is_last = is_complete and index == len(buckets) - 1
            state.average("hook", GradBucket(index, buffer, members, is_last)).wait()

    def refused(*buckets):
        before = state.iter
        pairs.append([kept_in(state)])
        step(*buckets, is_complete=False)
        if buckets:  # a Reducer does this where no rank has used a parameter
            state.take_back(buckets[0][0], torch.ones(240))
        state.undo_step(before)
        pairs[-1].append(kept_in(state))
        step(parameters)

    step(parameters)
    for _ in range(3):
        step(parameters)
    refused()  # before the first bucket
    refused(parameters[:1])  # another bucket than usual
    refused(parameters)
    step(parameters)
    pairs.append([kept_in(state)])
    given, state.random_seed = state.random_seed, rank
    for _ in range(2):
        before = state.iter
        with pytest.raises(RuntimeError, match="random_seed is 0 on rank 0 and 1 on rank 1"):
            step(parameters)
        state.undo_step(before)
    pairs[-1].append(kept_in(state))
    state.random_seed = given
    step(parameters)
    state.number_parameters([("c", nn.Parameter(torch.empty(2)))])
    unnamed = make(group)
    unnamed.keep_undo = True
    for _ in range(4):
        unnamed.average("hook", GradBucket(0, torch.randn(480), parameters, True)).wait()
    unnamed.number_parameters(zip("ab", parameters, strict=True))
    with pytest.raises(RuntimeError, match="parameters were named since"):
        unnamed.undo_step()
    return pairs


@pytest.mark.parametrize("kind", ["int4", "PowerSGD"])
def test_backwards_that_break_off(plain_torch, kind):
    for pairs in run_simulated(break_off, 2, KINDS[kind]):
        for before, after in pairs:
            assert "a" in before
            assert "b" in before
            assert_same(after, before)


class RefusedError(Exception):
    pass


def loops(rank):
    """Return the gradients of kept steps, and what the state keeps, by loop and hook: without refused steps,
    and with them."""
    return [{f"{loop} {hook}": run(rank, loop, hook, refuses) for loop, hook in CASES} for refuses in (0, 1)]


HOOKS = {
    "int4": (quantization(4), quantization_hook),
    "PowerSGD": (power_sgd, powerSGD_hook),
    "batched": (power_sgd, batched_powerSGD_hook),
    "bf16 around int8 factors": (
        lambda: power_sgd(factor_dtype=torch.int8),
        bf16_compress_wrapper(powerSGD_hook),
    ),
    "auto": (lambda: AutoState(candidates=["int8", "int4"], start_iter=2, clock=lambda: 0.0), auto_hook),
}
CASES = [
    *(("torch's DDP", hook) for hook in HOOKS),
    *(("wrapper", "PowerSGD"), ("broken off", "int4"), ("broken off", "PowerSGD"), ("average_", "int4")),
    ("FSDP2", "int4"),
]


def averaged(loop, model, state, hook):
    """Return the forward of the model, averaged as in this loop; in "average_" run() does it, by keys."""
    if loop == "FSDP2":
        fully_shard(model)
        compress_reduce_scatter(model, state)
        return model
    way = {"torch's DDP": "torch", "average_": "none"}.get(loop, "gradcomp")
    return Averaged(model, way, hook, state, **({"bucket_cap_mb": 0.001} if way == "gradcomp" else {}))


def run(rank, loop, hook_name, refuses):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
    make, hook = HOOKS[hook_name]
    state, gradients = make(), []
    state.keep_undo = True
    forward = averaged(loop, model, state, hook)
    first = next(iter(model.parameters()))

    def backward(number, scale=1.0, breaks=False):
        model.zero_grad()
        generator = torch.Generator().manual_seed(100 * number + rank)
        handle = first.register_hook(fail) if breaks else None
        try:
            (scale * forward(torch.randn(8, 32, generator=generator)).square().mean()).backward()
        except RefusedError:
            with pytest.raises(RuntimeError, match="Expected to have finished reduction"):
                forward.averager.finalize_backward()
        finally:
            if handle is not None:
                handle.remove()
        found = [each.grad for each in model.parameters()]
        if loop == "average_":
            gradcomp.average_(found, hook, state, keys=range(len(found)))
        return [
            each.to_local().clone() if isinstance(each, DTensor) else each.clone()
            for each in found
            if each is not None
        ]

    for step in range(6):
        if refuses and step in (1, 2, 4):
            backward(step + 500, 10.0, breaks=loop == "broken off" and step != 1)
            state.undo_step()
        gradients.append(backward(step))
    return gradients, kept_in(state)


def fail(gradient):
    raise RefusedError


def test_training_loops(run_ranks):
    for expected, found in run_ranks(loops, 2):
        for name, (gradients, kept) in expected.items():
            torch.testing.assert_close(found[name][0], gradients, rtol=0, atol=0, msg=name)
            assert_same(found[name][1], kept, rtol=0, atol=0)
