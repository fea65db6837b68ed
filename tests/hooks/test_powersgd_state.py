"""Test PowerSGDState: its arguments, groups, random projections and memory."""

import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_powersgd

from gradcomp.hooks import powerSGD_hook
from tests.hooks.powersgd_oracle import Bucket, compressed, positions, random_gradient
from tests.hooks.powersgd_runs import (
    COMMON,
    FEW_SHAPES,
    HOOKS,
    MATRICES,
    START,
    equal,
    new_state,
    run_steps,
    simulate,
)
from tests.kept import directions_in, error_in
from tests.ranks import of_all_ranks


@pytest.mark.parametrize(
    ("error_feedback", "warm_start"), [(True, True), (True, False), (False, True)], ids=str
)
@pytest.mark.parametrize("start", [1, 0, -3])
def test_compression_that_starts_too_early(error_feedback, warm_start, start):
    options = {"start_powerSGD_iter": start, "use_error_feedback": error_feedback, "warm_start": warm_start}
    message = (
        r"Expect `start_powerSGD_iter` > 1 if `use_error_feedback` or `warm_start` is enabled, "
        r"because PowerSGD can only be applied after the first two iterations in DDP\."
    )
    for module in (torch_powersgd, powerSGD_hook):
        with pytest.raises(ValueError, match=message):
            module.PowerSGDState(None, **options)
    with pytest.raises(ValueError, match=rf"{message} Got {start}\."):
        powerSGD_hook.PowerSGDState(None, **options)
    neither = options | {"use_error_feedback": False, "warm_start": False}
    assert powerSGD_hook.PowerSGDState(None, **neither).start_powerSGD_iter == start


def compress_from_the_first_step(rank):
    state = new_state(start_powerSGD_iter=0, warm_start=False, use_error_feedback=False)
    outputs = run_steps(state, rank, range(3), [(64, 48)])
    return state.compression_stats()[0], outputs


def test_without_warm_start_or_error_feedback_compression_may_start_at_once():
    for rate, outputs in simulate(compress_from_the_first_step, 2):
        assert rate > 2
        assert all(torch.linalg.matrix_rank(output.view(64, 48)) == 2 for output in outputs)


def test_defaults_and_positions_of_arguments_are_torchs():
    arguments = (None, 3, 5, 1.5, False, False, 1e-6, 4, 0, True)
    for given in (arguments[:1], arguments):
        ours, theirs = powerSGD_hook.PowerSGDState(*given), torch_powersgd.PowerSGDState(*given)
        for name in ("process_group", *COMMON):
            assert getattr(ours, name) == getattr(theirs, name), name


def draw(rank, seed, disturb):
    state = powerSGD_hook.PowerSGDState(None, 2, START, random_seed=seed)
    torch.manual_seed(rank if disturb else 0)
    before = torch.random.get_rng_state()
    for step in range(START + 1):
        powerSGD_hook.powerSGD_hook(state, Bucket(random_gradient(MATRICES, rank, step), MATRICES)).wait()
    assert torch.equal(before, torch.random.get_rng_state()), "the user's generator was used"
    buckets = [
        Bucket(random_gradient([(64, 48)], rank, 0), [(64, 48)], index, index == 1) for index in (0, 1)
    ]
    same = [powerSGD_hook.powerSGD_hook(state, bucket).wait() for bucket in buckets]
    return directions_in(state), same


def test_random_projections():
    """Projections depend on random_seed alone. The user's generators may differ between ranks."""
    first, second = simulate(draw, 2, 0, True)
    (other_seed, _), _ = simulate(draw, 2, 1, False)
    for mine, theirs, other in zip(first[0], second[0], other_seed, strict=True):
        assert torch.equal(mine, theirs)
        assert not torch.equal(mine, other)


def in_autocast(rank, enabled):
    with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
        return run_steps(new_state(), rank, range(START + 3))


def test_autocast_around_backward_changes_nothing():
    """A training loop may call backward within autocast, and so call the hooks there."""
    for results, expected in zip(
        simulate(in_autocast, 2, True), simulate(in_autocast, 2, False), strict=True
    ):
        assert all(map(torch.equal, results, expected))


