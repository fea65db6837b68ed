"""Compare whole PowerSGD steps in Triton, on simulated ranks, with the algorithm in float64."""

import math

import pytest
import torch
from triton.runtime import interpreter

from gradcomp.kernels.powersgd import tile
from gradcomp.kernels.powersgd import work as powersgd_work
from gradcomp.layout import PowerSGDLayout
from tests.depth import everyday
from tests.hooks.powersgd_oracle import relative
from tests.kernels.powersgd.ranks import (
    MIXED,
    check_step,
    directions_of,
    matrices_of,
    on_wire,
    orthonormal,
    panel_of,
    plans_of,
    random_grads,
    step,
    sums_of,
)
from tests.oracle import powersgd_average
from tests.tolerances import POWERSGD_STAGE as STAGE
from tests.tolerances import POWERSGD_STAGE_DOT as STAGE_DOT
from tests.tolerances import POWERSGD_STEP as STEP

FP64, FP32, FP16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
# One row, one column, primes, one element more or less than a block in both directions, several chunks of a
# slim matrix. The vectors between them make the offsets odd. One vector is longer than COPY_BLOCK.
AWKWARD = [(3,), (1, 70), (5,), (70, 1), (1,), (31, 37), (33, 65), (2100,), (32, 64), (10, 523), (523, 10)]


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """Let every program walk through several tiles, as in a large bucket."""
    monkeypatch.setattr(powersgd_work, "NUM_PROGRAMS", dict.fromkeys(powersgd_work.NUM_PROGRAMS, 4))


STEPS = [(FP32, 3, 1), (BF16, 16, 1), (FP64, 3, 2), (FP32, 1, 1), (FP32, 16, 1), (BF16, 3, 1)]


@pytest.mark.parametrize(("dtype", "rank", "world_size"), everyday(STEPS[:2], STEPS), ids=str)
def test_awkward_shapes(dtype, rank, world_size, device):
    plans = plans_of(AWKWARD, rank, dtype, device, world_size=world_size)
    for seed in range(2):
        check_step(plans, random_grads(plans[0].layout, dtype, device, seed, world_size))


ALIGNED = [(FP32, 4), (FP16, 32), (BF16, 4), (FP32, 32), (FP64, 16)]


@pytest.mark.parametrize(("dtype", "rank"), everyday(ALIGNED[:2], ALIGNED), ids=str)
def test_on_and_off_16_bytes(dtype, rank, device):
    """Compare the branch with wide accesses with the branch for a bucket that isn't aligned to 16 bytes."""
    (on,), (off,) = (plans_of([(40, 72), (8,), (32, 64)], rank, dtype, device) for _ in range(2))
    for seed in range(2):
        (grad,) = random_grads(on.layout, dtype, device, seed)
        home = torch.cat([grad[:1], grad])
        before = home[0].clone()
        check_step([on], [grad])
        check_step([off], [home[1:]])
        assert relative(home[1:].double(), grad.double()) <= STEP[dtype]
        assert torch.equal(home[0], before), "wrote outside the bucket"


@pytest.mark.smallest
@pytest.mark.parametrize(("rank", "warm_start"), [(4, True), (16, False), (40, True)])
def test_without_error_feedback(rank, warm_start, device):
    plans = plans_of(MIXED, rank, FP32, device, error_feedback=False, warm_start=warm_start)
    assert not plans[0]._bucket.memory.numel()
    for seed in range(2):
        check_step(plans, random_grads(plans[0].layout, FP32, device, seed))
    assert not plans[0].error().any()


def test_without_warm_start(device):
    """Every step projects on new random columns, equal on all ranks, and feeds the error back."""
    plans = plans_of([(33, 67)], 4, FP32, device, world_size=2, warm_start=False)
    seen = []
    for seed in range(3):
        directions = [plan.directions()[0] for plan in plans]
        assert torch.equal(*directions)
        assert not any(torch.equal(directions[0], other) for other in seen)
        seen.append(directions[0])
        check_step(plans, random_grads(plans[0].layout, FP32, device, seed, 2), seed + 1)


@pytest.mark.smallest
@pytest.mark.parametrize("rank", [3, 16])
def test_every_stage(rank, device):
    """Compare each stage with float64, from the outputs of the stage before it."""
    (plan,) = plans_of(MIXED, rank, FP32, device)
    bound = STAGE[FP32] if rank <= 8 else STAGE_DOT
    first, grad = (random_grads(plan.layout, FP32, device, seed)[0] for seed in range(2))
    step([plan], [first])
    sums, directions = sums_of(plan, grad), [each.double().cpu() for each in plan.directions()]
    plan.project(grad, 0.5)
    for i, (total, direction) in enumerate(zip(sums, directions, strict=True)):
        assert relative(plan._matrix(i).double().cpu(), total) <= bound
        assert relative(on_wire(plan, i, "p"), 0.5 * total @ direction) <= bound
    plan.back_project(grad, 0.5)
    for i, total in enumerate(sums):
        p = panel_of(plan, i, "p")
        assert relative(p, orthonormal(on_wire(plan, i, "p"))) <= 10 * bound
        assert relative(on_wire(plan, i, "q"), 0.5 * total.T @ p) <= bound
    plan.reconstruct(grad, 0)
    for i, output in enumerate(matrices_of(plan.layout, grad)):
        q = panel_of(plan, i, "q")
        assert torch.equal(q, on_wire(plan, i, "q"))
        assert relative(output, panel_of(plan, i, "p") @ q.T) <= bound
        direction = plan.directions()[i].double().cpu()
        length, scale = direction.norm(dim=0), (direction / q)[0]
        assert torch.equal(direction, q * scale), "a random column in place of a good one"
        assert torch.equal(scale.log2(), scale.log2().round())
        assert ((length > 0.5) & (length <= 1)).all()


