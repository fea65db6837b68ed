"""Plans take scratches in turns: as many as there are plans under way, and always the same bits."""

import weakref

import pytest
import torch

from gradcomp.kernels.powersgd.bucket import take_scratch
from gradcomp.kernels.powersgd.plan import PowerSGDPlan
from gradcomp.layout import PowerSGDLayout
from tests.kernels.powersgd.ranks import COMPRESS_ALL, random_grads, step

FP32, BF16 = torch.float32, torch.bfloat16
OPTIONS = {"error_feedback": True, "warm_start": True, "epsilon": 0.0, "seed": 0}
# The second bucket needs more scratch than the first, so that it grows between them.
SMALL, LARGE = [(40, 30), (7,)], [(70, 45), (13,), (33, 130)]


def plan_of(shapes, dtype, device):
    return PowerSGDPlan(PowerSGDLayout(shapes, 4, COMPRESS_ALL), dtype, device, **OPTIONS)


def test_plans_that_take_turns_have_one_memory(device):
    plans = [plan_of(shapes, FP32, device) for shapes in (SMALL, LARGE, SMALL)]
    assert not any(hasattr(plan, "p_wire") for plan in plans), "memory before the first step"
    for _ in range(2):
        for plan in plans:
            step([plan], random_grads(plan.layout, FP32, device, 0))
    assert len({id(plan._scratch) for plan in plans}) == 1
    memory = plans[0]._scratch.memory
    assert memory.numel() == max(plan._bucket.scratch_bytes for plan in plans)
    storages = {plan.p_wire.untyped_storage().data_ptr() for plan in plans}
    assert storages == {memory.untyped_storage().data_ptr()}


def test_growing_frees_the_old_memory(device):
    small = plan_of(SMALL, FP32, device)
    step([small], random_grads(small.layout, FP32, device, 0))
    wire = small.p_wire
    large = plan_of(LARGE, FP32, device)
    step([large], random_grads(large.layout, FP32, device, 0))
    assert wire.untyped_storage().nbytes() == 0


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_plans_under_way_together_have_scratches_of_their_own(dtype, device):
    """Each gets its own again in the next step. The bits are those of plans that take turns."""
    results, before = [], []
    for together in (False, True):
        plans = [plan_of(shapes, dtype, device) for shapes in (SMALL, LARGE)]
        for seed in range(2):
            grads = [random_grads(plan.layout, dtype, device, seed)[0] for plan in plans]
            if together:
                for stage, *arguments in (("project", 1.0), ("back_project", 1.0), ("reconstruct", 0)):
                    for plan, grad in zip(plans, grads, strict=True):
                        getattr(plan, stage)(grad, *arguments)
                scratches = [plan._scratch for plan in plans]
                assert len(set(scratches)) == 2
                assert scratches == before or not seed
                before = scratches
            else:
                for plan, grad in zip(plans, grads, strict=True):
                    step([plan], [grad])
                    plan._scratch.memory.fill_(0xFF)  # NaN in every dtype
        results.append([*grads, *(plan.error() for plan in plans)])
    for in_turns, apart in zip(*results, strict=True):
        assert torch.equal(in_turns, apart)


def test_a_plan_that_an_error_has_stopped_goes_on_with_its_scratch(device):
    stopped, other = (plan_of(SMALL, FP32, device) for _ in range(2))
    (grad,) = random_grads(stopped.layout, FP32, device, 0)
    stopped.project(grad.clone(), 1.0)
    scratch = stopped._scratch
    step([other], random_grads(other.layout, FP32, device, 0))
    assert other._scratch is not scratch
    step([stopped], [grad])
    assert stopped._scratch is scratch
    assert not scratch.is_taken


def test_the_scratch_goes_with_its_last_plan(device):
    plan = plan_of(SMALL, FP32, device)
    step([plan], random_grads(plan.layout, FP32, device, 0))
    scratch = take_scratch(device, None, 1)
    assert scratch is plan._scratch
    scratch.is_taken = False
    memory = weakref.ref(scratch.memory)
    del plan, scratch
    assert memory() is None


@pytest.mark.parametrize("shapes", [SMALL, [(5,)]])
def test_parts_are_aligned_and_apart(shapes, device):
    """Without matrices three of the four parts are empty."""
    plan = plan_of(shapes, BF16, device)
    plan.take_scratch()
    bucket = plan._bucket
    parts = [bucket.partial, bucket.p_wire, bucket.q_wire, bucket.grams]
    work = bucket.work
    numels = [work.partial_numel, work.p_wire_numel, work.q_wire_numel, work.grams_numel]
    dtypes = [FP32, BF16, BF16, torch.float64]
    assert [(part.numel(), part.dtype) for part in parts] == list(zip(numels, dtypes, strict=True))
    for value, part in enumerate(parts):
        part.fill_(value)
    assert all(part.eq(value).all() for value, part in enumerate(parts))
    start = parts[0].untyped_storage().data_ptr()
    assert all((part.data_ptr() - start) % 256 == 0 for part in parts if part.numel())