@pytest.mark.simulated_ranks(1)
def test_wrong_states_and_buckets_are_refused(rank):
    messages = []
    state = powerSGD_hook.PowerSGDState(None)
    wrong = [
        (None, torch.ones(4)),
        (dist.group.WORLD, torch.ones(4)),
        (state, torch.ones(4).long()),
        (torch_powersgd.PowerSGDState(None, start_powerSGD_iter=2), torch.ones(4)),
    ]
    for hook in (powerSGD_hook.powerSGD_hook, powerSGD_hook.batched_powerSGD_hook):
        for given, buffer in wrong:
            with pytest.raises(TypeError) as error:
                hook(given, Bucket(buffer))
            messages.append(str(error.value))
    for name, own in (("powerSGD_hook", messages[:4]), ("batched_powerSGD_hook", messages[4:])):
        assert own[0] == f"{name} takes a gradcomp PowerSGDState as its state, got None"
        assert own[1].startswith(f"{name} takes a gradcomp PowerSGDState as its state, got an object of ")
        assert own[2] == f"{name} compresses floating-point buckets, got torch.int64"
        assert own[3].endswith("an object of type PowerSGDState, torch's own")


@pytest.mark.simulated_ranks(2)
@pytest.mark.parametrize("hook", ["powerSGD", "batched"])
def test_odd_buckets(rank, hook):
    """Run the hook on buckets with nothing to compress, with one element, and with no elements."""
    hook_name = hook
    results = []
    for shapes in ([(7,), (3,)], [(1,)], [(0,)], [(0, 4), (64, 48)], [(1, 1)]):
        state = powerSGD_hook.PowerSGDState(None, 1, START)
        for step in range(START + 3):
            gradient = random_gradient(shapes, rank, step)
            output = HOOKS[hook_name](state, Bucket(gradient.clone(), shapes)).wait()
        results.append((gradient, output, error_in(state)))
    for mine, theirs in zip(*of_all_ranks(results), strict=True):
        assert mine[1].shape == mine[0].shape
        assert torch.equal(mine[1], theirs[1])
        assert mine[1].isfinite().all()
        if hook == "powerSGD" and mine[0].numel() < 64:
            assert torch.allclose(mine[1], (mine[0] + theirs[0]) / 2)


def memory_of_gradient_size(rank, shapes, options, hook, dtype):
    state = powerSGD_hook.PowerSGDState(None, 2, START, **options)
    run_steps(state, rank, range(START + 2), shapes, hook, dtype)
    seen, storages, queue = set(), {}, [state]
    while queue:
        item = queue.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            storages[item.untyped_storage().data_ptr()] = item.untyped_storage().nbytes()
        elif isinstance(item, dict):
            queue += item.values()
        elif isinstance(item, list | tuple):
            queue += item
        elif hasattr(item, "__dict__"):
            queue += vars(item).values()
    return sum(storages.values())


@pytest.mark.parametrize("error_feedback", [True, False])
@pytest.mark.parametrize(
    # scratch: numel of the fp32 matrix that plain torch needs besides. The square has 943 rows.
    ("hook", "dtype", "scratch"),
    [
        ("powerSGD", torch.float32, 0),
        ("powerSGD", torch.bfloat16, 512 * 512),
        ("batched", torch.float32, 943**2),
        ("batched", torch.bfloat16, 943**2),
    ],
)
def test_memory_is_the_error_and_small_factors(error_feedback, hook, dtype, scratch):
    shapes = [(512, 512)] * 2 + [(256, 512), (512, 256), (512, 200), (100,)]
    options = {"use_error_feedback": error_feedback}
    (held_bytes,) = simulate(memory_of_gradient_size, 1, shapes, options, hook, dtype)
    numel = sum(math.prod(shape) for shape in shapes)
    factors = 0.25 * 4 * numel  # including their copies in fp64
    assert held_bytes <= error_feedback * dtype.itemsize * (numel + 943) + 4 * scratch + factors


@pytest.mark.simulated_ranks(2)
def test_what_a_state_dict_holds(rank):
    """It holds errors of compressed tensors alone, and one Q [cols, rank] per matrix, by shape."""
    state = new_state()
    run_steps(state, rank, range(START + 3))
    first, second = of_all_ranks((error_in(state), directions_in(state)))
    mask = positions(FEW_SHAPES, compressed(FEW_SHAPES, 2))
    for error, directions in (first, second):
        assert error[mask].any()
        assert not error[~mask].any()
        assert [tuple(each.shape) for each in directions] == [(48, 2), (48, 2), (90, 2)]
    assert equal(first[1], second[1])
    assert not torch.equal(first[0], second[0])