@pytest.mark.parametrize(("dtype", "rank"), [(BF16, 8), (FP16, 16)], ids=str)
def test_the_error_includes_the_rounding_of_the_output(dtype, rank, device):
    """At full rank the error is rounding alone. With a gradient of zero, the next M is the error."""
    (plan,) = plans_of([(rank, 70)], rank, dtype, device)
    (grad,) = random_grads(plan.layout, dtype, device, 0)
    step([plan], [grad])
    expected = plan._matrix(0).double().cpu() - matrices_of(plan.layout, grad)[0]
    plan.project(torch.zeros_like(grad), 1.0)
    assert relative(plan._matrix(0).double().cpu(), expected) <= STAGE[dtype]
    assert 0 < expected.norm() < 0.1 * grad.double().norm()


@pytest.mark.parametrize("numel", [70 * 70 - 3, 70 * 69 - 2, 72 * 72 - 5])
def test_a_matrix_whose_end_does_not_exist(numel, device):
    """The batched hook makes a square with more elements than its bucket. The surplus ones are zeros."""
    plans = plans_of(PowerSGDLayout.square(numel, 4), 4, FP32, device)
    side = plans[0].layout.matrices[0].cols
    assert side * side > numel
    assert (side % 4 == 0) == (numel > 70 * 70), "rows on 16 bytes, of which the last lacks its end"
    for seed in range(2):
        # Memory beyond the end belongs to other tensors.
        home = torch.full((numel + 200,), math.nan, device=device)
        grad = home[:numel]
        grad.copy_(random_grads(plans[0].layout, FP32, device, seed)[0])
        (total,), (direction,) = sums_of(plans[0], grad), directions_of(plans[0])
        step(plans, [grad])
        expected = powersgd_average([total], direction)[0].flatten()[:numel]
        assert relative(grad.double().cpu(), expected) <= STEP[FP32]
        assert home[numel:].isnan().all()
        assert not plans[0]._matrix(0).flatten()[numel:].any()


SAME_BITS = [(FP32, 4), (FP16, 16), (FP32, 40), (FP32, 16), (FP16, 4)]


@pytest.mark.parametrize(("dtype", "rank"), everyday(SAME_BITS[:3], SAME_BITS), ids=str)
def test_launches_their_programs_order_and_what_scratch_held_change_no_bits(dtype, rank, device, monkeypatch):
    """A block's last program adds partial sums up; on ROCm a second launch does.

    In the interpreter, programs run in one order, then in the other.
    """
    monkeypatch.setattr(powersgd_work, "NUM_PROGRAMS", dict.fromkeys(powersgd_work.NUM_PROGRAMS, 16))
    results, num_launches = [], []

    def take_step(poison):
        (plan,) = plans_of(
            [(33, 300), (5,), (300, 33)] if rank < 40 else [(40, 72), (4,)], rank, dtype, device
        )
        assert max(row[6] for row in plan._work.project_work) > 2 or rank == 40
        for scratch in (plan._bucket.partial, plan.p_wire, plan.q_wire):
            scratch.fill_(poison)
        (grad,) = random_grads(plan.layout, dtype, device, 0)
        step([plan], [grad])
        assert not plan._bucket.arrived.any()
        num_launches.append([len(each._launches) for each in (plan._projecting, plan._back_projecting)])
        kept = plan._bucket.memory, plan._bucket.p, plan._bucket.q, plan._bucket.norms
        results.append((plan.p_wire, plan.q_wire, grad, *kept))

    take_step(math.nan)
    if device.type == "cpu":
        builder = interpreter.interpreter_builder
        set_grid_idx = builder.set_grid_idx
        monkeypatch.setattr(
            builder, "set_grid_idx", lambda x, y, z: set_grid_idx(builder.grid_dim[0] - 1 - x, y, z)
        )
    take_step(1e30 if dtype == FP32 else 1e4)
    monkeypatch.setattr(tile, "is_rocm", lambda: True)
    take_step(math.nan)
    assert num_launches == [num_launches[0]] * 2 + [[each + 1 for each in num_launches[0]]]
    for one, *others in zip(*results, strict=True):
        assert all(torch.equal(one, other) for other in others)


def test_nothing_to_compress(device):
    plans = plans_of([(5,), (2100,), (0,), (1,)], 4, FP32, device, world_size=2)
    assert not plans[0].layout.matrices
    check_step(plans, random_grads(plans[0].layout, FP32, device, 0, 2))
